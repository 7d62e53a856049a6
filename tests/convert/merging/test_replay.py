"""benchmarks/fidelity.py replays drafts on known text: it proposes what the engine proposes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from benchmarks.fidelity import K, Replay, Texts
from eagle3pack.convert.merging.attention import from_matrices
from eagle3pack.convert.merging.capture import Recorder
from eagle3pack.convert.merging.rotary import rope_spec
from eagle3pack.engine.generation import DraftPass, Settings
from eagle3pack.engine.loading import load_draft
from eagle3pack.engine.speculate import generate
from eagle3pack.engine.target import load_target
from tests.convert.merging.test_capture import PROMPTS, write_target
from tests.tiny import draft_tensors, native_config, write_draft


@pytest.mark.parametrize("norms", [{}, {"norm_before_residual": True, "norm_output": True}])
def test_a_replay_proposes_what_the_engine_proposed(tmp_path: Path, norms: dict[str, bool]) -> None:
    (tmp_path / "target").mkdir()
    target = load_target(write_target(tmp_path / "target"))
    raw = native_config(draft_vocab_size=40, num_key_value_heads=4, **norms)
    folder = write_draft(tmp_path / "draft", raw, tensors=draft_tensors(raw, dtype="F32"), dtype="F32")
    draft = load_draft(folder, target=target)
    texts = Texts(Recorder(draft, 1, 10**9))
    texts.recorder.start(0, range(len(PROMPTS)))
    engine: dict[tuple[int, int], list[int]] = {}  # by prompt and position of the round

    def hear(made: DraftPass) -> None:
        texts(made)
        for row, prompt in enumerate(made.requests if made.step else ()):
            place = prompt, int(made.positions[row, 0]) - made.step
            engine.setdefault(place, []).append(int(made.token_ids[row, 0]))

    settings = Settings(16, K, batch_size=5, ignore_stop_ids=True)
    made = generate(target, PROMPTS, settings, draft=draft, on_draft_pass=hear)
    known, config = texts.finish(PROMPTS), draft.config
    prefix = "layers.0.self_attn."
    state = {n.removeprefix(prefix): x for n, x in draft.state_dict().items() if prefix in n}
    attention, rope = from_matrices(state, config.head_dim), rope_spec(config.rope, config.head_dim)
    replay = Replay(draft, rope)
    with torch.inference_mode():
        proposals = [replay._proposals(attention, text) for text in known]
        counters = [replay.counters(attention, text) for text in known]
    compared = 0
    for (prompt, position), tokens in engine.items():
        row = position - known[prompt].prompt_tokens + 1
        if row < len(proposals[prompt]):
            assert proposals[prompt][row][: K - 1].tolist() == tokens
            compared += 1
    assert compared > 100
    for replayed, whole in zip(counters, made.counters, strict=True):
        assert 0 < replayed.drafts <= whole.drafts
        assert whole.accepted_tokens - K <= replayed.accepted_tokens <= whole.accepted_tokens
