"""Bootstrap intervals."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eagle3pack.engine.counters import Counters, draft_accept_rate, mean_accepted_length, total
from eagle3pack.engine.statistics import (
    accept_rate_interval,
    mean_length_interval,
    retention_interval,
)


def unit(drafts: int, accepted: int) -> Counters:
    return Counters(drafts, 3 * drafts, accepted, (accepted, 0, 0), drafts + accepted)


units = st.lists(
    st.integers(1, 200).flatmap(lambda drafts: st.builds(unit, st.just(drafts), st.integers(0, 3 * drafts))),
    min_size=2,
    max_size=40,
)


@settings(deadline=None, max_examples=50)
@given(units)
def test_an_interval_holds_the_figure_and_lies_where_figures_can(parts: list[Counters]) -> None:
    length = mean_length_interval(parts)
    rate = accept_rate_interval(parts)
    assert length is not None
    assert rate is not None
    assert 1 <= length.low <= length.high <= 4
    assert 0 <= rate.low <= rate.high <= 1
    lengths = [mean_accepted_length(part) or 1 for part in parts]
    assert min(lengths) - 1e-9 <= length.low <= length.high <= max(lengths) + 1e-9


@settings(deadline=None, max_examples=25)
@given(units)
def test_equal_prompts_leave_no_doubt(parts: list[Counters]) -> None:
    same = [parts[0]] * len(parts)
    interval = mean_length_interval(same)
    assert interval is not None
    assert interval.low == pytest.approx(mean_accepted_length(parts[0]))
    assert interval.high == pytest.approx(mean_accepted_length(parts[0]))


def test_fewer_than_two_units_have_no_interval() -> None:
    assert mean_length_interval([]) is None
    assert mean_length_interval([unit(10, 5)]) is None
    assert retention_interval([unit(10, 5)], [unit(10, 5)]) is None


def test_the_same_data_give_the_same_interval() -> None:
    parts = [unit(50, 3 * i) for i in range(10)]
    assert mean_length_interval(parts) == mean_length_interval(parts)


def test_the_interval_covers_the_truth_as_often_as_it_says() -> None:
    rng = np.random.default_rng(1)
    hits = 0
    for _ in range(200):
        rates = rng.beta(4, 6, size=40)  # prompts differ: 0.4 on average
        parts = [unit(100, int(rng.binomial(100, rate))) for rate in rates]
        interval = mean_length_interval(parts)
        assert interval is not None
        hits += interval.low <= 1.4 <= interval.high
    assert 0.88 <= hits / 200 <= 0.99


def test_units_in_which_nothing_was_drafted_do_no_harm() -> None:
    interval = mean_length_interval([unit(0, 0), unit(50, 20), unit(60, 10)])
    assert interval is not None
    assert interval.low <= 1 + 30 / 110 <= interval.high
    assert mean_length_interval([unit(0, 0), unit(0, 0)]) is None


def test_retention_is_paired() -> None:
    """Two drafts that differ by the same factor on every prompt: how hard the prompts are cancels out."""
    theirs = [unit(100, accepted) for accepted in (20, 60, 100, 160, 240)]
    ours = [unit(100, round(part.accepted_tokens * 0.9)) for part in theirs]
    interval = retention_interval(ours, theirs)
    assert interval is not None
    assert interval.low == pytest.approx(0.9)
    assert interval.high == pytest.approx(0.9)
    assert retention_interval(ours[:3], theirs) is None


def test_retention_against_a_draft_that_accepts_nothing_is_undefined() -> None:
    assert retention_interval([unit(10, 5)] * 4, [unit(10, 0)] * 4) is None


def test_the_rate_is_that_of_the_sums() -> None:
    parts = [unit(10, 6), unit(1000, 300)]
    interval = accept_rate_interval(parts)
    assert interval is not None
    assert interval.low <= (draft_accept_rate(total(parts)) or 0) <= interval.high
