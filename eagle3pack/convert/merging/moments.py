"""What calibration tells about the attention input; files of it come from `calibration`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from eagle3pack.convert.merging.metrics import Metric


@dataclass(frozen=True, slots=True)
class Sample:
    """One stretch of attention inputs, drafted steps included.

    Attributes:
        x: the attention input, shape (T, In).
        positions: integer, shape (T,).
        visible: whether query t sees key s, bool, shape (T, T); None for causal.
        steps: speculative step of each input, 0 for true states of the target, integer, shape (T,).
        residual: what the attention's output is added to, shape (T, H).
    """

    x: Tensor
    positions: Tensor
    visible: Tensor | None = None
    steps: Tensor | None = None
    residual: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Moments:
    """Statistics of one layer's attention input.

    Attributes:
        second_moment: E[x x'], shape (In, In).
        mean: E[x], shape (In,).
        distance_mass: attention mass of the source draft by distance, of every query head, (N, distances),
            or of all together, (distances,); or None.
        samples: activations for refits.
        num_tokens: that the averages were taken over.
        held_out: activations that nothing is fitted to, the averages above included; they choose between
            candidates and tell errors. Empty where the caller kept none apart.
    """

    second_moment: Tensor
    mean: Tensor
    distance_mass: Tensor | None = None
    samples: Sequence[Sample] = ()
    num_tokens: int = 0
    held_out: Sequence[Sample] = ()

    def metric(self) -> Metric:
        """The calibrated metric.

        With fewer tokens than ten a dimension the off-diagonal part is mostly noise, so it is shrunk
        by a tenth.
        """
        shrinkage = 0.1 if self.num_tokens < 10 * len(self.second_moment) else 0.0
        return Metric("calibration", self.second_moment, self.mean, shrinkage)


def spread(samples: Sequence[Sample], most: int) -> Sequence[Sample]:
    """Evenly chosen samples with about `most` activations."""
    stride = -(-sum(len(sample.positions) for sample in samples) // most)
    return samples[:: max(stride, 1)]
