"""The author's free text: no number and no claim in it that is not bound to a document.

A number is bound by naming where it stands: `{{ report.json#/smoke/runs/0/mean_accepted_length }}`, or
`{{ publish.yaml#/training/facts/samples }}` for what the author declares.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from eagle3pack.errors import InputError
from eagle3pack.publish.ledger import NAME, Bound, Document, Ledger, as_written, text

REFERENCE = re.compile(r"\{\{\s*([\w.-]+)#(/[^\s}]*)\s*\}\}")
_SENTENCE = re.compile(r"(?<=[.!?。！？])\s+|\n+|(?<=[。！？])")
CLAIMS = (
    r"up to", r"lossless(?:ly)?", r"state[- ]of[- ]the[- ]art", r"sota", r"best", r"fastest", r"faster",
    r"speed-?ups?", r"twice", r"double[sd]?", r"half", r"guarante\w*", r"always", r"never", r"perfect\w*",
    r"no (?:quality )?loss", r"without (?:any )?(?:quality )?loss", r"identical quality", r"outperform\w*",
    r"superior", r"unmatched", r"(?:two|three|four|five|ten)[- ](?:fold|times)",
)  # fmt: skip
CHINESE_CLAIMS = ("无损", "最高", "最快", "最佳", "最好", "高达", "领先", "超越", "保证", "完美", "倍")
_CLAIM = re.compile(rf"\b(?:{'|'.join(CLAIMS)})\b|{'|'.join(CHINESE_CLAIMS)}", re.I)


def bind_text(written: str, documents: Mapping[str, Document], ledger: Ledger, *, where: str) -> str:
    """Check a text and put the values that it refers to in it.

    Args:
        written: Markdown with references in double braces.
        documents: by name.
        ledger: is told each value.
        where: the key in publish.yaml, for messages.

    Raises:
        InputError: a number or a claim without a source, a reference to nothing, or HTML.
    """
    require_bound(written, where=where)

    def value(match: re.Match[str]) -> str:
        return ledger.write(_look_up(match, documents, where))

    return REFERENCE.sub(value, written.strip())


def require_bound(written: str, *, where: str) -> None:
    """Refuse free text with a digit or a claim that names no source.

    Raises:
        InputError: it has one.
    """
    if "<" in written and re.search(r"<[!/A-Za-z]", written):
        raise InputError("holds HTML", where=where, hint="Write Markdown.")
    if brace := re.search(r"\{\{.{0,40}|\}\}", REFERENCE.sub("", written)):
        raise InputError(
            f"has {brace[0]!r}, which is no reference",
            where=where,
            hint="Write a reference as {{ report.json#/pointer }}.",
        )
    for sentence in filter(None, _SENTENCE.split(written)):
        for claim in _CLAIM.finditer(sentence):
            if not REFERENCE.search(sentence):
                raise InputError(
                    f"claims {claim[0]!r} without a source",
                    where=where,
                    hint="Refer to a measured value: {{ report.json#/pointer }}, or leave the claim out.",
                )
        for number in _orphans(sentence):
            raise InputError(
                f"has the number {number!r} without a source",
                where=where,
                hint="Refer to where it stands: {{ report.json#/pointer }}, or to a fact in publish.yaml.",
            )


def _orphans(sentence: str) -> Iterator[str]:
    rest = NAME.sub(" ", REFERENCE.sub(" ", re.sub(r"https?://\S+", " ", sentence)))
    for match in re.finditer(r"\S*\d\S*", rest):
        yield match[0]


def _look_up(match: re.Match[str], documents: Mapping[str, Document], where: str) -> Bound:
    name, pointer = match.groups()
    if name not in documents:
        raise InputError(f"refers to {name}, which is none of {', '.join(sorted(documents))}", where=where)
    try:
        node = documents[name].at(pointer)
    except InputError as error:
        raise InputError(f"refers to nothing: {error.problem}", where=where) from None
    if isinstance(node.raw, (dict, list)):
        raise InputError(f"refers to {pointer} of {name}, which is no single value", where=where)
    return text(node) if isinstance(node.raw, (int, str)) else as_written(node, digits=3)
