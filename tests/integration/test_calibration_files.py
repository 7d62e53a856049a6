"""A calibration of the shipped draft from hidden states of its real target in files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from eagle3pack.convert import calibrate
from eagle3pack.convert.command import ConvertOptions, run_convert
from eagle3pack.convert.merging.calibration import Calibration, read_calibration
from eagle3pack.draft.target import default_aux_layer_ids
from eagle3pack.engine.chat import load_chat
from eagle3pack.engine.generation import Settings
from eagle3pack.engine.loading import load_draft
from eagle3pack.engine.prompts import shipped_prompts
from eagle3pack.engine.speculate import generate
from eagle3pack.engine.target import load_target
from tests.convert.test_command import NoProgress
from tests.engine.test_replay import states_of
from tests.integration.real_models import DRAFT, smollm2_target

MAX_TOKENS = 64


@pytest.mark.slow
def test_real_states_from_files_calibrate_as_the_target_in_process_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In bfloat16, where a few tokens may differ between decoding and reading the whole text at once."""
    torch.set_num_threads(1)
    monkeypatch.setattr(calibrate, "MAX_TOKENS", MAX_TOKENS)
    folder, features = smollm2_target(), tmp_path / "features"
    features.mkdir()
    chat, target = load_chat(folder), load_target(folder, dtype=torch.bfloat16)
    asked = [chat.prompt(prompt.turns[:1]) for prompt in shipped_prompts().prompts[:12]]
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("\n".join(json.dumps({"token_ids": ids}) for ids in asked))
    settings = Settings(max_tokens=MAX_TOKENS, stop_ids=chat.stop_ids)
    outputs = generate(target, asked, settings, draft=load_draft(DRAFT, target=target)).outputs
    target.capture(default_aux_layer_ids(target.spec.num_hidden_layers))
    for number, (prompt, output) in enumerate(zip(asked, outputs, strict=True)):
        ids = torch.tensor([*prompt, *output])
        held = {
            "input_ids": ids,
            "loss_mask": (torch.arange(len(ids)) >= len(prompt)).long(),
            "aux_hidden_state": states_of(target, ids)[None],
        }
        torch.save(held, features / f"data_{number}.ckpt")

    def calibration(name: str, **options: Any) -> Calibration:
        file = tmp_path / name
        wanted = ConvertOptions(4, method="svd", save_calibration=file, dry_run=True, **options)
        run_convert(str(DRAFT), str(tmp_path / "gqa"), wanted, say=print, progress=NoProgress())
        return read_calibration(file)

    lived = calibration("lived", target=str(folder), calibrate_with=str(prompts))
    found = calibration("found", target=str(folder), calibrate_from=features)
    ours, theirs = found.document["generation"], lived.document["generation"]
    assert ours["output_tokens"] == theirs["output_tokens"] > 500
    assert ours["mean_accepted_length"] == pytest.approx(theirs["mean_accepted_length"], rel=0.03)
    difference = float((found.second_moment - lived.second_moment).norm() / lived.second_moment.norm())
    print(ours, theirs, difference)
    assert difference < 0.03
    for a, b in zip(found.stretches, lived.stretches, strict=True):
        true, also = a.hidden[a.steps == 0].float(), b.hidden[b.steps == 0].float()
        shared = min(len(true), len(also))
        assert float((true[:shared] - also[:shared]).norm() / also[:shared].norm()) < 0.03
