"""Refit o_proj on activations: least squares against the source's attention output.

The closed form looks at every head alone and keeps the old attention weights. On activations the refit
sees how heads correlate and what the merged attention really does.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from eagle3pack.convert.merging.attention import AttentionWeights, attention_forward, attention_heads
from eagle3pack.convert.merging.layer import NOISE, working_dtype
from eagle3pack.convert.merging.moments import Sample
from eagle3pack.convert.merging.report import RidgeReport
from eagle3pack.convert.merging.rotary import RopeSpec

PENALTIES = (1e-3, 1e-2, 1e-1, 1.0)
HELD_OUT = 10  # every tenth sample chooses the penalty, where none were kept apart
_TOKENS = 2048  # in a product over tokens, or a text more
_COLUMNS = 512  # of z z' at a time


@dataclass(frozen=True, slots=True)
class OutputStatistics:
    """Sums over tokens for one refit: z are the merged heads' outputs, y the source's attention output.

    Attributes:
        heads: z z', float64, shape (N D, N D).
        outputs: y z', float64, shape (H, N D).
        energy: sum of |y|^2.
    """

    heads: Tensor
    outputs: Tensor
    energy: float

    def error(self, o: Tensor) -> float:
        """Relative error of the output with the given o_proj, shape (H, N D); products in its dtype."""
        rest = (o @ self.heads.to(o.dtype)).sub_(self.outputs, alpha=2)
        lost = self.energy + float(rest.mul_(o).sum(dtype=torch.float64))
        return max(lost, 0.0) / self.energy if self.energy else 0.0


def output_statistics(
    source: AttentionWeights, merged: AttentionWeights, rope: RopeSpec, samples: Sequence[Sample]
) -> OutputStatistics:
    """Run both layers over activations and sum up what the refit needs."""
    width = merged.num_heads * merged.head_dim
    heads = torch.zeros(width, width, dtype=torch.float64)
    outputs = torch.zeros(len(merged.o), width, dtype=torch.float64)
    energy = 0.0
    for z, y in _outputs(source, merged, rope, samples):
        for start in range(0, width, _COLUMNS):  # z z' is symmetric: what lies on and below the diagonal
            heads[start:, start : start + _COLUMNS] += z[:, start:].T @ z[:, start : start + _COLUMNS]
        outputs += y.T @ z
        energy += float(y.double().square().sum())
    for start in range(0, width, _COLUMNS):
        end = start + _COLUMNS
        heads[start:end, end:] = heads[end:, start:end].T
    return OutputStatistics(heads, outputs, energy)


def _outputs(
    source: AttentionWeights, merged: AttentionWeights, rope: RopeSpec, samples: Sequence[Sample]
) -> Iterator[tuple[Tensor, Tensor]]:
    """The merged heads' outputs (T, N D) and the source's attention output (T, H), some texts at a time."""
    bias = 0 if source.o_bias is None else source.o_bias
    block: list[tuple[Tensor, Tensor]] = []
    for index, sample in enumerate(samples):
        x = sample.x.to(source.q.dtype)
        y = attention_forward(source, rope, x, sample.positions, sample.visible) - bias
        z = attention_heads(merged, rope, x, sample.positions, sample.visible).transpose(0, 1).flatten(1)
        block.append((z, y))
        if sum(len(z) for z, _ in block) >= _TOKENS or index == len(samples) - 1:
            yield torch.cat([z for z, _ in block]), torch.cat([y for _, y in block])
            block.clear()


def ridge(statistics: OutputStatistics, start: Tensor, penalty: float) -> Tensor:
    """The o_proj that minimises the error plus a penalty on its distance from `start`, (H, N D).

    o = (y z' + f start) (z z' + f I)^-1, f = penalty mean(diag z z'): no data or an infinite penalty
    leave `start` alone.
    """
    floor = penalty * statistics.heads.diagonal().mean()
    if not floor > 0:
        return start
    factor = statistics.heads.clone()
    factor.diagonal().add_(floor)
    factor = torch.linalg.cholesky(factor)
    return torch.cholesky_solve((statistics.outputs + floor * start).T, factor).T


def refit_output(
    source: AttentionWeights,
    merged: AttentionWeights,
    rope: RopeSpec,
    samples: Sequence[Sample],
    held_out: Sequence[Sample] = (),
) -> tuple[Tensor, RidgeReport]:
    """Refit o_proj by ridge regression, penalty chosen on held-out samples.

    Args:
        source: the layer before the merge.
        merged: after it.
        rope: with frequencies.
        samples: activations.
        held_out: activations that choose the penalty; without any, every tenth of `samples` does (the
            only one, if there is one).

    Returns:
        The o_proj that does best on held-out samples, shape (H, N, D) (the merged one where no refit
        beats it), and how it did.
    """
    work = working_dtype(source)
    source, merged = source.to(work), merged.to(work)
    train = samples
    if not held_out:
        held_out = samples[::HELD_OUT]
        train = [sample for i, sample in enumerate(samples) if i % HELD_OUT] or held_out
    fit = output_statistics(source, merged, rope, train)
    check = output_statistics(source, merged, rope, held_out)
    start = merged.o.double().flatten(1)
    best, chosen = start, None
    before = error = check.error(merged.o.flatten(1))
    for penalty in PENALTIES:
        o = ridge(fit, start, penalty)
        reached = check.error(o.to(work))
        if reached < error - NOISE[work]:
            best, chosen, error = o, penalty, reached
    return best.reshape(merged.o.shape), RidgeReport(
        chosen, sum(len(sample.x) for sample in train), before, error
    )
