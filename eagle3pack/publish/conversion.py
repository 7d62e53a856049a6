"""What a card says of the conversion: the record beside the weights, held against the weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from eagle3pack.errors import InputError
from eagle3pack.publish.ledger import Bound, Document, Node, bound

State = Literal["as_converted", "mended", "retrained"]
RECORD = "eagle3pack.json"


@dataclass(frozen=True, slots=True)
class ErrorRow:
    """The relative error of one group of heads."""

    layer: Node
    head: Node
    k: Bound | None
    v: Bound | None


@dataclass(frozen=True, slots=True)
class ConversionView:
    """The record as a card shows it.

    Attributes:
        record: eagle3pack.json.
        state: whether the weights are still those that the conversion wrote.
        rows: one a group of heads.
    """

    record: Node
    state: State
    rows: tuple[ErrorRow, ...]


def conversion_view(record: Document | None, facts: Document, settings: Document) -> ConversionView | None:
    """Read the record, and find out whether the draft was trained since.

    Raises:
        InputError: publish.yaml and the weights contradict each other.
    """
    if record is None:
        return None
    rows = tuple(
        ErrorRow(
            layer.layer,
            group.key_value_head,
            _mean(group.k_relative_error),
            _mean(group.v_relative_error),
        )
        for layer in record.root.layers
        for group in layer.groups
    )
    return ConversionView(record.root, _state(record, facts, settings), rows)


def _state(record: Document, facts: Document, settings: Document) -> State:
    """The declared state, if the weights do not deny it."""
    same = _weights(record.value["output"]["files"]) == _weights(facts.value["files"])
    retrained = settings.value.get("conversion", {}).get("retrained")
    if retrained and same:
        raise InputError(
            "conversion.retrained is true, but the weights are those that the conversion wrote",
            where=settings.name,
            hint="Publish the folder that training wrote, or take the key out.",
        )
    if same:
        return "as_converted"
    if record.value["mends"] and not retrained:
        return "mended"
    if not retrained:
        raise InputError(
            f"the weights are not those that {RECORD} records",
            where=settings.name,
            hint="If the draft was trained after the conversion, write conversion: {retrained: true}.",
        )
    return "retrained"


def _weights(files: list[dict[str, Any]]) -> dict[str, Any]:
    return {f["path"]: f["sha256"] for f in files if f["path"].endswith(".safetensors")}


def _mean(errors: Node) -> Bound | None:
    known = [float(error.raw) for error in errors if error.raw is not None]
    return bound(f"{sum(known) / len(known):.4f}", errors) if known else None
