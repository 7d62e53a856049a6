"""What a merge kept and what it lost, as numbers for people and for the record."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from eagle3pack.convert.merging.sharing import Sharing, Solution, residuals


@dataclass(frozen=True, slots=True)
class Kept:
    """Share of energy that survives the merge; one keeps all, negative is worse than deleting.

    Attributes:
        total: of the whole group.
        min, median, max: over rotary pairs for keys, over source heads for values.
    """

    total: float
    min: float
    median: float
    max: float


@dataclass(frozen=True, slots=True)
class GroupReport:
    """One key/value head of the result.

    Attributes:
        heads: the source key/value heads that it stands for.
        keys: energy of logits, by the pair of the key.
        values: energy of head outputs.
    """

    heads: tuple[int, ...]
    keys: Kept
    values: Kept


@dataclass(frozen=True, slots=True)
class HeadReport:
    """One query head of the source.

    Attributes:
        head: its index in the source.
        logit_error: E|difference of logits|^2 / E|logits|^2, attention inputs independent.
        output_error: the same for o_proj times value.
    """

    head: int
    logit_error: float
    output_error: float


@dataclass(frozen=True, slots=True)
class MethodReport:
    """All groups and heads under one method.

    Attributes:
        kept_keys, kept_values: of all groups together.
        groups, heads: in the order of the result's key/value heads; by source query head.
    """

    kept_keys: float
    kept_values: float
    groups: tuple[GroupReport, ...]
    heads: tuple[HeadReport, ...]


@dataclass(frozen=True, slots=True)
class RidgeReport:
    """The refit of o_proj on activations.

    Attributes:
        penalty: that held-out tokens chose; None where no refit beat the closed form, which then stays.
        num_tokens: that it was fitted on.
        error_before, error_after: relative output errors on held-out tokens.
    """

    penalty: float | None
    num_tokens: int
    error_before: float
    error_after: float


@dataclass(frozen=True, slots=True)
class MergeReport:
    """What was done to one layer.

    Attributes:
        method: as asked.
        keys_by, values_by: the method that keys and values got.
        refit_output: what o_proj got: none, closed or ridge.
        metric: of the attention input.
        positions: "distances" where logits are compared over the distance prior or measured mass,
            "phases" where only the pairing of RoPE was known.
        grouping: contiguous, similarity or explicit.
        query_order: the source's query head at every place of the result.
        notes: what did not fit, what was done instead, and why.
        query_growth: largest factor by which a head's query weights grew.
        result, mean: kept and lost under the method, and under mean pooling of the same groups.
        refit: how the ridge did on held-out activations; None without one.
    """

    method: str
    keys_by: str
    values_by: str
    refit_output: str
    metric: str
    positions: str
    grouping: str
    query_order: tuple[int, ...]
    notes: tuple[str, ...]
    query_growth: float
    result: MethodReport
    mean: MethodReport
    refit: RidgeReport | None = None

    def as_dict(self) -> dict[str, Any]:
        """JSON types only."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Losses:
    """Energy there was and energy lost in one group, by source head and pair, and by query head.

    Attributes:
        part: lost, shape (parts,), with `part_total`.
        head: lost, shape (n, m), with `head_total`.
    """

    part: Tensor
    part_total: Tensor
    head: Tensor
    head_total: Tensor

    def kept(self) -> Kept:
        """Shares kept, over all and over parts."""
        shares = 1 - _ratio(self.part, self.part_total)
        everything = 1 - _ratio(self.head.sum(), self.head_total.sum())
        low, middle, high = (float(x) for x in (shares.min(), shares.median(), shares.max()))
        return Kept(float(everything), low, middle, high)

    def errors(self) -> list[float]:
        """Relative errors by query head, in the source heads' order."""
        return [float(x) for x in _ratio(self.head, self.head_total).flatten()]


def measure(problem: Sharing, solution: Solution, *, by_pair: bool) -> Losses:
    """Losses of one group's keys (by pair) or values (by source head)."""
    missing, there = residuals(problem, solution)
    head = torch.einsum("nmab,nab->nm", problem.left, missing)
    head_total = torch.einsum("nmab,nab->nm", problem.left, there)
    if not by_pair:
        return Losses(head.sum(1), head_total.sum(1), head, head_total)
    energy = _pairs(problem.weights)
    part, part_total = ((energy * _pairs(x)).sum(0) for x in (missing, there))
    return Losses(part, part_total, head, head_total)


def summarise(groups: tuple[tuple[int, ...], ...], keys: list[Losses], values: list[Losses]) -> MethodReport:
    """Put all groups of a layer together."""
    per_group = tuple(
        GroupReport(heads, k.kept(), v.kept()) for heads, k, v in zip(groups, keys, values, strict=True)
    )
    heads: list[HeadReport] = []
    for members, k, v in zip(groups, keys, values, strict=True):
        count = k.head.shape[1]
        names = [member * count + i for member in members for i in range(count)]
        heads += [HeadReport(*row) for row in zip(names, k.errors(), v.errors(), strict=True)]
    return MethodReport(_kept(keys), _kept(values), per_group, tuple(sorted(heads, key=lambda h: h.head)))


def _kept(losses: list[Losses]) -> float:
    lost = torch.stack([x.head.sum() for x in losses]).sum()
    there = torch.stack([x.head_total.sum() for x in losses]).sum()
    return float(1 - _ratio(lost, there))


def _pairs(moments: Tensor) -> Tensor:
    diagonal = moments.diagonal(dim1=-2, dim2=-1)
    half = diagonal.shape[-1] // 2
    return diagonal[..., :half] + diagonal[..., half:]


def _ratio(lost: Tensor, there: Tensor) -> Tensor:
    """lost / there; nothing can be lost of nothing."""
    return torch.where(there > 0, lost / torch.where(there > 0, there, 1.0), 0.0)
