"""How much of a source is gone through: in what order, and when it is enough."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch

from eagle3pack.convert.calibration_sources import recording
from eagle3pack.convert.calibration_sources.recording import plan_extent, record
from eagle3pack.convert.merging.capture import Recorder
from eagle3pack.engine.counters import Counters
from eagle3pack.engine.draft_model import DraftModel
from eagle3pack.engine.generation import DraftPass
from eagle3pack.engine.loading import load_draft
from tests.tiny import write_draft


@pytest.fixture(scope="module")
def draft(tmp_path_factory: pytest.TempPathFactory) -> DraftModel:
    return load_draft(write_draft(tmp_path_factory.mktemp("draft") / "mha", dtype="F32"))


class Script:
    """A source in which every answer has max_tokens tokens."""

    def __init__(self, draft: DraftModel, answers: Sequence[int]) -> None:
        self.draft = draft
        self.answers = answers
        self.played: list[int] = []

    def play(
        self,
        conversations: Sequence[int],
        numbers: Sequence[int],
        max_tokens: int,
        recorder: Recorder,
        on_tokens: Callable[[int], None],
    ) -> Sequence[Counters]:
        recorder.start(0, numbers)
        counters = []
        for request, conversation in enumerate(conversations):
            tokens = torch.arange(max_tokens)[None] % 96
            hidden = torch.randn(1, max_tokens, 64, generator=torch.Generator().manual_seed(conversation))
            recorder(DraftPass(0, (request,), tokens, torch.arange(max_tokens)[None], hidden, (max_tokens,)))
            for _ in range(self.answers[conversation]):
                on_tokens(max_tokens)
                counters.append(Counters(1, 3, 0, (0, 0, 0), max_tokens))
        self.played += conversations
        return counters


def test_where_all_is_needed_the_files_order_stays() -> None:
    extent = plan_extent([2] * 40, 256, None, most=22_755)
    assert extent.order == tuple(range(40)) and extent.max_tokens == 256 and extent.tokens == 40 * 2 * 256


def test_what_is_needed_first_lies_evenly_over_the_whole() -> None:
    extent = plan_extent([1] * 1000, 256, None, most=25_600)
    first, rest = extent.order[:100], extent.order[100:]
    assert first == tuple(range(0, 1000, 10))
    assert sorted(first + rest) == list(range(1000)) and list(rest) == sorted(rest)


@pytest.mark.parametrize(
    ("limit", "max_tokens", "tokens"),
    [(64, 16, 64), (2000, 100, 2000), (10_000, 256, 10_000), (10**6, 256, 256_000)],
)
def test_a_limit_is_spread_over_answers(limit: int, max_tokens: int, tokens: int) -> None:
    extent = plan_extent([1] * 1000, 256, limit, most=10**6)
    assert (extent.max_tokens, extent.tokens) == (max_tokens, tokens)
    assert plan_extent([1, 1], 256, 300, most=10**6).max_tokens == 150


@pytest.mark.parametrize("limit", [64, 700, 2000, 30_000])
def test_a_limit_is_kept(draft: DraftModel, limit: int) -> None:
    source = Script(draft, [1] * 1000)
    extent = plan_extent(source.answers, 256, limit, most=10**6)
    seen: list[int] = []
    recorder, counters, _ = record(source, extent, 10**6, seen.append)
    assert counters.output_tokens == sum(seen) <= limit < counters.output_tokens + extent.max_tokens
    assert source.played == list(extent.order[: len(source.played)])
    held_out = [stretch.held_out for stretch in recorder.stretches()]
    assert held_out == [i % 10 == 0 for i in range(len(held_out))]


def test_two_conversations_are_the_fewest(draft: DraftModel) -> None:
    source = Script(draft, [9] * 5)
    recorder, *_ = record(source, plan_extent(source.answers, 256, 64, most=10**6), 10**6, lambda count: None)
    assert [stretch.held_out for stretch in recorder.stretches()] == [True, False]


def test_it_stops_when_refit_and_averages_have_what_they_can_use(draft: DraftModel) -> None:
    source = Script(draft, [1] * 400)
    extent = plan_extent(source.answers, 64, None, most=3000)
    record(source, extent, 3000, lambda count: None)
    chunk = recording.CONVERSATIONS
    assert len(source.played) == -(-3000 // (64 * chunk)) * chunk  # activations
    few = Script(draft, [1] * 400)
    record(few, plan_extent(few.answers, 8, None, most=200), 200, lambda count: None)
    assert len(few.played) == -(-11 * 128 // (8 * chunk)) * chunk  # inputs for the averages


def test_a_source_that_ends_early_ends_it(draft: DraftModel) -> None:
    source = Script(draft, [1] * 7)
    extent = plan_extent(source.answers, 16, None, most=10**6)
    recorder, counters, count = record(source, extent, 10**6, lambda count: None)
    assert source.played == list(range(7)) and count == 7
    assert counters.output_tokens == 7 * 16 and not recorder.is_full
