"""Refit o_proj on activations: least squares against the source's attention output.

The closed form looks at every head alone and keeps the old attention weights. On activations the refit
sees how heads correlate and what the merged attention really does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from eagle3pack.convert.merging.attention import AttentionWeights, attention_forward, attention_heads
from eagle3pack.convert.merging.moments import Sample
from eagle3pack.convert.merging.report import RidgeReport
from eagle3pack.convert.merging.rotary import RopeSpec

PENALTIES = (1e-3, 1e-2, 1e-1, 1.0)
HELD_OUT = 10  # every tenth sample chooses the penalty, where none were kept apart


@dataclass(frozen=True, slots=True)
class OutputStatistics:
    """Sums over tokens for one refit.

    Attributes:
        heads: z z' of the merged heads' outputs, float64, shape (N D, N D).
        missing: (y - o z) z', shape (H, N D), y the source's attention output.
        missing_energy: sum of |y - o z|^2.
        energy: sum of |y|^2.
    """

    heads: Tensor
    missing: Tensor
    missing_energy: float
    energy: float

    def error_after(self, change: Tensor) -> float:
        """Relative error of the output once `change`, shape (H, N D), is added to o_proj."""
        gained = -2 * (change * self.missing).sum() + (change @ self.heads * change).sum()
        return float(self.missing_energy + gained) / self.energy if self.energy else 0.0


def output_statistics(
    source: AttentionWeights, merged: AttentionWeights, rope: RopeSpec, samples: Sequence[Sample]
) -> OutputStatistics:
    """Run both layers over activations and sum up what the refit needs."""
    width = merged.num_heads * merged.head_dim
    heads = torch.zeros(width, width, dtype=torch.float64)
    missing = torch.zeros(len(merged.o), width, dtype=torch.float64)
    missing_energy = energy = 0.0
    bias = 0 if source.o_bias is None else source.o_bias
    for sample in samples:
        x = sample.x.to(source.q.dtype)
        y = attention_forward(source, rope, x, sample.positions, sample.visible) - bias
        z = attention_heads(merged, rope, x, sample.positions, sample.visible).transpose(0, 1).flatten(1)
        rest = y - z @ merged.o.flatten(1).T
        heads += (z.T @ z).double()
        missing += (rest.T @ z).double()
        missing_energy += float(rest.double().square().sum())
        energy += float(y.double().square().sum())
    return OutputStatistics(heads, missing, missing_energy, energy)


def ridge_change(statistics: OutputStatistics, penalty: float) -> Tensor:
    """The change of o_proj that minimises the error plus a penalty on itself, shape (H, N D).

    change = missing (heads + penalty mean(diag heads) I)^-1: centred on the o_proj there is, so no
    data or an infinite penalty leave it alone.
    """
    width = len(statistics.heads)
    floor = penalty * statistics.heads.trace() / width
    if not floor > 0:
        return torch.zeros_like(statistics.missing)
    factor = torch.linalg.cholesky(statistics.heads + floor * torch.eye(width, dtype=torch.float64))
    return torch.cholesky_solve(statistics.missing.T, factor).T


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
    work = torch.float64 if source.q.dtype == torch.float64 else torch.float32
    source, merged = source.to(work), merged.to(work)
    train = samples
    if not held_out:
        held_out = samples[::HELD_OUT]
        train = [sample for i, sample in enumerate(samples) if i % HELD_OUT] or held_out
    fit = output_statistics(source, merged, rope, train)
    check = output_statistics(source, merged, rope, held_out)
    best, chosen = torch.zeros_like(fit.missing), None
    before = error = check.error_after(best)
    for penalty in PENALTIES:
        change = ridge_change(fit, penalty)
        reached = check.error_after(change)
        if reached < error:
            best, chosen, error = change, penalty, reached
    o = (merged.o.double().flatten(1) + best).to(work).reshape(merged.o.shape)
    return o, RidgeReport(chosen, sum(len(sample.x) for sample in train), before, error)
