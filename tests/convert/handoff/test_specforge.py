"""SpecForge's folder: its names, its buffers, and a configuration that keeps the draft's own map."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from tests.convert.handoff.samples import assert_same, hand_over, load
from tests.tiny import draft_tensors, native_config, speculators_config, write_draft


@pytest.mark.parametrize("vocabulary", [96, 40])
@pytest.mark.parametrize("make", [native_config, speculators_config])
def test_the_draft_has_its_names_and_both_maps(tmp_path: Path, vocabulary: int, make: Any) -> None:
    raw = make()
    raw["draft_vocab_size"] = vocabulary
    write_draft(tmp_path / "mha", raw, prefix="layers.0.")
    hand_over(tmp_path, "specforge")
    found, converted = load(tmp_path / "retrain" / "draft"), load(tmp_path / "gqa")
    d2t, t2d = found.pop("d2t"), found.pop("t2d")
    assert (d2t.dtype, t2d.dtype) == (torch.int64, torch.bool)
    assert torch.equal(t2d.nonzero().flatten(), d2t + torch.arange(vocabulary))
    for name in ("d2t", "t2d"):
        converted.pop(name, None)
    assert_same(found, {name.replace("layers.0.", "midlayer."): x for name, x in converted.items()})


def test_a_map_of_32_bits_is_widened(tmp_path: Path) -> None:
    raw = native_config(draft_vocab_size=40)
    tensors = draft_tensors(raw)
    wide = torch.frombuffer(bytearray(tensors["d2t"][2]), dtype=torch.int64)
    tensors["d2t"] = ("I32", (40,), wide.int().numpy().tobytes())
    write_draft(tmp_path / "mha", raw, tensors=tensors)
    hand_over(tmp_path, "specforge")
    assert torch.equal(load(tmp_path / "retrain" / "draft")["d2t"], wide)


def test_the_run_configuration_starts_from_the_draft_and_its_map(tmp_path: Path) -> None:
    hand_over(tmp_path, "specforge", native_config(norm_output=False, draft_vocab_size=40))
    place = tmp_path / "retrain"
    run = yaml.safe_load((place / "run.yaml").read_text())
    assert run["model"] == {
        "target_model_path": str(tmp_path / "target"),
        "draft_checkpoint_path": str(place / "draft"),
        "vocab_mapping_path": str(place / "vocab_mapping.pt"),
        "load_target_embedding": False,
        "aux_hidden_state_layer_ids": [1, 3, 4],  # [2, 4, 5] as vLLM counts
    }
    maps = torch.load(place / "vocab_mapping.pt", weights_only=True)
    assert_same(maps, {name: load(place / "draft")[name] for name in ("d2t", "t2d")})
    # There, norm_output false would leave out the norm before lm_head.
    assert "norm_output" not in json.loads((place / "draft" / "config.json").read_text())


def test_a_draft_without_an_embedding_takes_the_targets(tmp_path: Path) -> None:
    tensors = draft_tensors(native_config())
    del tensors["embed_tokens.weight"]
    write_draft(tmp_path / "mha", tensors=tensors)
    hand_over(tmp_path, "specforge")
    run = yaml.safe_load((tmp_path / "retrain" / "run.yaml").read_text())
    assert run["model"]["load_target_embedding"] is True


def test_a_large_draft_has_shards_and_an_index(tmp_path: Path) -> None:
    hand_over(tmp_path, "specforge", shard_size=50_000)
    index = json.loads((tmp_path / "retrain" / "draft" / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"]) == set(load(tmp_path / "retrain" / "draft"))
