"""Values that know where they come from, so that a card can hold no number without a source.

A document (a report, config.json, publish.yaml, ...) is wrapped in a `Node`; what a template takes from
it stays bound to the document's sha256 and to a JSON pointer (RFC 6901). Rendering writes each value
between two marks that no text contains, and enters it in the ledger; a digit outside of the marks has no
source, and `require_sources` refuses it.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from pathlib import Path
from typing import Any

from eagle3pack.documents import read_file
from eagle3pack.errors import InputError

OPEN, CLOSE = "\ue000", "\ue001"  # private use: they mark a bound value while a card is rendered
_BOUND = re.compile(f"{OPEN}[^{CLOSE}]*{CLOSE}")
_CODE = re.compile(r"```.*?```|`[^`\n]*`", re.S)
_ADDRESS = re.compile(r"https?://\S+|\]\([^)]*\)")
# A word that begins with a letter is a name, whatever follows: EAGLE3, vLLM, MiniMax-M3, H200, v1.2.
NAME = re.compile(r"(?<![\w.])(?:arXiv:[\d.]+|[A-Za-z][\w.+-]*)", re.ASCII)


@dataclass(frozen=True, slots=True)
class Source:
    """Where a value stands.

    Attributes:
        document: its name.
        sha256: of the document.
        pointer: JSON pointer in it.
    """

    document: str
    sha256: str
    pointer: str


@dataclass(frozen=True, slots=True)
class Document:
    """A parsed document and the digest of its bytes; floats are Decimal, with their digits as written."""

    name: str
    sha256: str
    value: Any

    @property
    def root(self) -> Node:
        """The whole of it."""
        return Node(self, "", self.value)

    def at(self, pointer: str) -> Node:
        """The value at a JSON pointer.

        Raises:
            InputError: there is none.
        """
        node = self.root
        for part in pointer.split("/")[1:]:
            key = part.replace("~1", "/").replace("~0", "~")
            if isinstance(node.raw, list):
                found = node[int(key)] if key.isdigit() and int(key) < len(node) else None
            else:
                found = node[key]
            if found is None or found.raw is None:
                raise InputError(f"{pointer} is not in {self.name}")
            node = found
        return node


def json_document(name: str, content: bytes) -> Document:
    """Parse JSON so that numbers keep the digits that were written.

    Raises:
        InputError: it is no JSON.
    """
    try:
        value = json.loads(content, parse_float=Decimal)
    except (ValueError, RecursionError) as error:
        raise InputError(f"is no JSON ({error})", where=name) from None
    return Document(name, hashlib.sha256(content).hexdigest(), value)


def read_document(name: str, path: Path) -> Document:
    """Read a JSON file.

    Raises:
        InputError: it cannot be read or is no JSON.
        PermissionDenied: it may not be read.
    """
    return json_document(name, read_file(path))


class Node:
    """A value in a document. Keys and items of it are nodes again; a missing key is a node of None."""

    __slots__ = ("_document", "_pointer", "raw")

    def __init__(self, document: Document, pointer: str, raw: Any) -> None:
        self._document = document
        self._pointer = pointer
        self.raw = raw

    @property
    def source(self) -> Source:
        """Where it stands."""
        return Source(self._document.name, self._document.sha256, self._pointer)

    def __getitem__(self, key: str | int) -> Node:
        if isinstance(self.raw, list) and isinstance(key, int):
            child = self.raw[key]
        else:
            child = self.raw.get(key) if isinstance(self.raw, dict) else None
        part = str(key).replace("~", "~0").replace("/", "~1")
        return Node(self._document, f"{self._pointer}/{part}", child)

    def __getattr__(self, key: str) -> Node:
        if key.startswith("__"):
            raise AttributeError(key)
        return self[key]

    def __iter__(self) -> Iterator[Node]:
        return (self[i] for i in range(len(self.raw or [])))

    def __len__(self) -> int:
        return len(self.raw) if self.raw else 0

    def __bool__(self) -> bool:
        return bool(self.raw)


@dataclass(frozen=True, slots=True)
class Bound:
    """Text made of values, with their sources."""

    text: str
    sources: tuple[Source, ...]

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True, slots=True)
class Entry:
    """One value on a card."""

    text: str
    sources: tuple[Source, ...]


@dataclass(slots=True)
class Ledger:
    """Every value on a card, in the order of the text."""

    entries: list[Entry] = field(default_factory=list)

    def write(self, value: object) -> str:
        """Enter what a template prints; plain text passes as it is."""
        if isinstance(value, Node):
            value = text(value)
        if not isinstance(value, Bound):
            return str(value)
        self.entries.append(Entry(value.text, value.sources))
        return f"{OPEN}{value.text}{CLOSE}"

    def as_json(self) -> list[dict[str, Any]]:
        """The ledger for a program."""
        return [
            {
                "text": entry.text,
                "sources": [
                    {"document": s.document, "pointer": s.pointer, "sha256": s.sha256} for s in entry.sources
                ],
            }
            for entry in self.entries
        ]


def require_sources(marked: str) -> str:
    """The finished text, if each of its digits comes from a bound value, a name, code or an address.

    Raises:
        InputError: one does not.
    """
    rest = _ADDRESS.sub(" ", _CODE.sub(" ", _BOUND.sub(" ", marked)))
    for line in rest.splitlines():
        if orphan := re.search(r"\S*\d\S*", NAME.sub(" ", line)):
            raise InputError(
                f"{orphan[0]!r} in {line.strip()[:80]!r} has no source", where="card", hint="Bind it."
            )
    return marked.replace(OPEN, "").replace(CLOSE, "")


# How values are written


def bound(written: str, *nodes: Node) -> Bound:
    """A text that follows from these values."""
    return Bound(written, tuple(node.source for node in nodes))


def escaped(value: object) -> str:
    """A string of a document as one line of Markdown text."""
    line = " ".join(str(value).replace(OPEN, "").replace(CLOSE, "").split())
    return re.sub(r"([\\`*\[\]<>|])", r"\\\1", line)


def text(node: Node) -> Bound:
    """A value as text; a whole number with its thousands apart."""
    raw = node.raw
    if isinstance(raw, bool) or raw is None:
        return bound(str(raw).lower(), node)
    if isinstance(raw, int):
        return bound(f"{raw:,}", node)
    if isinstance(raw, list):
        return bound(", ".join(escaped(item) for item in raw), node)
    return bound(escaped(raw), node)


def code(node: Node) -> Bound:
    """A value as inline code."""
    line = " ".join(str(node.raw).replace("`", "'").replace(OPEN, "").replace(CLOSE, "").split())
    return bound(f"`{line}`".replace("|", "\\|"), node)


def plain(node: Node) -> Bound:
    """A value as it stands, for a block of code."""
    return bound(" ".join(str(node.raw).replace("`", "'").split()), node)


def fixed(value: float, digits: int, *nodes: Node) -> Bound:
    """A number with so many digits after the point."""
    return bound(f"{value:.{digits}f}", *nodes)


def as_written(node: Node, *, percent: bool = False, digits: int) -> Bound:
    """A rate: with its own digits where a person wrote them, else with `digits`."""
    raw = node.raw
    if isinstance(raw, Decimal) and len(str(raw)) < 10:  # more digits were computed, not written
        shown = raw.scaleb(2) if percent else raw
        return bound(f"{shown:f}" + (" %" if percent else ""), node)
    number = float(raw) * (100 if percent else 1)
    return bound(f"{number:.{digits}f}" + (" %" if percent else ""), node)


def billions(node: Node) -> Bound:
    """A number of parameters as people say it: 3.11 B, 51 M."""
    for unit, size in (("B", 1e9), ("M", 1e6), ("K", 1e3)):
        if node.raw >= size:
            return bound(f"{node.raw / size:.3g} {unit}", node)
    return text(node)


def gigabytes(nodes: Sequence[Node]) -> Bound:
    """A size in bytes as people read it, in powers of ten as the hubs count."""
    size = sum(node.raw for node in nodes)
    for unit, factor in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if size >= factor:
            return bound(f"{size / factor:.3g} {unit}", *nodes)
    return bound(f"{size} B", *nodes)
