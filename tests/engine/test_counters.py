"""The counters' formulas, held against the published table of a real run."""

from __future__ import annotations

import pytest

from eagle3pack.engine.counters import (
    Counters,
    draft_accept_rate,
    mean_accepted_length,
    per_position_accept_rate,
    total,
)


@pytest.mark.parametrize(
    ("per_position", "length", "rate"),
    [  # vLLM, three speculative tokens, greedy: a retrained GQA head on MT-Bench and on SPEED-Bench
        ((0.745, 0.537, 0.387), 2.668, 55.62),
        ((0.719, 0.500, 0.342), 2.561, 52.04),
    ],
)
def test_the_formulas_reproduce_published_tables(
    per_position: tuple[float, ...], length: float, rate: float
) -> None:
    drafts = 100_000
    accepted = tuple(round(share * drafts) for share in per_position)
    counters = Counters(drafts, 3 * drafts, sum(accepted), accepted, 0)

    assert mean_accepted_length(counters) == pytest.approx(length, abs=1.6e-3)  # three rounded rates
    assert 100 * (draft_accept_rate(counters) or 0) == pytest.approx(rate, abs=0.06)
    assert per_position_accept_rate(counters) == pytest.approx(per_position)


def test_nothing_drafted_has_no_rates() -> None:
    counters = Counters(0, 0, 0, (0, 0, 0), 5)

    assert mean_accepted_length(counters) is None
    assert draft_accept_rate(counters) is None
    assert per_position_accept_rate(counters) is None


def test_totals_add_positions_of_different_lengths() -> None:
    assert total([Counters(1, 2, 1, (1, 0), 3), Counters(1, 3, 3, (1, 1, 1), 4)]) == Counters(
        2, 5, 4, (2, 1, 1), 7
    )
    assert total([]) == Counters(0, 0, 0, (), 0)
