"""M: what eagle3pack.json says of the conversion, held against the draft that it lies beside."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from eagle3pack.documents import load_schema
from eagle3pack.verify.check import Check, Finding, Undecided, check
from eagle3pack.verify.context import RECORD_NAME, Context
from eagle3pack.verify.schema import problems

_MERGED = re.compile(r"self_attn\.[kv]_proj\.(weight|bias)$")
_REFITTED = re.compile(r"self_attn\.[qo]_proj\.(weight|bias)$")
_LARGE_ERROR = 0.5  # of a merged head against the heads that it stands for, as a share of their norm


def _object(record: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    value = record.get(key)
    if not isinstance(value, dict):
        raise Undecided(f"{RECORD_NAME} has no object {key} (M00)")
    return value


@check(
    "M00",
    "the conversion record follows its schema",
    severity="warning",
    reason="What the record does not say plainly, nobody can hold the draft to.",
    source="schemas/conversion.schema.json",
)
def record_is_sound(context: Context) -> Iterator[Finding]:
    try:
        record = context.record
    except Undecided as answer:
        if answer.status == "not_applicable":
            raise
        yield Finding(answer.reason, "Convert the draft again, or delete the record.", file=RECORD_NAME)
        return
    for problem in problems(record, load_schema("conversion")):
        yield Finding(
            problem.message,
            "Convert the draft again; the record is not meant to be edited.",
            file=RECORD_NAME,
            key=".".join(problem.path),
        )
        return


@check(
    "M01",
    "only attention projections were changed, and the files are those that the conversion wrote",
    reason="A conversion of heads merges k and v, and may refit q and o; every other tensor keeps its "
    "bytes. A file changed afterwards is no longer what the record, and the card made from it, describes.",
    source="schemas/conversion.schema.json, changed_tensors and output.files",
)
def bytes_are_the_recorded(context: Context) -> Iterator[Finding]:
    yield from _changed_tensors(context)
    recorded = _object(context.record, "output").get("files")
    if not isinstance(recorded, list) or not all(isinstance(file, dict) for file in recorded):
        raise Undecided(f"{RECORD_NAME} lists no output files (M00)")
    if context.options.quick:
        return  # the digests are left out with all other reading
    actual = {path: digest for path, _, digest in context.scan.files}
    for file in recorded:
        path, digest = str(file.get("path")), file.get("sha256")
        if path not in actual:
            yield Finding(
                f"the record lists {path}, which is not here", "Convert the draft again.", file=path
            )
        elif digest is not None and digest != actual[path]:
            yield Finding(
                f"{path} is not the file that the conversion wrote",
                "Convert the draft again, or keep what changed it apart.",
                file=path,
                found=actual[path],
                expected=str(digest),
            )


def _changed_tensors(context: Context) -> Iterator[Finding]:
    changed = context.record.get("changed_tensors")
    if not isinstance(changed, list):
        raise Undecided(f"{RECORD_NAME} lists no changed tensors (M00)")
    names = {entry.name for entry in context.tensors.values()}
    for name in changed:
        known = isinstance(name, str) and bool(_MERGED.search(name) or _REFITTED.search(name))
        if not known or name not in names:
            yield Finding(
                f"the record lists {name} as changed, which "
                + ("is not in the weights" if known else "a conversion leaves alone"),
                "Convert the draft again.",
                file=RECORD_NAME,
                key="changed_tensors",
                tensor=str(name),
            )


@check(
    "M02",
    "the heads of the record are those of the draft",
    reason="Each new key/value head must stand for its contiguous group: query head h uses key/value head h "
    "// group in every engine.",
    source="Ainslie et al. 2023, arXiv:2305.13245; vLLM 0.32, SGLang, TensorRT-LLM attention layers",
)
def heads_are_the_recorded(context: Context) -> Iterator[Finding]:
    heads = _object(context.record, "heads")
    config = context.config
    before, after = heads.get("num_key_value_heads_before"), heads.get("num_key_value_heads_after")
    if not isinstance(before, int) or not isinstance(after, int) or after < 1:
        raise Undecided(f"{RECORD_NAME} gives no numbers of heads (M00)")
    if after != config.num_key_value_heads:
        yield Finding(
            f"the record says {after} key/value heads, the config {config.num_key_value_heads}",
            "Convert the draft again.",
            file=RECORD_NAME,
            key="heads.num_key_value_heads_after",
            found=after,
            expected=config.num_key_value_heads,
        )
    elif before % after or config.num_attention_heads % after:
        yield Finding(
            f"{before} heads do not fall into {after} groups",
            "Convert the draft again.",
            file=RECORD_NAME,
            key="heads",
        )
    for layer in _layers(context):
        head_map: Any = layer.get("head_map")
        members = sorted(head for group in head_map for head in group) if _is_map(head_map) else []
        if members != list(range(before)) or len(head_map) != after:
            yield Finding(
                f"the head map of layer {layer.get('layer')} does not name every head of the source once",
                "Convert the draft again.",
                file=RECORD_NAME,
                key="layers",
            )


def _layers(context: Context) -> list[Mapping[str, Any]]:
    layers = context.record.get("layers")
    if not isinstance(layers, list):
        raise Undecided(f"{RECORD_NAME} lists no layers (M00)")
    return [layer for layer in layers if isinstance(layer, dict)]


def _is_map(value: Any) -> bool:
    return isinstance(value, list) and all(
        isinstance(group, list) and all(type(head) is int for head in group) for group in value
    )


@check(
    "M05",
    "the merged heads are close to those that they stand for",
    severity="note",
    reason="A group whose heads differ much loses them in the mean; a closed-form method or retraining "
    "keeps them.",
    source="docs/conversion.md",
)
def errors_are_small(context: Context) -> Iterator[Finding]:
    errors = [error for layer in _layers(context) for error in _errors(layer)]
    if errors and max(errors) > _LARGE_ERROR:
        yield Finding(
            f"the merged heads differ from the source's by up to {max(errors):.0%} of their norm, on average "
            f"{sum(errors) / len(errors):.0%}",
            "Try --method als or svd with --calibration, and retrain.",
            file=RECORD_NAME,
            key="layers",
            found=round(max(errors), 4),
        )


def _errors(layer: Mapping[str, Any]) -> Iterator[float]:
    """The errors of mean and first, by group and source head."""
    of = layer.get("relative_errors")
    for groups in of.values() if isinstance(of, dict) else ():
        for group in groups if isinstance(groups, list) else ():
            for value in group if isinstance(group, list) else ():
                if isinstance(value, (int, float)) and 0 <= value < float("inf"):
                    yield float(value)


@check(
    "M10",
    "the converted draft was retrained, or its loss is known",
    severity="warning",
    reason="Merging alone loses acceptance: the public MiniMax-M3 GQA head was retrained on the same data, "
    "not merged.",
    source="huggingface.co/Inferact/MiniMax-M3-EAGLE3-GQA; TensorRT-LLM#17514",
)
def was_retrained(context: Context) -> Iterator[Finding]:
    changed = context.record.get("changed_tensors")
    if changed:
        yield Finding(
            "these are merged heads as the conversion wrote them, without retraining",
            "Measure it with --engine and --baseline or --against, and retrain if it loses too much.",
            file=RECORD_NAME,
        )


CHECKS: tuple[Check, ...] = (
    record_is_sound,
    bytes_are_the_recorded,
    heads_are_the_recorded,
    errors_are_small,
    was_retrained,
)
