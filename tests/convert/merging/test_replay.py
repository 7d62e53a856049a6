"""A replay counts what the engine counted, round for round."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from eagle3pack.checkpoint.header import read_header
from eagle3pack.convert.merging.attention import from_matrices
from eagle3pack.convert.merging.capture import Recorder
from eagle3pack.convert.merging.replay import Replay, Text, replayable, stored_rows, surroundings
from eagle3pack.convert.merging.rotary import rope_spec
from eagle3pack.engine.counters import Counters, total
from eagle3pack.engine.generation import DraftPass, Generation, Settings
from eagle3pack.engine.loading import load_draft
from eagle3pack.engine.speculate import generate
from eagle3pack.engine.target import Target, load_target
from tests.convert.merging.test_capture import write_target
from tests.tiny import draft_tensors, native_config, write_draft

K = 3
VOCABULARY = {"vocab_size": 3, "draft_vocab_size": 2}  # so few that random proposals are often right
PROMPTS = [[i % 3, i // 3, 1, 0, 2][: 3 + i % 3] for i in range(9)]
ANSWERS = [[range(len(prompt) - 1, 10**6)] for prompt in PROMPTS]


class Run:
    """One run of the engine: its counters, its texts, and its rounds whose proposals lie within them."""

    def __init__(self, target: Target, folder: Path, **changes: object) -> None:
        raw = native_config(**VOCABULARY, num_key_value_heads=4, **changes)
        tensors = draft_tensors(raw, dtype="F32")
        self.draft = load_draft(write_draft(folder, raw, tensors=tensors, dtype="F32"), target=target)
        self.recorder = Recorder(self.draft, len(PROMPTS), 10**6)
        self.recorder.start(0, range(len(PROMPTS)), ANSWERS)
        self._read: dict[int, list[tuple[torch.Tensor, torch.Tensor]]] = {i: [] for i in range(len(PROMPTS))}
        self._anchors: dict[int, list[int]] = {i: [] for i in range(len(PROMPTS))}
        settings = Settings(24, K, batch_size=5, ignore_stop_ids=True)
        self.made: Generation = generate(
            target, PROMPTS, settings, draft=self.draft, on_draft_pass=self._hear
        )
        self.texts = [self._text(i) for i in range(len(PROMPTS))]
        prefix, state = "layers.0.self_attn.", self.draft.state_dict()
        attention = {name.removeprefix(prefix): x for name, x in state.items() if prefix in name}
        self.weights = from_matrices(attention, self.draft.config.head_dim)
        (file,) = folder.glob("*.safetensors")
        (table,) = (entry for entry in read_header(file).tensors if "embed_tokens" in entry.name)
        self.around = surroundings(state, stored_rows(table), self.draft.config)

    def replay(self, texts: Sequence[Text]) -> Replay:
        config = self.draft.config
        rope = rope_spec(config.rope, config.head_dim)
        return Replay(texts, self.around, rope, K)

    def _hear(self, made: DraftPass) -> None:
        self.recorder(made)
        for row, (request, width) in enumerate(zip(made.requests, made.widths, strict=True)):
            if made.step == 0:
                part = made.token_ids[row, :width].clone(), made.hidden[row, :width].clone()
                self._read[request].append(part)
            elif made.step == 1:
                self._anchors[request].append(int(made.positions[row, 0]) - 1)

    def _text(self, request: int) -> Text:
        token_ids, hidden = (torch.cat([part[i] for part in self._read[request]]) for i in (0, 1))
        return Text(token_ids, hidden, torch.arange(len(token_ids)) >= len(PROMPTS[request]) - 1)

    def counters(self, request: int) -> Counters:
        """Of the rounds that a replay can know, from where the engine's rounds began."""
        anchors, end = self._anchors[request], len(self.texts[request].token_ids)
        accepted = [after - now - 1 for now, after in itertools.pairwise(anchors) if now + K < end]
        by_position = tuple(sum(count > i for count in accepted) for i in range(K))
        return Counters(
            len(accepted), K * len(accepted), sum(accepted), by_position, len(accepted) + sum(accepted)
        )


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    return load_target(write_target(tmp_path_factory.mktemp("target"), vocab_size=3))


@pytest.fixture(scope="module")
def run(target: Target, tmp_path_factory: pytest.TempPathFactory) -> Run:
    return Run(target, tmp_path_factory.mktemp("draft"))


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"norm_before_residual": True, "norm_output": True},
        {"attention_bias": True},
        {"architectures": ["Eagle3Qwen3ForCausalLM"]},
    ],
)
def test_a_replay_counts_exactly_what_the_engine_counted(
    target: Target, tmp_path: Path, changes: dict[str, object]
) -> None:
    run = Run(target, tmp_path, **changes)
    replayed = run.replay(run.texts).counters(run.weights)
    assert list(replayed) == [run.counters(request) for request in range(len(PROMPTS))]
    assert total(replayed).drafts > 100 and total(replayed).accepted_per_position[1] > 0
    for ours, whole in zip(replayed, run.made.counters, strict=True):
        assert 0 < ours.drafts <= whole.drafts < ours.drafts + K + 1
        assert whole.accepted_tokens - K <= ours.accepted_tokens <= whole.accepted_tokens


def test_what_a_calibration_keeps_is_enough_but_for_its_rounding(run: Run) -> None:
    kept = replayable(run.recorder.stretches(), K)
    assert [text.token_ids.tolist() for text in kept] == [text.token_ids.tolist() for text in run.texts]
    assert [text.answer.tolist() for text in kept] == [text.answer.tolist() for text in run.texts]
    exact, rounded = (total(run.replay(texts).counters(run.weights)) for texts in (run.texts, kept))
    assert abs(rounded.accepted_tokens - exact.accepted_tokens) <= 0.05 * exact.drafts


def test_an_answer_that_a_question_interrupts_is_counted_in_parts(run: Run) -> None:
    text = max(run.texts, key=lambda text: len(text.token_ids))
    answer = text.answer.clone()
    answer[12:15] = False
    replay = run.replay([text])
    whole = replay._accepted(run.weights, text)
    parts = replay._accepted(run.weights, Text(text.token_ids, text.hidden, answer))
    for position, (expected, found) in enumerate(zip(whole, parts, strict=True)):
        assert found == (None if 12 - K <= position < 15 else expected)
