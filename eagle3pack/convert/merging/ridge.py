"""Refit o_proj on activations: least squares against the source's attention output.

The closed form looks at every head alone and keeps the old attention weights. On activations the refit
sees how heads correlate and what the merged attention really does.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from eagle3pack.convert.merging.attention import AttentionWeights, attention_forward, attention_heads
from eagle3pack.convert.merging.layer import working_dtype
from eagle3pack.convert.merging.moments import Sample, spread
from eagle3pack.convert.merging.report import RidgeReport
from eagle3pack.convert.merging.rotary import RopeSpec

PENALTIES = (1e-3, 1e-2, 1e-1, 1.0)
MOST_CHECKED = 8192  # activations that choose among the penalties: their outputs are kept
HELD_OUT = 10  # every tenth sample chooses the penalty, where none were kept apart
_TOKENS = 2048  # in a product over tokens, or a text more
_COLUMNS = 512  # of z z' at a time


class Outputs(NamedTuple):
    """What both layers make of some activations: z of the merged heads, (T, N D), y of the source, (T, H)."""

    z: Tensor
    y: Tensor


def outputs(
    source: AttentionWeights, merged: AttentionWeights, rope: RopeSpec, samples: Sequence[Sample]
) -> Iterator[Outputs]:
    """Run both layers over activations, some texts at a time; the bias of o_proj is left out."""
    bias = 0 if source.o_bias is None else source.o_bias
    block: list[Outputs] = []
    for index, sample in enumerate(samples):
        x = sample.x.to(source.q.dtype)
        y = attention_forward(source, rope, x, sample.positions, sample.visible) - bias
        z = attention_heads(merged, rope, x, sample.positions, sample.visible).transpose(0, 1).flatten(1)
        block.append(Outputs(z, y))
        if sum(len(z) for z, _ in block) >= _TOKENS or index == len(samples) - 1:
            yield Outputs(torch.cat([z for z, _ in block]), torch.cat([y for _, y in block]))
            block.clear()


def second_moments(blocks: Iterable[Outputs]) -> tuple[Tensor, Tensor]:
    """Sums of z z', (N D, N D), and of y z', (H, N D), in float64; products are formed in theirs."""
    heads = across = torch.empty(0)
    for z, y in blocks:
        width = z.shape[1]
        if not len(across):
            heads = torch.zeros(width, width, dtype=torch.float64)
            across = torch.zeros(y.shape[1], width, dtype=torch.float64)
        for start in range(0, width, _COLUMNS):  # z z' is symmetric: what lies on and below the diagonal
            end = start + _COLUMNS
            heads[start:, start:end] += z[:, start:].T @ z[:, start:end]
            across[:, start:end] += y.T @ z[:, start:end]
    for start in range(0, len(heads), _COLUMNS):
        end = start + _COLUMNS
        heads[start:end, end:] = heads[end:, start:end].T
    return heads, across


def ridge(heads: Tensor, across: Tensor, start: Tensor, penalty: float) -> Tensor:
    """The o_proj that minimises the error plus a penalty on its distance from `start`.

    o = (y z' + f start) (z z' + f I)^-1, f = penalty mean(diag z z'): no data or an infinite penalty
    leave `start` alone.

    Args:
        heads, across: z z' and y z', of `second_moments`.
        start: (H, N D), of any precision.
        penalty: positive.

    Returns:
        Shape (H, N D), float64.
    """
    floor = penalty * heads.diagonal().mean()
    if not floor > 0:
        return start.double()
    factor = heads.clone()
    factor.diagonal().add_(floor)
    factor = torch.linalg.cholesky(factor)
    return torch.cholesky_solve(torch.add(across, start, alpha=float(floor)).T, factor).T


def relative_error(o: Tensor, held_out: Sequence[Outputs]) -> float:
    """|y - o z|^2 / |y|^2."""
    o = o.to(held_out[0].y.dtype)
    lost = sum(float((y - z @ o.T).square().sum(dtype=torch.float64)) for z, y in held_out)
    there = sum(float(y.square().sum(dtype=torch.float64)) for _, y in held_out)
    return lost / there if there else 0.0


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
    train = samples
    if not held_out:
        held_out = samples[::HELD_OUT]
        train = [sample for i, sample in enumerate(samples) if i % HELD_OUT] or held_out
    work = working_dtype(source)
    layers = source.to(work), merged.to(work)
    check = list(outputs(*layers, rope, spread(held_out, MOST_CHECKED)))
    moments = second_moments(outputs(*layers, rope, train))
    del layers  # they are large, and so are the systems below
    start = merged.o.flatten(1)
    best, chosen = start, None
    before = error = relative_error(start, check)
    for penalty in PENALTIES:
        o = ridge(*moments, start, penalty).to(work)
        reached = relative_error(o, check)
        if reached < error:
            best, chosen, error = o, penalty, reached
    tokens = sum(len(sample.positions) for sample in train)
    return best.reshape(merged.o.shape), RidgeReport(chosen, tokens, before, error)
