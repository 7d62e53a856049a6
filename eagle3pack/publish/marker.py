"""The last line of a card: what it was made from, and whether anyone edited it since."""

from __future__ import annotations

import hashlib
import re

_MARKER = re.compile(
    r"\n<!-- eagle3pack:card 1 inputs=(?P<inputs>[0-9a-f]{64}) body=(?P<body>[0-9a-f]{64}) -->\n\Z"
)


def signed(body: str, inputs_sha256: str) -> str:
    """A card with its marker; `body` ends with a newline."""
    return f"{body}\n<!-- eagle3pack:card 1 inputs={inputs_sha256} body={_sha256(body)} -->\n"


def is_ours(card: str) -> bool:
    """This tool wrote the card, and nobody changed it."""
    card = card.replace("\r\n", "\n")
    match = _MARKER.search(card)
    return match is not None and _sha256(card[: match.start()]) == match["body"]


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8")).hexdigest()
