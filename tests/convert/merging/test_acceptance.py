"""Figures of what a conversion's stages had accepted."""

from __future__ import annotations

import pytest

from eagle3pack.convert.merging.acceptance import Acceptance
from eagle3pack.engine.counters import Counters


def text(drafts: int, *accepted: int) -> Counters:
    return Counters(drafts, 2 * drafts, sum(accepted), accepted, drafts + sum(accepted))


SOURCE = (text(10, 4, 2), text(30, 12, 6))
MERGED = (text(10, 4, 2), text(30, 9, 3))


def test_figures_are_of_all_texts_together_and_held_against_the_source() -> None:
    made = Acceptance(SOURCE, (text(12, 1, 0), text(36, 5, 0)), MERGED)
    found = made.as_dict()
    assert found["num_texts"] == 2 and found["healed"] is None
    assert found["source"]["drafts"] == 40 and found["source"]["accepted_per_position"] == [16, 8]
    assert found["source"]["mean_accepted_length"] == pytest.approx(1.6)
    assert found["source"]["retention"] == 1
    assert found["merged"]["per_position_accept_rate"] == pytest.approx([13 / 40, 5 / 40])
    assert found["merged"]["retention"] == pytest.approx(18 / 24)
    quality = made.quality()
    assert quality["accepted_length"] == pytest.approx(1.45) and quality["accepted_length_of_source"] == 1.6
    assert quality["retention_by_mean"] == pytest.approx((6 / 48) / (24 / 40))
    assert quality["accepted_at_2"] == 5 / 40 and quality["accepted_drafts_of_source"] == 40
    assert not any("healing" in name for name in quality)


def test_an_interval_takes_enough_texts_and_drafts() -> None:
    """Two texts give one of 100 % to 100 % where both agree, which reads as certainty."""
    many = Acceptance(SOURCE * 3, SOURCE * 3, MERGED * 3).as_dict()
    assert many["source"]["retention_interval"] == [1, 1]
    low, high = many["merged"]["retention_interval"]
    assert 2 / 3 <= low < many["merged"]["retention"] < high <= 1
    few_drafts = (text(1, 1, 0),) * 6
    for few in (SOURCE * 2, few_drafts):
        made = Acceptance(few, few, few)
        assert made.as_dict()["merged"]["retention_interval"] is None
        assert made.quality()["retention"] == 1 and "retention_low" not in made.quality()


def test_a_healed_draft_is_the_result_and_what_it_was_before_stands_beside_it() -> None:
    quality = Acceptance(SOURCE, SOURCE, (text(40, 8, 4),) * 2, SOURCE).quality()
    assert quality["accepted_length"] == 1.6 and quality["accepted_length_before_healing"] == 1.3


def test_what_cannot_be_told_is_left_out() -> None:
    """A source that has nothing accepted gives no retention, a single text no interval."""
    made = Acceptance((text(5, 0, 0),), (text(5, 0, 0),), (text(4, 1, 0),))
    assert made.as_dict()["merged"]["retention"] is None
    assert not any(name.startswith("retention") for name in made.quality())
    assert made.quality()["accepted_length"] == 1.25
