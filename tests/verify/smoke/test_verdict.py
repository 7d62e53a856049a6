"""What fails a smoke test, from figures."""

from __future__ import annotations

from typing import Any

from eagle3pack.verify.smoke.options import SmokeOptions
from eagle3pack.verify.smoke.verdict import judge


def figures(drafts: int, accepted: int) -> dict[str, Any]:
    return {
        "drafts": drafts,
        "accepted_tokens": accepted,
        "mean_accepted_length": 1 + accepted / drafts if drafts else None,
    }


def test_a_small_sample_without_acceptance_names_no_causes() -> None:
    [few] = judge(figures(12, 0), SmokeOptions())
    [many] = judge(figures(50, 0), SmokeOptions())
    assert "only 12 drafts were made: too few to tell" in few
    assert "Likely causes" not in few
    assert "Likely causes" in many


def test_a_small_sample_that_accepts_passes() -> None:
    assert judge(figures(12, 1), SmokeOptions()) == []
