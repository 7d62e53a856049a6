"""Calibrated merges of the shipped draft, on text that its real target wrote."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from eagle3pack.convert import calibrate
from eagle3pack.convert.command import ConvertOptions, run_convert
from eagle3pack.convert.merging.attention import from_matrices
from eagle3pack.convert.merging.calibration import read_calibration
from eagle3pack.convert.merging.fidelity import output_error
from eagle3pack.convert.merging.merge import MergeOptions, merge
from eagle3pack.convert.merging.rotary import rope_spec
from eagle3pack.draft.rope import RopeConfig
from eagle3pack.engine.prompts import shipped_prompts
from tests.convert.test_command import NoProgress
from tests.integration.real_models import DRAFT, smollm2_target

NUM_PROMPTS, MAX_TOKENS = 20, 64


@pytest.mark.slow
def test_on_real_text_errors_fall_from_mean_to_als_and_ridge_is_never_worse(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.set_num_threads(1)
    monkeypatch.setattr(calibrate, "MAX_TOKENS", MAX_TOKENS)
    prompts, file = tmp_path / "prompts.jsonl", tmp_path / "c.safetensors"
    turns = [prompt.turns[0] for prompt in shipped_prompts().prompts[:NUM_PROMPTS]]
    prompts.write_text("\n".join(json.dumps({"prompt": turn}) for turn in turns))
    options = ConvertOptions(
        num_kv_heads=4,
        method="svd",
        target=str(smollm2_target()),
        calibrate_with=str(prompts),
        save_calibration=file,
        dry_run=True,
    )
    run_convert(str(DRAFT), str(tmp_path / "gqa"), options, say=print, progress=NoProgress())
    tensors = load_file(DRAFT / "model.safetensors")
    attention = {n.split("self_attn.")[1]: x.float() for n, x in tensors.items() if "self_attn." in n}
    weights, rope = from_matrices(attention, 64), rope_spec(RopeConfig(theta=100000.0), 64, 8192)
    moments = read_calibration(file).moments(tensors["midlayer.hidden_norm.weight"], 1e-5)

    def error(method: str, refit: str | None = None) -> float:
        asked = MergeOptions(4, method, refit, max_distance=8192)  # type: ignore[arg-type]
        merged = merge(weights, rope, asked, moments.metric(), moments).weights
        return output_error(weights, merged, rope, moments.held_out)

    errors = [error(method) for method in ("mean", "procrustes", "svd", "als")]
    print(errors)
    assert errors == sorted(errors, reverse=True)
    ridge = error("als", "ridge")
    print(ridge)
    assert ridge <= errors[-1] * (1 + 1e-6)
