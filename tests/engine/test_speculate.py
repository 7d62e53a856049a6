"""Chain drafting: the target's own text, and counters that a naive implementation reproduces."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from eagle3pack.engine.counters import Counters, total
from eagle3pack.engine.draft_model import DraftModel
from eagle3pack.engine.generation import DraftPass, Settings
from eagle3pack.engine.speculate import generate
from eagle3pack.engine.target import Target, load_target
from eagle3pack.errors import InputError, UsageError
from tests.engine import oracle
from tests.engine.test_draft_model import weights_of
from tests.tiny import native_config

VOCABULARY = 7  # so few tokens that a random draft is often right
PROMPTS = [[3, 1, 4, 1, 5], [6], [5, 3, 5, 0, 6, 6, 3, 1, 0, 4, 4, 1], [2, 2, 2], [0, 5, 1, 3, 6, 4, 1]]
SMALL: dict[str, Any] = {"vocab_size": VOCABULARY, "draft_vocab_size": VOCABULARY}
FREE = Settings(max_tokens=20, batch_size=3, ignore_stop_ids=True)


@pytest.fixture(scope="module")
def folder(make_target: Callable[..., Path]) -> Path:
    return make_target(vocab_size=VOCABULARY)


@pytest.fixture(scope="module")
def small(folder: Path) -> Target:
    return load_target(folder)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"num_key_value_heads": 2},
        {"norm_before_residual": True},
        {"norm_output": True},
        {"norm_before_fc": True},
        {"fc_norm": True},
        {"attention_bias": True},
        {"num_hidden_layers": 2},
        {"draft_vocab_size": 4},
        {"architectures": ["Eagle3Qwen3ForCausalLM"], "model_type": "qwen3", "num_key_value_heads": 4},
        {"eagle_aux_hidden_state_layer_ids": [0, 3, 7], "eagle_config": None},
        {"eagle_aux_hidden_state_layer_ids": [6, 1, 2], "eagle_config": None},  # engines sort them
        {"eagle_config": {"use_aux_hidden_state": False}, "eagle_aux_hidden_state_layer_ids": None},
    ],
    ids=str,
)
def test_text_and_counters_are_those_of_the_naive_implementation(
    folder: Path, make_draft: Callable[..., DraftModel], changes: dict[str, Any]
) -> None:
    target = load_target(folder, dtype=torch.float64)
    raw = native_config(**(SMALL | changes))
    draft = make_draft(target=target, **(SMALL | changes))
    naive = oracle.OracleDraft(raw, weights_of(draft), draft.rotary_table(target.device).frequencies)
    settings = replace(FREE, max_tokens=12)

    generation = generate(target, PROMPTS[:4], settings, draft=draft)

    ids = tuple(sorted(raw.get("eagle_aux_hidden_state_layer_ids") or ()))
    for prompt, output, counters in zip(PROMPTS, generation.outputs, generation.counters, strict=False):
        text, accepted, drafts = oracle.speculate(target.model, naive, prompt, 3, 12, ids, frozenset())
        assert list(output) == text
        assert counters == Counters(drafts, 3 * drafts, sum(accepted), tuple(accepted), len(text))


@pytest.mark.parametrize(
    ("batch_size", "num_speculative_tokens", "ignore_stop_ids"),
    [(1, 1, False), (1, 3, True), (2, 2, True), (3, 3, False), (3, 5, True), (8, 3, True), (8, 4, False)],
)
def test_greedy_text_is_the_same_with_and_without_a_draft(
    small: Target,
    make_draft: Callable[..., DraftModel],
    batch_size: int,
    num_speculative_tokens: int,
    ignore_stop_ids: bool,
) -> None:
    draft = make_draft(target=small, num_key_value_heads=2, **SMALL)
    settings = Settings(
        max_tokens=33,
        batch_size=batch_size,
        num_speculative_tokens=num_speculative_tokens,
        ignore_stop_ids=ignore_stop_ids,
    )

    drafted = generate(small, PROMPTS, settings, draft=draft)
    plain = generate(small, PROMPTS, settings)

    assert drafted.outputs == plain.outputs
    assert total(drafted.counters).accepted_tokens > 0
    assert total(plain.counters).drafts == 0


@pytest.mark.parametrize("max_tokens", [1, 2, 3, 4, 7])
def test_requests_stop_at_their_limit(
    small: Target, make_draft: Callable[..., DraftModel], max_tokens: int
) -> None:
    generation = generate(
        small, PROMPTS, replace(FREE, max_tokens=max_tokens), draft=make_draft(target=small, **SMALL)
    )

    assert {len(output) for output in generation.outputs} == {max_tokens}
    if max_tokens == 1:  # the only token comes from the prompt
        assert total(generation.counters) == Counters(0, 0, 0, (0, 0, 0), len(PROMPTS))


def test_no_tokens_are_no_work(small: Target) -> None:
    assert generate(small, PROMPTS, replace(FREE, max_tokens=0)).outputs == ((),) * len(PROMPTS)
    assert generate(small, [], FREE).outputs == ()


def test_a_stop_token_ends_a_request_and_is_part_of_it(
    small: Target, make_draft: Callable[..., DraftModel]
) -> None:
    (stop,) = small.stop_ids
    free = generate(small, PROMPTS, replace(FREE, max_tokens=40))

    stopped = generate(
        small,
        PROMPTS,
        replace(FREE, max_tokens=40, ignore_stop_ids=False),
        draft=make_draft(target=small, **SMALL),
    )

    expected = [
        output[: output.index(stop) + 1] if stop in output else output for output in map(list, free.outputs)
    ]
    assert [list(output) for output in stopped.outputs] == expected
    assert any(len(output) < 40 for output in expected)


def test_further_stop_tokens_can_be_given(small: Target) -> None:
    settings = replace(FREE, ignore_stop_ids=False, stop_ids=frozenset(range(VOCABULARY)))

    assert {len(output) for output in generate(small, PROMPTS, settings).outputs} == {1}


def test_text_is_that_of_transformers_generate(small: Target) -> None:
    ours = generate(small, PROMPTS, replace(FREE, ignore_stop_ids=False))

    for prompt, output in zip(PROMPTS, ours.outputs, strict=True):
        theirs = small.model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            max_new_tokens=FREE.max_tokens,
            do_sample=False,
            pad_token_id=0,
        )
        assert list(output) == theirs[0, len(prompt) :].tolist()


def test_counters_are_the_same_for_every_batch_size(
    small: Target, make_draft: Callable[..., DraftModel]
) -> None:
    draft = make_draft(target=small, **SMALL)
    runs = [
        generate(small, PROMPTS, replace(FREE, batch_size=size), draft=draft).counters for size in (1, 2, 5)
    ]

    assert runs[0] == runs[1] == runs[2]


def test_a_long_prompt_is_read_in_parts_with_the_same_result(
    small: Target, make_draft: Callable[..., DraftModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    draft = make_draft(target=small, **SMALL)
    prompt = [(7 * i * i + i) % VOCABULARY for i in range(83)]
    at_once = generate(small, [prompt, *PROMPTS], FREE, draft=draft)

    for size in (1, 16, 83, 82):
        monkeypatch.setattr("eagle3pack.engine.speculate.PREFILL_TOKENS", size)
        in_parts = generate(small, [prompt, *PROMPTS], FREE, draft=draft)
        assert (in_parts.outputs, in_parts.counters) == (at_once.outputs, at_once.counters)


def test_drafting_goes_on_beyond_the_positions_of_the_draft(
    small: Target, make_draft: Callable[..., DraftModel]
) -> None:
    draft = make_draft(target=small, max_position_embeddings=8, **SMALL)

    counters = total(generate(small, PROMPTS, replace(FREE, max_tokens=60), draft=draft).counters)

    assert counters.accepted_per_position[0] > 0
    assert counters.output_tokens == 60 * len(PROMPTS)


@pytest.mark.parametrize("model_type", ["qwen3", "gemma2", "mistral"])
def test_other_targets_speculate_without_changing_their_text(
    make_target: Callable[..., Path], make_draft: Callable[..., DraftModel], model_type: str
) -> None:
    changes: dict[str, Any] = {
        "qwen3": {"architectures": ["Qwen3ForCausalLM"]},
        # alternating sliding and full attention, soft caps, scaled embeddings
        "gemma2": {"architectures": ["Gemma2ForCausalLM"], "sliding_window": 6, "query_pre_attn_scalar": 16},
        "mistral": {"architectures": ["MistralForCausalLM"], "sliding_window": 5},
    }[model_type]
    target = load_target(make_target(model_type=model_type, vocab_size=VOCABULARY, **changes))
    draft = make_draft(target=target, **SMALL)

    drafted = generate(target, PROMPTS, FREE, draft=draft)

    assert drafted.outputs == generate(target, PROMPTS, FREE).outputs
    assert total(drafted.counters).accepted_tokens > 0
    for prompt, output in zip(PROMPTS, drafted.outputs, strict=True):
        tokens = list(prompt)
        for token in output:
            assert int(oracle.target_logits(target.model, tokens)[-1].argmax()) == token
            tokens.append(token)


def test_sampling_follows_the_targets_distribution(
    small: Target, make_draft: Callable[..., DraftModel]
) -> None:
    draft = make_draft(target=small, **SMALL)
    many = Settings(
        max_tokens=2, num_speculative_tokens=1, batch_size=64, temperature=1.5, ignore_stop_ids=True, seed=1
    )
    prompt = PROMPTS[0]

    outputs = generate(small, [prompt] * 600, many, draft=draft).outputs

    first = torch.softmax(oracle.target_logits(small.model, prompt)[-1] / 1.5, -1)
    exact = torch.zeros(VOCABULARY, VOCABULARY)
    for token in range(VOCABULARY):
        exact[token] = first[token] * torch.softmax(
            oracle.target_logits(small.model, [*prompt, token])[-1] / 1.5, -1
        )
    seen = torch.zeros(VOCABULARY, VOCABULARY)
    for a, b in outputs:
        seen[a, b] += 1 / len(outputs)
    assert float((seen - exact).abs().sum() / 2) < 0.1  # total variation; 49 cells, 600 draws
    assert (
        generate(small, [prompt] * 5, many, draft=draft).outputs
        == generate(small, [prompt] * 5, many, draft=draft).outputs
    )


def test_bfloat16_runs(folder: Path, make_draft: Callable[..., DraftModel]) -> None:
    target = load_target(folder, dtype=torch.bfloat16)

    generation = generate(target, PROMPTS, FREE, draft=make_draft(target=target, **SMALL))

    assert total(generation.counters).output_tokens == FREE.max_tokens * len(PROMPTS)


def test_draft_passes_are_observed_with_true_states_first(
    small: Target, make_draft: Callable[..., DraftModel]
) -> None:
    draft = make_draft(target=small, **SMALL)
    passes: list[DraftPass] = []

    generation = generate(small, PROMPTS[:2], FREE, draft=draft, on_draft_pass=passes.append)

    for index, (prompt, output) in enumerate(zip(PROMPTS, generation.outputs, strict=False)):
        tokens = [*prompt, *output]
        seen: dict[int, torch.Tensor] = {}
        for observed in passes:
            if observed.step or index not in observed.requests:
                continue
            row = observed.requests.index(index)
            for column in range(observed.widths[row]):
                position = int(observed.positions[row, column])
                assert position not in seen
                assert int(observed.token_ids[row, column]) == tokens[position + 1]
                seen[position] = observed.hidden[row, column]
        positions = range(len(seen))
        states = oracle.target_states(small.model, tokens, (2, 4, 5))
        expected = torch.stack([draft.fuse(torch.cat(states[p]).float()) for p in positions])
        torch.testing.assert_close(torch.stack([seen[p] for p in positions]), expected, rtol=1e-3, atol=1e-3)


def test_progress_and_answers_are_told(small: Target, make_draft: Callable[..., DraftModel]) -> None:
    told: list[int] = []
    answers: dict[int, tuple[tuple[int, ...], Counters]] = {}

    generation = generate(
        small,
        PROMPTS,
        FREE,
        draft=make_draft(target=small, **SMALL),
        on_tokens=told.append,
        on_answer=lambda index, output, counters: answers.update({index: (tuple(output), counters)}),
    )

    assert sum(told) == total(generation.counters).output_tokens
    expected = zip(generation.outputs, generation.counters, strict=True)
    assert [answers[index] for index in range(len(PROMPTS))] == list(expected)
    assert 0 <= generation.overhead < 1


@pytest.mark.parametrize(
    ("prompt", "problem"),
    [
        ([], "empty"),
        ([VOCABULARY], "vocabulary of 7"),
        ([-1], "vocabulary"),
        ([1] * 500, "500 tokens; with its answer that is more than the 512 positions"),
    ],
)
def test_prompts_that_cannot_be_read_are_refused(small: Target, prompt: list[int], problem: str) -> None:
    with pytest.raises(UsageError, match=problem) as error:
        generate(small, [[1], prompt], FREE)
    assert error.value.where == "prompt 2"


@pytest.mark.parametrize("changes", [{"batch_size": 0}, {"num_speculative_tokens": 0}])
def test_senseless_settings_are_refused(small: Target, changes: dict[str, int]) -> None:
    with pytest.raises(UsageError, match="at least 1"):
        generate(small, PROMPTS, replace(FREE, **changes))


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"eagle_aux_hidden_state_layer_ids": [2, 4, 9]}, "layer 9 does not exist: the target has 8"),
        ({"eagle_aux_hidden_state_layer_ids": [2, 4, 4]}, r"fc takes 3 .* layers are \[2, 4\]"),
        ({"target_hidden_size": 48}, "hidden size 48, this one has 64"),
    ],
)
def test_a_draft_of_another_target_is_refused(
    small: Target, make_draft: Callable[..., DraftModel], changes: dict[str, Any], problem: str
) -> None:
    with pytest.raises(InputError, match=problem):
        generate(small, PROMPTS, FREE, draft=make_draft(target=small, **(SMALL | changes)))
