"""An OpenAI-compatible server that runs already, as far as all who speak to one agree."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from eagle3pack.errors import UsageError

if TYPE_CHECKING:
    import httpx

API_KEY_VARIABLE = "VLLM_API_KEY"  # the name that `vllm serve` itself reads
CONNECT_TIMEOUT_S = 10.0  # also for answers that cost a server nothing, such as its list of models
NO_SERVER_HINT = "Is this vLLM, or another OpenAI-style server, and the URL its root?"


def server_url(text: str) -> str:
    """The server's root: no /v1, no trailing slash.

    Args:
        text: as the user gave it.

    Raises:
        UsageError: not an http(s) URL, or one with a password in it, which reports would show.
    """
    try:
        parts = urlsplit(text)
        fits = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # a port that is none, or half an IPv6 address
        fits = False
    if not fits:
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


def json_of(response: httpx.Response) -> Any:
    """What an answer holds.

    Raises:
        ValueError: no JSON, or JSON that is nested beyond all sense.
    """
    try:
        return response.json()
    except RecursionError:
        raise ValueError("nested too deeply") from None


def in_brief(response: httpx.Response) -> str:
    """Status and message of an error answer, in one line."""
    message = None
    try:
        body = json_of(response)
        error = body.get("error", body)
        message = error.get("message") if isinstance(error, dict) else error
    except (ValueError, AttributeError):
        if "html" in response.headers.get("content-type", ""):
            message = "a web page"
    text = " ".join(str(message or response.text).split())
    return f"HTTP {response.status_code}: {text[:300] or 'nothing'}"
