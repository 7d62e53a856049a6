"""The speculators format, written for a native draft and kept for one that has it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from eagle3pack.convert.handoff.speculators import speculators_config as as_speculators
from eagle3pack.documents import schema_problems
from eagle3pack.draft.config import parse_draft_config
from tests.convert.handoff.samples import assert_same, hand_over, load
from tests.tiny import draft_tensors, native_config, speculators_config, write_draft

VARIANTS = [
    native_config(),
    native_config(architectures=["Eagle3Qwen3ForCausalLM"]),
    native_config(attention_bias=True, norm_before_residual=True, norm_output=True),
    native_config(fc_norm=True, rope_theta=5e5, rope_scaling={"rope_type": "yarn", "factor": 8.0}),
    native_config(num_hidden_layers=2, norm_before_fc=True, draft_vocab_size=40),
]


@pytest.mark.parametrize("raw", VARIANTS)
def test_a_config_says_the_same_in_this_format(raw: dict[str, Any]) -> None:
    native = parse_draft_config(raw, where="native")
    written = as_speculators(native, "org/target", ["LlamaForCausalLM"])
    assert schema_problems(written, "draft-config") == []
    read = parse_draft_config(written, where="speculators")
    assert read.dialect == "speculators"
    for key in native.__slots__:
        if key not in ("dialect", "architecture", "raw"):
            assert getattr(read, key) == getattr(native, key), key


@pytest.mark.parametrize("raw", VARIANTS)
def test_tensors_have_this_formats_names(tmp_path: Path, raw: dict[str, Any]) -> None:
    hand_over(tmp_path, "speculators", raw)
    found, converted = load(tmp_path / "retrain" / "draft"), load(tmp_path / "gqa")
    assert_same(found, {name.replace("midlayer.", "layers.0."): x for name, x in converted.items()})


def test_a_draft_of_this_format_keeps_its_config_but_for_the_target(tmp_path: Path) -> None:
    hand_over(tmp_path, "speculators", speculators_config())
    written = json.loads((tmp_path / "retrain" / "draft" / "config.json").read_text())
    converted = json.loads((tmp_path / "gqa" / "config.json").read_text())
    verifier = written["speculators_config"].pop("verifier")
    converted["speculators_config"].pop("verifier")
    assert written == converted
    assert verifier == {"name_or_path": str(tmp_path / "target"), "architectures": ["LlamaForCausalLM"]}


def test_a_draft_that_names_its_target_needs_no_other(tmp_path: Path) -> None:
    summary = hand_over(tmp_path, "speculators", speculators_config(), target=None)
    written = json.loads((tmp_path / "retrain" / "draft" / "config.json").read_text())
    assert written["speculators_config"]["verifier"]["name_or_path"] == "org/target"
    assert summary.hand_off is not None and summary.hand_off.written is not None
    assert "--verifier-name-or-path org/target" in summary.hand_off.written.command


def test_the_maps_are_named_so_that_those_of_the_data_are_not_taken(tmp_path: Path) -> None:
    summary = hand_over(tmp_path, "speculators", native_config(draft_vocab_size=40))
    place, draft = tmp_path / "retrain", load(tmp_path / "retrain" / "draft")
    assert summary.hand_off is not None and summary.hand_off.written is not None
    for name in ("d2t", "t2d"):
        assert f"--{name}-path {place / name}.npy" in summary.hand_off.written.command
        assert np.array_equal(np.load(place / f"{name}.npy"), draft[name].numpy())


def test_embedding_and_head_are_always_there(tmp_path: Path) -> None:
    tensors = draft_tensors(native_config())
    del tensors["embed_tokens.weight"], tensors["lm_head.weight"]
    write_draft(tmp_path / "mha", tensors=tensors)
    hand_over(tmp_path, "speculators")
    found, target = load(tmp_path / "retrain" / "draft"), load(tmp_path / "target")
    assert torch.equal(found["embed_tokens.weight"], target["model.embed_tokens.weight"])
    assert torch.equal(found["lm_head.weight"], target["lm_head.weight"])


def test_a_whole_vocabulary_has_no_maps(tmp_path: Path) -> None:
    raw = native_config()
    tensors = draft_tensors(raw) | {"d2t": ("I64", (96,), bytes(8 * 96)), "t2d": ("BOOL", (96,), b"\1" * 96)}
    write_draft(tmp_path / "mha", raw, tensors=tensors)
    hand_over(tmp_path, "speculators")
    assert not {"d2t", "t2d"} & set(load(tmp_path / "retrain" / "draft"))
    assert not list((tmp_path / "retrain").glob("*.npy"))
