"""What is recorded is what the draft's attention really read, and who saw whom."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from eagle3pack.convert.merging.attention import attention_forward, from_matrices
from eagle3pack.convert.merging.calibration import Calibration
from eagle3pack.convert.merging.capture import Recorder, attention_by_distance
from eagle3pack.convert.merging.moments import Moments, Sample
from eagle3pack.convert.merging.rotary import rope_spec
from eagle3pack.engine.draft_model import DraftModel
from eagle3pack.engine.generation import DraftPass, Settings
from eagle3pack.engine.loading import load_draft
from eagle3pack.engine.speculate import generate
from eagle3pack.engine.target import Target, load_target
from tests.convert.merging.test_calibration import document
from tests.tiny import draft_tensors, native_config, target_config, write_draft

PROMPTS = [[5 + i, 17, 30 + i, 8, 9][: 3 + i % 3] for i in range(12)]
SETTINGS = Settings(max_tokens=12, batch_size=5, ignore_stop_ids=True)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    return load_target(write_target(tmp_path_factory.mktemp("target")))


def write_target(folder: Path, **changes: Any) -> Path:
    """A random target whose texts are not all alike."""
    import json

    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    (folder / "config.json").write_text(json.dumps(target_config(torch_dtype="float32", **changes)))
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.copy_(torch.randn_like(parameter) * 3 / parameter.shape[-1] ** 0.5)
    model.save_pretrained(folder)
    return folder


class Run:
    """One recorded run, with the outputs of the draft's attention and its inputs beside it."""

    def __init__(self, target: Target, folder: Path, most: int = 10**6) -> None:
        raw = native_config(num_key_value_heads=4)
        tensors = draft_tensors(raw, dtype="F32")
        self.draft: DraftModel = load_draft(
            write_draft(folder, raw, tensors=tensors, dtype="F32"), target=target
        )
        self.recorder = Recorder(self.draft, len(PROMPTS), most)
        answers = [[range(len(prompt) - 1, 10**6)] for prompt in PROMPTS]
        self.recorder.start(0, range(len(PROMPTS)), answers)
        self.outputs: dict[int, list[Tensor]] = {}
        self.inputs: dict[int, list[Tensor]] = {}
        self.last: tuple[Tensor, Tensor] | None = None
        attention: Any = self.draft.layers[0].self_attn
        handle = attention.register_forward_hook(self._hear)
        self.made = generate(target, PROMPTS, SETTINGS, draft=self.draft, on_draft_pass=self._pass)
        handle.remove()
        self.stretches = self.recorder.stretches()

    def _hear(self, module: Any, arguments: tuple[Tensor, ...], output: Tensor) -> None:
        self.last = arguments[0].clone(), output.clone()

    def _pass(self, made: DraftPass) -> None:
        assert self.last is not None
        self.recorder(made)
        for row, (request, width) in enumerate(zip(made.requests, made.widths, strict=True)):
            self.inputs.setdefault(request, []).append(self.last[0][row, :width])
            self.outputs.setdefault(request, []).append(self.last[1][row, :width])

    def moments(self) -> Moments:
        second_moment, mean = self.recorder.averages()
        found = Calibration(document(), second_moment, mean, None, self.stretches)
        return found.moments(self.draft.layers[0].hidden_norm.weight, 1e-5)  # type: ignore[union-attr, arg-type]


@pytest.fixture(scope="module")
def recorded(target: Target, tmp_path_factory: pytest.TempPathFactory) -> Run:
    return Run(target, tmp_path_factory.mktemp("draft"))


def in_order(run: Run) -> list[Sample]:
    """Samples by request: request 0 and 10 are held out, and come apart."""
    moments = run.moments()
    held_out, others = list(moments.held_out), list(moments.samples)
    return [held_out.pop(0) if request % 10 == 0 else others.pop(0) for request in range(len(PROMPTS))]


