"""Agreement of greedy answers, retention, speed-up."""

from __future__ import annotations

import pytest

from eagle3pack.engine.counters import Counters, retention
from eagle3pack.verify.smoke.compare import compare_answers, speedup
from eagle3pack.verify.smoke.measure import Measurement
from eagle3pack.verify.smoke.protocol import Completion
from tests.verify.smoke.support import scripted_facts


def answer(text: str, *, tokens: bool = True) -> Completion:
    words = tuple(map(ord, text)) if tokens else None
    return Completion(text, words, None, len(text), None)


def measured(counters: Counters, wall_s: float) -> Measurement:
    return Measurement(scripted_facts(), (), counters, wall_s, (), "prompts")


def test_identical_answers() -> None:
    answers = [(answer("abc"), answer("de")), (answer("f"),)]
    agreement = compare_answers(answers, answers)
    assert (agreement.compared, agreement.identical, agreement.share) == (3, 3, 1.0)


@pytest.mark.parametrize("tokens", [True, False])
def test_the_first_difference_is_located(tokens: bool) -> None:
    agreement = compare_answers(
        [(answer("same"),), (answer("the cat", tokens=tokens),)],
        [(answer("same"),), (answer("the dog", tokens=tokens),)],
    )
    [divergence] = agreement.divergences
    assert (divergence.prompt, divergence.turn, divergence.position) == (1, 0, 4)
    assert (divergence.ours, divergence.theirs) == ("cat", "dog")
    assert agreement.share == 0.5


def test_a_shorter_answer_differs_where_it_ends() -> None:
    [divergence] = compare_answers([(answer("abc"),)], [(answer("abcdef"),)]).divergences
    assert divergence.position == 3
    assert (divergence.ours, divergence.theirs) == ("", "def")


def test_turns_after_a_difference_have_another_history() -> None:
    agreement = compare_answers(
        [(answer("a"), answer("x"), answer("z"))], [(answer("a"), answer("y"), answer("z"))]
    )
    assert (agreement.compared, agreement.identical) == (2, 1)


def test_nothing_to_compare() -> None:
    assert compare_answers([], []).share is None


def test_the_published_heads() -> None:
    """The GQA head of MiniMax-M3 has 2.668, the MHA head 2.698: it keeps 98 % of the accepted tokens."""
    ours = Counters(1000, 3000, 1668, (), 0)
    theirs = Counters(1000, 3000, 1698, (), 0)
    assert retention(ours, theirs) == pytest.approx(0.9823, abs=1e-4)
    assert retention(ours, ours) == 1


@pytest.mark.parametrize(
    "other",
    [Counters(10, 30, 0, (0, 0, 0), 10), Counters(0, 0, 0, (), 0)],
    ids=["none accepted", "none drafted"],
)
def test_retention_is_undefined_where_the_other_accepts_nothing(other: Counters) -> None:
    assert retention(Counters(10, 30, 5, (5, 0, 0), 15), other) is None


def test_speedup_is_in_output_tokens_a_second() -> None:
    ours, baseline = measured(Counters(1, 3, 1, (1,), 300), 2.0), measured(Counters(0, 0, 0, (), 200), 2.0)
    assert speedup(ours, baseline) == pytest.approx(1.5)
    assert speedup(ours, measured(Counters(0, 0, 0, (), 0), 2.0)) is None
