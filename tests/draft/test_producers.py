from __future__ import annotations

import pytest

from eagle3pack.draft.config import parse_draft_config
from eagle3pack.draft.producers import canonical_config, with_key_value_heads
from eagle3pack.errors import UnsupportedDraftError, UsageError
from tests.tiny import native_config, speculators_config


def test_native_keeps_every_other_key_and_their_order() -> None:
    raw = native_config()
    changed = with_key_value_heads(parse_draft_config(raw, where="c"), 2)
    assert list(changed) == list(raw)
    assert {key for key in raw if raw[key] != changed[key]} == {"num_key_value_heads"}


def test_speculators_keeps_its_heads_inside_the_layer_config() -> None:
    raw = speculators_config()
    changed = with_key_value_heads(parse_draft_config(raw, where="c"), 2)
    assert "num_key_value_heads" not in changed
    assert changed["transformer_layer_config"]["num_key_value_heads"] == 2
    assert raw["transformer_layer_config"]["num_key_value_heads"] == 8


def test_a_stray_copy_at_the_top_follows() -> None:
    raw = {**speculators_config(), "num_key_value_heads": 8}
    assert with_key_value_heads(parse_draft_config(raw, where="c"), 2)["num_key_value_heads"] == 2


SAME_IN_THE_PORTABLE_FORM = [
    "hidden_size",
    "head_dim",
    "intermediate_size",
    "vocab_size",
    "draft_vocab_size",
    "rope",
    "norm_before_residual",
    "norm_before_fc",
    "fc_norm",
    "norm_output",
    "attention_bias",
    "rms_norm_eps",
    "aux_hidden_state_layer_ids",
]


@pytest.mark.parametrize(
    "raw", [native_config(use_cache=None), speculators_config()], ids=["native", "speculators"]
)
def test_the_portable_form_means_the_same_and_leaves_no_default_to_an_engine(raw: dict[str, object]) -> None:
    config = parse_draft_config(raw, where="c")
    portable = canonical_config(config, 2, config.aux_hidden_state_layer_ids, "bfloat16")
    again = parse_draft_config(portable, where="c")
    for name in SAME_IN_THE_PORTABLE_FORM:
        assert getattr(again, name) == getattr(config, name), name
    assert again.num_key_value_heads == 2
    assert portable["architectures"] == ["LlamaForCausalLMEagle3"]
    assert portable["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [2, 4, 5]
    assert portable["rope_parameters"]["rope_theta"] == portable["rope_theta"] == 10000.0
    assert [key for key, value in portable.items() if value is None] == ["rope_scaling"]
    assert "speculators_model_type" not in portable and "transformer_layer_config" not in portable


def test_the_portable_form_never_guesses() -> None:
    silent = native_config(eagle_aux_hidden_state_layer_ids=None, eagle_config=None)
    with pytest.raises(UsageError, match="names no auxiliary hidden state layers"):
        canonical_config(parse_draft_config(silent, where="c"), 2, None, "bfloat16")
    with pytest.raises(UsageError, match="gives no rope_theta"):
        canonical_config(
            parse_draft_config(native_config(rope_theta=None), where="c"), 2, (1, 2, 3), "bfloat16"
        )
    with pytest.raises(UnsupportedDraftError, match="norms queries and keys"):
        qwen = parse_draft_config(speculators_config(model_type="qwen3"), where="c")
        canonical_config(qwen, 2, (1, 2, 3), "bfloat16")
