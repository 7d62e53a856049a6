"""Intervals by the bootstrap: what the figures would be had other prompts of the same kind been drawn.

Tokens of one prompt are not independent, so whole prompts are drawn, never single drafts.

Source: Efron and Tibshirani 1993, An Introduction to the Bootstrap, chapter 13 (percentile interval).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from eagle3pack.engine.counters import Counters

LEVEL = 0.95
RESAMPLES = 4000
_SEED = 20250101  # the same data give the same interval

Sums = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Interval:
    """Where a figure lies in 95 % of the resamples."""

    low: float
    high: float


def mean_length_interval(units: Sequence[Counters]) -> Interval | None:
    """Interval of the mean accepted length, 1 + accepted / drafts; None for fewer than two units."""
    return _interval(units, lambda sums: 1 + sums[:, 2] / sums[:, 0])


def accept_rate_interval(units: Sequence[Counters]) -> Interval | None:
    """Interval of the draft accept rate, accepted / draft tokens."""
    return _interval(units, lambda sums: sums[:, 2] / sums[:, 1])


def retention_interval(ours: Sequence[Counters], theirs: Sequence[Counters]) -> Interval | None:
    """Interval of the accepted tokens a draft of one draft model over another's.

    Prompts are drawn in pairs, since both models answered the same ones: what makes a prompt hard for
    both cancels out.
    """
    if len(ours) != len(theirs):
        return None
    counts = _draws(len(ours))
    if counts is None:
        return None
    mine, other = counts @ _table(ours), counts @ _table(theirs)
    with np.errstate(divide="ignore", invalid="ignore"):
        return _percentiles((mine[:, 2] / mine[:, 0]) / (other[:, 2] / other[:, 0]))


def _interval(units: Sequence[Counters], figure: Callable[[Sums], Sums]) -> Interval | None:
    counts = _draws(len(units))
    if counts is None:
        return None
    with np.errstate(divide="ignore", invalid="ignore"):
        return _percentiles(figure(counts @ _table(units)))


def _draws(num_units: int) -> Sums | None:
    """How often each unit stands in each resample, (RESAMPLES, units)."""
    if num_units < 2:
        return None
    rng = np.random.default_rng(_SEED)
    return rng.multinomial(num_units, np.full(num_units, 1 / num_units), size=RESAMPLES).astype(np.float64)


def _table(units: Sequence[Counters]) -> Sums:
    """Drafts, draft tokens and accepted tokens of each unit, (units, 3)."""
    return np.array([(unit.drafts, unit.draft_tokens, unit.accepted_tokens) for unit in units], np.float64)


def _percentiles(figures: Sums) -> Interval | None:
    figures = figures[np.isfinite(figures)]
    if len(figures) < RESAMPLES / 2:
        return None
    low, high = np.quantile(figures, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return Interval(float(low), float(high))
