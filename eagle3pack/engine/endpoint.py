"""An OpenAI-compatible server that runs already, as far as all who speak to one agree."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from eagle3pack.errors import UsageError

if TYPE_CHECKING:
    import httpx

API_KEY_VARIABLE = "VLLM_API_KEY"  # the name that `vllm serve` itself reads
CONNECT_TIMEOUT_S = 10.0


def server_url(text: str) -> str:
    """The server's root: no /v1, no trailing slash.

    Args:
        text: as the user gave it.

    Raises:
        UsageError: not an http(s) URL, or one with a password in it, which reports would show.
    """
    parts = urlsplit(text)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise UsageError("must be a URL such as http://host:8000", where=f"--endpoint {text}")
    if parts.username or parts.password:
        raise UsageError(
            "must not hold a password",
            where="--endpoint",
            hint=f"Put the API key into {API_KEY_VARIABLE}.",
        )
    return f"{parts.scheme}://{parts.netloc}{parts.path.rstrip('/').removesuffix('/v1')}"


def request_headers() -> dict[str, str]:
    """What authorises us, if anything."""
    key = os.environ.get(API_KEY_VARIABLE)
    return {"Authorization": f"Bearer {key}"} if key else {}


def trusts_proxies(url: str) -> bool:
    """Whether proxies from the environment apply: not to this machine."""
    return "//127.0.0.1" not in url and "//localhost" not in url


def in_brief(response: httpx.Response) -> str:
    """Status and message of an error answer, in one line."""
    try:
        body = response.json()
        error = body.get("error", body)
        message = error.get("message", "") if isinstance(error, dict) else str(error)
    except (ValueError, AttributeError):
        message = response.text
    return f"HTTP {response.status_code}: {' '.join(str(message).split())[:300]}"
