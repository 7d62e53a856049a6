"""The real draft of the quickstart on its real target: what tiny random models cannot show."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from eagle3pack.engine.chat import Chat, load_chat
from eagle3pack.engine.counters import mean_accepted_length, total
from eagle3pack.engine.generation import Settings
from eagle3pack.engine.loading import load_draft
from eagle3pack.engine.prompts import shipped_prompts
from eagle3pack.engine.speculate import generate
from eagle3pack.engine.target import Target, load_target
from tests.integration.real_models import DRAFT, smollm2_target

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def folder() -> Path:
    return smollm2_target()


@pytest.fixture(scope="module")
def chat(folder: Path) -> Chat:
    return load_chat(folder)


@pytest.fixture(scope="module")
def target(folder: Path) -> Target:
    return load_target(folder)


def first_turns(chat: Chat, limit: int) -> list[list[int]]:
    return [chat.prompt(prompt.turns[:1]) for prompt in shipped_prompts().prompts[:limit]]


def test_greedy_text_with_the_draft_is_that_of_transformers(target: Target, chat: Chat) -> None:
    prompts = first_turns(chat, 8)
    settings = Settings(max_tokens=48, batch_size=8)

    drafted = generate(target, prompts, settings, draft=load_draft(DRAFT, target=target))

    assert (mean_accepted_length(total(drafted.counters)) or 0) > 1.2
    for prompt, output in zip(prompts, drafted.outputs, strict=True):
        theirs = target.model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            max_new_tokens=48,
            do_sample=False,
            eos_token_id=sorted(target.stop_ids),
            pad_token_id=0,
        )
        assert list(output) == theirs[0, len(prompt) :].tolist()


def test_a_second_turn_follows_the_targets_own_answer(target: Target, chat: Chat) -> None:
    (question,) = [p for p in shipped_prompts().prompts if len(p.turns) == 2][:1]
    (answer,) = generate(target, [chat.prompt(question.turns[:1])], Settings(max_tokens=16)).outputs

    tokens = chat.prompt(question.turns, [chat.text(answer)])

    text = chat.text(tokens)
    assert text.index(question.turns[0]) < text.index(chat.text(answer)) < text.index(question.turns[1])


def test_auxiliary_layers_off_by_one_cost_acceptance(target: Target, chat: Chat) -> None:
    """The fault that most public reports of a low acceptance come down to."""
    draft = load_draft(DRAFT, target=target)
    prompts = first_turns(chat, 8)
    settings = Settings(max_tokens=32, batch_size=8)
    right = total(generate(target, prompts, settings, draft=draft).counters)
    capture = target.capture
    try:
        target.capture = lambda ids: capture([k - 1 for k in ids])  # type: ignore[method-assign]
        wrong = total(generate(target, prompts, settings, draft=draft).counters)
    finally:
        target.capture = capture  # type: ignore[method-assign]

    assert (mean_accepted_length(wrong) or 0) < (mean_accepted_length(right) or 0)
