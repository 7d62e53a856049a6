"""A draft that speculates on a known answer lives through what it did while the target wrote it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from eagle3pack.engine.generation import DraftPass, Generation, Settings
from eagle3pack.engine.loading import load_draft
from eagle3pack.engine.replay import KnownAnswer, _Replay, replay
from eagle3pack.engine.speculate import Request, generate
from eagle3pack.engine.target import Target, load_target
from tests.convert.merging.test_capture import write_target
from tests.tiny import native_config, write_draft

PROMPTS = [[5 + i, 17, 30 + i, 8, 9][: 1 + i % 5] for i in range(7)]
SETTINGS = Settings(max_tokens=17, batch_size=3, ignore_stop_ids=True)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    torch.set_num_threads(1)
    return load_target(write_target(tmp_path_factory.mktemp("target")))


def states_of(target: Target, token_ids: Tensor) -> Tensor:
    """What the target's captured layers make of a text, (T, A * Ht)."""
    cache = target.new_cache(1)
    cache.reserve(len(token_ids))
    positions = cache.at(0, [0], len(token_ids))
    return target.forward(token_ids[None], positions, cache).states[0]


class Heard:
    """Passes of a draft, copied."""

    def __init__(self) -> None:
        self.passes: list[DraftPass] = []

    def __call__(self, made: DraftPass) -> None:
        copies = made.token_ids.clone(), made.positions.clone(), made.hidden.clone()
        self.passes.append(DraftPass(made.step, made.requests, *copies, made.widths))


def both(target: Target, folder: Path, settings: Settings) -> tuple[Generation, Heard, Generation, Heard]:
    """A run with the target, and its answers replayed."""
    draft = load_draft(write_draft(folder, native_config(num_key_value_heads=4), dtype="F32"), target=target)
    lived, heard = Heard(), Heard()
    made = generate(target, PROMPTS, settings, draft=draft, on_draft_pass=lived)
    texts = [torch.tensor([*prompt, *out]) for prompt, out in zip(PROMPTS, made.outputs, strict=True)]
    answers = [
        KnownAnswer(text, len(prompt), states_of(target, text)[:-1])
        for prompt, text in zip(PROMPTS, texts, strict=True)
    ]
    return made, lived, replay(draft, answers, settings, on_draft_pass=heard), heard


@pytest.mark.parametrize("max_tokens", [1, 2, 17])
def test_pass_for_pass_as_with_the_target(target: Target, tmp_path: Path, max_tokens: int) -> None:
    settings = Settings(max_tokens=max_tokens, batch_size=3, ignore_stop_ids=True)
    made, lived, again, heard = both(target, tmp_path / "draft", settings)
    assert again.outputs == made.outputs and again.counters == made.counters
    assert len(heard.passes) == len(lived.passes)
    for a, b in zip(heard.passes, lived.passes, strict=True):
        assert (a.step, a.requests, a.widths) == (b.step, b.requests, b.widths)
        for row, width in enumerate(a.widths):
            assert torch.equal(a.positions[row, :width], b.positions[row, :width])
            assert torch.equal(a.token_ids[row, :width], b.token_ids[row, :width])
            torch.testing.assert_close(a.hidden[row, :width], b.hidden[row, :width], rtol=1e-3, atol=1e-3)


def test_some_drafts_are_accepted(target: Target, tmp_path: Path) -> None:
    """Else the test above would say nothing of rounds that go on behind accepted tokens."""
    made, *_ = both(target, tmp_path / "draft", SETTINGS)
    print([counter.accepted_tokens for counter in made.counters])
    assert sum(counter.accepted_tokens for counter in made.counters) > 0


def test_answers_of_different_lengths_end_in_the_same_batch(tmp_path: Path) -> None:
    """Behind the end of one, where the others still go on, stands nothing that is read as a token."""
    draft = load_draft(write_draft(tmp_path / "draft", dtype="F32"))
    known = torch.tensor([3, 5, 7, 9, 11, 13])
    states = torch.randn(6, 3 * 64, generator=torch.Generator().manual_seed(0))
    run = _Replay(draft, [KnownAnswer(known, 2, states)], SETTINGS, lambda count: None, None)
    request = Request(0, known[:2].tolist(), 4)
    proposed = torch.tensor([[11, 0, 95, 95]])
    following, read = run.read(proposed, 0, [4], [request])
    assert following[0, 0] == 13 and read.shape == (1, 4, 192)
    assert bool((following[:, 1:3] != proposed[:, 2:]).all())
    assert bool(((following >= 0) & (following < 96)).all())
    texts = [KnownAnswer(known[:end], 1, states[:end]) for end in (2, 3, 4, 6, 5)]
    assert [len(output) for output in replay(draft, texts, SETTINGS).outputs] == [1, 2, 3, 5, 4]
