"""How the bytes of changed tensors are made: the seam between a plan and a method.

Pooling streams; the closed-form methods hold one attention layer in memory and stand in `merging`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from eagle3pack.checkpoint.header import TensorEntry
from eagle3pack.checkpoint.reading import read_part
from eagle3pack.checkpoint.writer import PlannedTensor
from eagle3pack.convert.plan import Plan
from eagle3pack.convert.pooling import GroupError, PoolMethod, pool_heads
from eagle3pack.errors import InputError

if TYPE_CHECKING:
    from eagle3pack.convert.merging.calibration import Calibration


@dataclass(frozen=True, slots=True)
class LayerResult:
    """What a method reports of one layer.

    Attributes:
        layer: its index.
        head_map: for each new key/value head, the source's that it stands for.
        record: what goes into the conversion record.
        notes: what did not fit and what was done instead.
    """

    layer: int
    head_map: tuple[tuple[int, ...], ...]
    record: Mapping[str, Any]
    notes: tuple[str, ...] = ()


class Computation(Protocol):
    """Makes the tensors of a plan that are computed."""

    def compute(self, planned: PlannedTensor) -> Iterator[bytes | memoryview]:
        """Yield the bytes of one tensor, in order."""

    def results(self) -> Sequence[LayerResult]:
        """One a layer, once all tensors are made."""

    def quality(self) -> Mapping[str, float]:
        """What the summary says of the result, by name."""

    def libraries(self) -> Mapping[str, str]:
        """Name -> version of what computed the values."""


@dataclass
class Pooling:
    """`mean` and `first`."""

    plan: Plan
    errors: dict[str, list[GroupError]] = field(default_factory=dict)

    def compute(self, planned: PlannedTensor) -> Iterator[bytes]:
        """Pool one tensor, a few rows of every head at a time.

        Raises:
            InputError: NaN or infinity among its values.
        """
        computed, before = self.plan.computed[planned.name], self.plan.before
        entry, errors = computed.source, self.errors.setdefault(planned.name, [])
        head_bytes = entry.nbytes // before.num_key_value_heads
        method: PoolMethod = "first" if self.plan.request.method == "first" else "mean"
        parts = pool_heads(
            _reader(entry),
            method=method,
            dtype=entry.dtype,
            num_heads=before.num_key_value_heads,
            num_groups=self.plan.request.num_key_value_heads,
            head_bytes=head_bytes,
            row_bytes=head_bytes // before.head_dim,
        )
        try:
            for part in parts:
                if isinstance(part, GroupError):
                    errors.append(part)
                else:
                    yield part
        except FloatingPointError:
            raise InputError(
                f"the tensor {entry.name} holds NaN or infinity",
                where=str(entry.path),
                hint="It was never trained or is damaged; export the draft again.",
            ) from None

    def results(self) -> list[LayerResult]:
        """The relative error of every head, by group."""
        layers: dict[int, dict[str, list[GroupError]]] = {}
        for name, computed in self.plan.computed.items():
            if computed.part.endswith(".weight"):
                layers.setdefault(computed.layer, {})[computed.part[0]] = self.errors[name]
        groups = self.plan.request.num_key_value_heads
        size = self.plan.before.num_key_value_heads // groups
        head_map = tuple(tuple(range(g * size, (g + 1) * size)) for g in range(groups))
        return [
            LayerResult(
                layer,
                head_map,
                {
                    "relative_errors": {
                        "k": [list(group.heads) for group in of["k"]],
                        "v": [list(group.heads) for group in of["v"]],
                    }
                },
            )
            for layer, of in sorted(layers.items())
        ]

    def quality(self) -> dict[str, float]:
        """The mean relative error of K and of V over all heads."""
        found: dict[str, list[float]] = {"k": [], "v": []}
        for result in self.results():
            for projection, groups in result.record["relative_errors"].items():
                found[projection] += [error for group in groups for error in group if error is not None]
        return {f"{name}_relative_error": sum(x) / len(x) for name, x in found.items() if x}

    def libraries(self) -> dict[str, str]:
        """numpy's version."""
        import numpy as np

        return {"numpy": np.__version__}


def _reader(entry: TensorEntry) -> Callable[[int, int], memoryview]:
    return lambda offset, nbytes: read_part(entry, offset, nbytes)


def require_mergeable(plan: Plan, calibrated: bool) -> None:
    """Refuse what a closed form or healing could not do with this draft, before anything is recorded.

    Args:
        plan: what to compute; not only pooling.
        calibrated: there is, or will be, a calibration.

    Raises:
        UsageError, InputError: of settings, the file of --grouping, or the attention's tensors.
    """
    from eagle3pack.convert.merging.compute import require_mergeable

    require_mergeable(plan, calibrated)


def start_computation(
    plan: Plan,
    say: Callable[[str], None],
    calibration: Calibration | None = None,
    *,
    shared: Mapping[str, TensorEntry] | None = None,
    trains: bool = False,
    heal_state: Path | None = None,
) -> Computation:
    """The computation that a plan asks for; only the closed-form methods and healing import torch.

    Args:
        plan: what to compute.
        say: for messages.
        calibration: of this draft.
        shared: what the draft takes from its target, by logical name, where it is at hand.
        trains: heal, if the plan says so; a dry run does not.
        heal_state: where healing keeps how far it came.
    """
    if plan.request.only_pools or not plan.computed:
        return Pooling(plan)
    from eagle3pack.convert.merging.compute import Merging

    return Merging(plan, say, calibration, shared or {}, trains, heal_state)
