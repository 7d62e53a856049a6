"""What is read out of a target's config, whoever wrote it."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from eagle3pack.draft.target import (
    bundled_target,
    bundled_target_names,
    default_aux_layer_ids,
    hands_out_states,
    parse_target_config,
    read_target,
)
from eagle3pack.errors import InputError
from tests.tiny import target_config


def parse(**changes: Any) -> Any:
    return parse_target_config(target_config(**changes), where="config.json", name="org/target")


def test_a_text_model_is_read_as_it_stands() -> None:
    target = parse()
    assert (target.hidden_size, target.vocab_size, target.num_hidden_layers) == (64, 96, 8)
    assert (target.num_attention_heads, target.num_key_value_heads, target.head_dim) == (8, 2, 16)
    assert (target.bos_token_id, target.eos_token_ids) == (1, (2,))
    assert target.attention_kinds == ("full",)
    assert not (target.is_multimodal or target.is_mla or target.is_hybrid or target.bundled)


@pytest.mark.parametrize(
    "path", [("text_config",), ("llm_config",), ("language_config",), ("thinker_config", "text_config")]
)
def test_a_multimodal_config_is_unwrapped(path: tuple[str, ...]) -> None:
    inner = target_config()
    raw: dict[str, Any] = inner
    for key in reversed(path):
        raw = {key: raw}
    raw |= {"architectures": ["SomeForConditionalGeneration"], "model_type": "vl", "vocab_size": 7}
    target = parse_target_config(raw, where="config.json", name="vl")
    assert target.is_multimodal
    assert (target.vocab_size, target.architecture) == (96, "SomeForConditionalGeneration")
    assert target.text is inner


def test_what_the_text_part_leaves_out_is_looked_for_at_the_top() -> None:
    inner = target_config(vocab_size=None, torch_dtype=None, eos_token_id=None)
    raw = {"text_config": inner, "vocab_size": 96, "dtype": "float16", "eos_token_id": [3, 4]}
    target = parse_target_config(raw, where="config.json", name="vl")
    assert (target.vocab_size, target.dtype, target.eos_token_ids) == (96, "float16", (3, 4))


@pytest.mark.parametrize(
    ("changes", "kinds"),
    [
        ({"layer_types": ["sliding_attention", "full_attention"] * 4}, ("full", "sliding")),
        ({"layer_types": ["linear_attention"] * 3 + ["full_attention"]}, ("full", "linear")),
        ({"sliding_window": 128}, ("sliding",)),
        ({"sliding_window": 128, "use_sliding_window": False}, ("full",)),
        ({"full_attention_interval": 4}, ("full", "linear")),
        ({"attn_type_list": [1] * 8}, ("full",)),
        ({"attn_type_list": [0, 1] * 4}, ("full", "linear")),
        ({"sparse_attention_config": {"sparse_block_size": 128}}, ("full", "sparse")),
        ({"kv_lora_rank": 512, "qk_rope_head_dim": 64}, ("mla",)),
    ],
)
def test_the_kinds_of_attention(changes: dict[str, Any], kinds: tuple[str, ...]) -> None:
    target = parse(**changes)
    assert target.attention_kinds == kinds
    assert target.is_hybrid == (len(kinds) > 1)


def test_mla_keeps_one_latent() -> None:
    target = parse(kv_lora_rank=512, qk_rope_head_dim=64, head_dim=None, v_head_dim=128)
    assert (target.is_mla, target.mla_latent_size, target.head_dim) == (True, 576, 128)


def test_rotary_settings_in_a_form_of_their_own_are_left_aside() -> None:
    assert parse(rope_theta=[1e4, 1e6]).rope.theta is None
    assert parse(rotary_dim=8).rope.partial_rotary_factor == 0.5


@pytest.mark.parametrize("key", ["hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size"])
def test_a_missing_size_is_named(key: str) -> None:
    with pytest.raises(InputError, match=key):
        parse(**{key: None})


def test_the_infinity_of_hybrid_targets_is_read(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(target_config(time_step_limit=[0.0, float("inf")])))
    assert read_target(tmp_path).hidden_size == 64


def test_the_digest_is_that_of_the_file(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(target_config()))
    expected = hashlib.sha256(path.read_bytes()).hexdigest()
    assert read_target(tmp_path).config_sha256 == read_target(path).config_sha256 == expected


@pytest.mark.parametrize("name", bundled_target_names())
def test_every_bundled_shape_is_sound_and_says_its_source(name: str) -> None:
    target = bundled_target(name.lower())
    assert target is not None
    assert target.name == name and target.bundled and target.bundled_from
    assert target.config_sha256 is None
    assert hands_out_states(target.architecture)


def test_minimax_m3() -> None:
    target = bundled_target("MiniMaxAI/MiniMax-M3")
    assert target is not None
    assert (target.hidden_size, target.num_key_value_heads, target.head_dim) == (6144, 4, 128)
    assert target.is_multimodal
    assert default_aux_layer_ids(target.num_hidden_layers) == (2, 30, 57)
    assert target.rope.partial_rotary_factor == 0.5


def test_an_unknown_name_has_no_bundled_shape() -> None:
    assert bundled_target("org/unknown") is None


def test_which_targets_give_states() -> None:
    assert hands_out_states("Gemma3ForCausalLM") is False
    assert hands_out_states("NobodyKnowsForCausalLM") is None
