"""What a layer learns from: activations, what the source's layer makes of them, and in which order."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from eagle3pack.convert.merging.attention import AttentionWeights, attention_forward
from eagle3pack.convert.merging.layer import working_dtype
from eagle3pack.convert.merging.moments import Sample
from eagle3pack.convert.merging.rotary import RopeSpec
from eagle3pack.errors import InputError


class Lesson(NamedTuple):
    """A sample and what the source's layer makes of it, in working precision, in main memory."""

    x: Tensor
    positions: Tensor
    visible: Tensor
    expected: Tensor

    def to(self, device: torch.device) -> Lesson:
        """The same on another device."""
        return Lesson(*(tensor.to(device) for tensor in self))

    def output(self, weights: AttentionWeights, rope: RopeSpec, norm_eps: float) -> Tensor:
        """What a layer makes of it, (T, H)."""
        return attention_forward(weights, rope, self.x, self.positions, self.visible, norm_eps)


def lessons_of(
    source: AttentionWeights, rope: RopeSpec, samples: Sequence[Sample], device: torch.device, norm_eps: float
) -> list[Lesson]:
    """Run the source's layer over activations.

    Raises:
        InputError: its output holds NaN or infinity.
    """
    work = working_dtype(source)
    weights = source.to(work).to(device)
    lessons = []
    with torch.no_grad():
        for sample in samples:
            x, visible = sample.x.to(work), sample.visible
            x = x.clone() if x.is_inference() else x
            if visible is None:
                visible = torch.ones(len(x), len(x), dtype=torch.bool).tril()
            lesson = Lesson(x, sample.positions, visible, x.new_empty(0))
            expected = lesson.to(device).output(weights, rope, norm_eps).cpu()
            if not bool(expected.isfinite().all()):
                raise InputError("the source's attention output holds NaN or infinity", where="heal")
            lessons.append(lesson._replace(expected=expected))
    return lessons


def batches(lengths: Sequence[int], batch_tokens: int, seed: int) -> Iterator[list[int]]:
    """Which samples each step sees, without end: every sample once before any is seen again.

    Args:
        lengths: tokens of each sample.
        batch_tokens: a batch is full once it has as many.
        seed: of the order, which is another one every time.
    """
    batch: list[int] = []
    tokens = epoch = 0
    while True:
        generator = torch.Generator().manual_seed(seed * 1_000_003 + epoch)
        for drawn in torch.randperm(len(lengths), generator=generator).tolist():
            batch.append(drawn)
            tokens += lengths[drawn]
            if tokens >= batch_tokens:
                yield batch
                batch, tokens = [], 0
        epoch += 1


def energy(tensor: Tensor) -> float:
    """Sum of squares."""
    return float(tensor.double().square().sum())


def require_sample(sample: Sample, width: int, where: str) -> None:
    """Refuse a sample that the attention cannot run on, or would make NaN of.

    Raises:
        InputError: shapes, a mask or values that do not fit.
    """
    x, positions, visible = sample.x, sample.positions, sample.visible
    if x.dim() != 2 or not len(x) or x.shape[1] != width:
        raise InputError(f"its shape is {tuple(x.shape)}, expected (tokens, {width})", where=where)
    if positions.shape != (len(x),):
        raise InputError(f"{tuple(positions.shape)} positions for {len(x)} tokens", where=where)
    if visible is not None and (visible.shape != (len(x), len(x)) or visible.dtype != torch.bool):
        raise InputError(f"its mask is no bool of shape {(len(x), len(x))}", where=where)
    if visible is not None and not bool(visible.any(dim=1).all()):
        raise InputError("a token sees nothing, not even itself", where=where)
    if not bool(x.isfinite().all()):
        raise InputError("holds NaN or infinity", where=where)
