from __future__ import annotations

import pytest

from eagle3pack.draft.config import parse_draft_config
from eagle3pack.draft.tensors import expected_tensors, logical_name, resolve_names
from eagle3pack.errors import InputError
from tests.tiny import native_config, speculators_config


@pytest.mark.parametrize(
    "prefix", ["midlayer.", "layers.0.", "model.layers.0.", "model.midlayer.", "midlayer.0."]
)
def test_every_spelling_of_the_first_layer_is_the_same_tensor(prefix: str) -> None:
    assert logical_name(f"{prefix}self_attn.k_proj.weight") == "layers.0.self_attn.k_proj.weight"


def test_other_names_keep_their_spelling_but_for_the_model_prefix() -> None:
    assert logical_name("model.fc.weight") == "fc.weight"
    assert logical_name("layers.1.mlp.up_proj.weight") == "layers.1.mlp.up_proj.weight"
    assert logical_name("lm_head.weight") == "lm_head.weight"


def test_two_spellings_of_one_tensor_are_an_error() -> None:
    with pytest.raises(InputError, match=r"midlayer\.x and layers\.0\.x are two spellings of one tensor"):
        resolve_names(["midlayer.x", "layers.0.x"], where="draft")


def test_only_the_first_layer_reads_the_embedding_beside_the_hidden_state() -> None:
    specs = expected_tensors(parse_draft_config(native_config(num_hidden_layers=2), where="c"))
    assert specs["layers.0.self_attn.q_proj.weight"].shape == (128, 128)
    assert specs["layers.1.self_attn.q_proj.weight"].shape == (128, 64)
    assert "layers.0.hidden_norm.weight" in specs
    assert "layers.1.hidden_norm.weight" not in specs


def test_switches_bring_their_tensors() -> None:
    raw = native_config(
        fc_norm=True,
        norm_before_fc=True,
        attention_bias=True,
        num_aux_hidden_states=4,
        target_hidden_size=80,
        draft_vocab_size=32,
    )
    specs = expected_tensors(parse_draft_config(raw, where="c"))
    assert specs["fc.weight"].shape == (64, 320)
    assert specs["input_norm.weight"].shape == (320,)
    assert [specs[f"fc_norm.{i}.weight"].shape for i in range(4)] == [(80,)] * 4
    assert specs["layers.0.self_attn.k_proj.bias"].shape == (128,)
    assert specs["embed_tokens.weight"].required  # the target's has another width
    assert specs["d2t"].required and specs["lm_head.weight"].required
    qwen = expected_tensors(parse_draft_config(speculators_config(model_type="qwen3"), where="c"))
    assert qwen["layers.0.self_attn.q_norm.weight"].shape == (16,)
