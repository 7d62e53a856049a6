"""The checks, one module a family, one function a check; their ids are those of docs/checks.md."""

from __future__ import annotations

from eagle3pack.verify.check import Check
from eagle3pack.verify.checks import (
    auxiliary,
    config,
    conversion,
    files,
    rope,
    serving,
    settings,
    shape,
    stored,
    switches,
    tensors,
    values,
    vocabulary,
)


def _by_id(checks: tuple[Check, ...]) -> tuple[Check, ...]:
    return tuple(sorted(checks, key=lambda check: check.id))


FAMILIES: dict[str, tuple[Check, ...]] = {
    "files": files.CHECKS + stored.CHECKS,
    "config": _by_id(config.CHECKS + shape.CHECKS + switches.CHECKS + settings.CHECKS),
    "rope": rope.CHECKS,
    "tensors": _by_id(tensors.CHECKS + values.CHECKS),
    "vocabulary": vocabulary.CHECKS,
    "auxiliary": auxiliary.CHECKS,
    "serving": serving.CHECKS,
    "conversion": conversion.CHECKS,
}

# Of the catalogue, what is no check here, and why.
LEFT_OUT: dict[str, str] = {
    "C33": "That a conversion keeps the producer's keys can be seen only beside the source's config, "
    "which a draft does not carry; the tests of `convert` hold it.",
    "R04": "Likewise for the rotary scaling of the source. R03 finds a scaling that lost parameters, R05 "
    "one that is not the target's.",
    "V11": "No producer records which tokenizer a draft was trained with. C18 and V10 find what "
    "follows from another.",
    "M03": "That heads are pooled in contiguous groups and float32 is a property of `convert`; "
    "M02 holds the map.",
    "M04": "That a conversion to the same number of heads changes no byte is a property of `convert`; its "
    "tests hold it.",
    "M06": "Likewise that a permutation of query heads is applied to q, k, v and o alike; M02 holds the map.",
    "M07": "Likewise that no two rotary frequencies of a key are mixed.",
    "M08": "Likewise that the bytes are deterministic.",
    "M09": "Likewise that memory does not grow with the draft; the benchmarks hold it for `verify` too.",
}


def all_checks() -> tuple[Check, ...]:
    """Every check, by family."""
    return tuple(check for family in FAMILIES.values() for check in family)