def test_attention_over_what_was_recorded_is_what_the_engine_computed(recorded: Run) -> None:
    config = recorded.draft.config
    prefix = "layers.0.self_attn."
    state = {n.removeprefix(prefix): x for n, x in recorded.draft.state_dict().items() if prefix in n}
    weights = from_matrices(state, config.head_dim)
    spec = rope_spec(config.rope, config.head_dim)
    for request, sample in enumerate(in_order(recorded)):
        assert sample.steps is not None and set(sample.steps.tolist()) == {0, 1, 2}
        y = attention_forward(weights, spec, sample.x.float(), sample.positions, sample.visible)
        expected = torch.cat(recorded.outputs[request])
        assert float((y - expected).norm() / expected.norm()) < 0.02  # bfloat16
        exact = attention_forward(
            weights, spec, torch.cat(recorded.inputs[request]), sample.positions, sample.visible
        )
        torch.testing.assert_close(exact, expected, rtol=1e-4, atol=1e-4)


def test_the_text_that_the_draft_read_is_kept_and_which_of_it_is_answer(recorded: Run) -> None:
    for prompt, output, stretch in zip(PROMPTS, recorded.made.outputs, recorded.stretches, strict=True):
        assert stretch.token_ids is not None and stretch.answer is not None
        true = stretch.steps == 0
        following, text = stretch.token_ids[true].tolist(), [*prompt, *output]
        assert following == text[1 : len(following) + 1]
        assert len(text) - len(following) <= 1 + SETTINGS.num_speculative_tokens
        assert stretch.answer[true].tolist() == [i >= len(prompt) - 1 for i in range(len(following))]
        assert not bool(stretch.answer[~true].any())


def test_averages_are_over_every_input_but_the_held_out(recorded: Run) -> None:
    x = torch.cat([x for request in range(12) if request % 10 for x in recorded.inputs[request]]).double()
    second_moment, mean = recorded.recorder.averages()
    torch.testing.assert_close(second_moment.double(), x.T @ x / len(x), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(mean.double(), x.mean(0), rtol=1e-4, atol=1e-5)
    assert recorded.recorder.num_moments == len(x)
    seen = sum(len(x) for parts in recorded.inputs.values() for x in parts)
    assert sum(recorded.recorder.by_step) == seen
    assert [stretch.held_out for stretch in recorded.stretches] == [i % 10 == 0 for i in range(12)]


def test_beyond_its_room_it_drops_whole_tens_of_texts(target: Target, tmp_path: Path) -> None:
    small = Run(target, tmp_path, most=100)
    assert len(small.stretches) == 10  # the second ten went; the first stays, however full
    small.recorder.averages()
    assert small.recorder.num_moments > 100


def test_held_out_texts_stay_longer_than_the_others(target: Target, recorded: Run, tmp_path: Path) -> None:
    room = sum(len(stretch.positions) for stretch in recorded.stretches) * 8 // 10
    kept = [stretch.held_out for stretch in Run(target, tmp_path, most=room).stretches]
    assert kept == [i % 10 == 0 for i in range(11)]  # text 11 went, its held-out neighbour did not


def test_attention_by_distance_is_measured_on_who_sees_whom(recorded: Run) -> None:
    config = recorded.draft.config
    prefix = "layers.0.self_attn."
    state = {n.removeprefix(prefix): x for n, x in recorded.draft.state_dict().items() if prefix in n}
    weights, spec = from_matrices(state, config.head_dim), rope_spec(config.rope, config.head_dim)
    samples = recorded.moments().samples
    mass, queries = attention_by_distance(weights, spec, samples)
    assert queries == sum(len(sample.x) for sample in samples)
    assert mass.sum(1).tolist() == pytest.approx([1] * config.num_attention_heads) and bool((mass >= 0).all())
    assert mass.shape[1] == 1 + max(int(sample.positions.max()) for sample in samples)
    few, fewer = attention_by_distance(weights, spec, samples, most=1)
    assert fewer == len(samples[0].x) and float(few.sum()) == pytest.approx(config.num_attention_heads)
