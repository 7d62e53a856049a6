from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eagle3pack.draft.config import parse_draft_config
from eagle3pack.errors import Eagle3PackError, InputError, UnsupportedDraftError
from tests.tiny import native_config, speculators_config

# One config.json a producer, with what is peculiar to it.
PRODUCERS: dict[str, dict[str, Any]] = {
    "safeailab": native_config(
        architectures=["LlamaForCausalLM"],
        head_dim=None,
        num_attention_heads=4,
        num_key_value_heads=4,
        draft_vocab_size=32,
        eagle_aux_hidden_state_layer_ids=None,
        eagle_config=None,
        norm_before_residual=None,
    ),
    "specforge": native_config(eagle_aux_hidden_state_layer_ids=None),
    "torchspec": native_config(_torchspec_version="0.1", draft_vocab_size=None, eagle_config=None),
    "angelslim": native_config(architectures=["Eagle3LlamaForCausalLM"], target_model_type="qwen3"),
    "modelopt": native_config(use_cache=None, rope_parameters={"rope_theta": 5e5, "rope_type": "default"}),
    "speculators": speculators_config(),
    "speculators qwen3": speculators_config(model_type="qwen3"),
}


@pytest.mark.parametrize("producer", PRODUCERS)
def test_every_producers_dialect_gives_the_same_view(producer: str) -> None:
    config = parse_draft_config(PRODUCERS[producer], where="config.json")
    assert (config.hidden_size, config.head_dim, config.vocab_size) == (64, 16, 96)
    assert config.num_aux_hidden_states == 3
    assert config.is_mha
    assert config.qk_norm == (producer == "speculators qwen3")
    assert config.dialect == ("speculators" if "speculators" in producer else "native")


def test_null_or_absent_key_value_heads_mean_mha() -> None:
    absent = native_config()
    del absent["num_key_value_heads"]
    for raw in (absent, {**absent, "num_key_value_heads": None}):
        assert parse_draft_config(raw, where="c").num_key_value_heads == 8


def test_speculators_default_of_norm_before_residual_is_the_one_its_reader_takes() -> None:
    raw = speculators_config()
    del raw["norm_before_residual"]
    assert parse_draft_config(raw, where="c").norm_before_residual is True
    native = native_config(norm_before_residual=None)
    assert parse_draft_config(native, where="c").norm_before_residual is False


def test_auxiliary_layers_are_read_at_the_top_before_eagle_config() -> None:
    nested = {"eagle_aux_hidden_state_layer_ids": [1, 3, 5, 6]}
    only_nested = native_config(eagle_aux_hidden_state_layer_ids=None, eagle_config=nested)
    config = parse_draft_config(only_nested, where="c")
    assert config.aux_hidden_state_layer_ids == (1, 3, 5, 6)
    assert config.num_aux_hidden_states == 4
    both = native_config(eagle_config=nested)
    assert parse_draft_config(both, where="c").aux_hidden_state_layer_ids == (2, 4, 5)


def test_rope_parameters_win_over_the_older_spelling() -> None:
    raw = native_config(rope_parameters={"rope_theta": 5e6, "rope_type": "yarn", "factor": 4.0})
    rope = parse_draft_config(raw, where="c").rope
    assert (rope.theta, rope.rope_type, dict(rope.scaling)) == (5e6, "yarn", {"factor": 4.0})
    assert rope.as_v4() == {"rope_theta": 5e6, "rope_scaling": {"rope_type": "yarn", "factor": 4.0}}
    old = native_config(rope_scaling={"type": "linear", "factor": 2.0})
    rope = parse_draft_config(old, where="c").rope
    assert rope.as_v5() == {"rope_theta": 10000.0, "rope_type": "linear", "factor": 2.0}


def test_an_unknown_theta_stays_unknown() -> None:
    assert parse_draft_config(native_config(rope_theta=None), where="c").rope.theta is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": "64"}, 'c: hidden_size is "64", expected a whole number, at least 1'),
        ({"hidden_size": None}, "c: hidden_size is missing, expected a whole number, at least 1"),
        ({"num_attention_heads": 0}, "c: num_attention_heads is 0, expected a whole number, at least 1"),
        (
            {"num_key_value_heads": True},
            "c: num_key_value_heads is true, expected a whole number, at least 1",
        ),
        (
            {"num_key_value_heads": 3},
            "c: num_attention_heads 8 is not a multiple of num_key_value_heads 3",
        ),
        (
            {"head_dim": None, "num_attention_heads": 24, "num_key_value_heads": 24},
            "c: head_dim is missing, expected a whole number, since hidden_size 64 / 24 heads is none",
        ),
        ({"draft_vocab_size": 97}, "c: draft_vocab_size is 97, expected at most vocab_size, 96"),
        ({"attention_bias": "no"}, 'c: attention_bias is "no", expected true or false'),
        ({"rope_theta": -1}, "c: rope_theta is -1, expected a positive number"),
        ({"rope_scaling": 2}, "c: rope_scaling is 2, expected an object"),
        ({"eagle_config": []}, "c: eagle_config is [], expected an object"),
        (
            {"eagle_aux_hidden_state_layer_ids": [2, "4"]},
            'c: eagle_aux_hidden_state_layer_ids is [2, "4"], expected a list of whole numbers',
        ),
        ({"architectures": "Llama"}, 'c: architectures is "Llama", expected a list of texts'),
    ],
)
def test_a_wrong_value_is_one_error_that_names_file_key_value_and_what_was_expected(
    changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(InputError) as error:
        parse_draft_config(native_config(**changes), where="c")
    assert str(error.value) == message


def test_a_nested_key_is_named_with_its_path() -> None:
    with pytest.raises(InputError, match=r"transformer_layer_config\.hidden_size is null"):
        parse_draft_config(
            {**speculators_config(), "transformer_layer_config": {"hidden_size": None}}, where="c"
        )


def test_an_unknown_architecture_lists_the_known_ones() -> None:
    with pytest.raises(
        InputError, match=r'architectures is \["MistralForCausalLM"\], expected one of EAGLE3Llama'
    ):
        parse_draft_config(native_config(architectures=["MistralForCausalLM"]), where="c")


@pytest.mark.parametrize(
    ("raw", "why"),
    [
        (native_config(architectures=["Eagle3DeepseekV2ForCausalLM"]), "MLA"),
        (native_config(model_type="kimi_k2"), "MLA"),
        (native_config(architectures=["DFlashDraftModel"]), "DFlash"),
        (native_config(architectures=["MiniMaxM3MTP"]), "multi-token prediction"),
        (native_config(architectures=["PEagleDraftModel"]), "P-EAGLE"),
        ({**speculators_config(), "speculators_model_type": "dflash"}, "not an EAGLE3 draft"),
    ],
)
def test_other_kinds_of_drafts_are_refused_with_the_reason(raw: dict[str, Any], why: str) -> None:
    with pytest.raises(UnsupportedDraftError, match=why):
        parse_draft_config(raw, where="c")


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)


@given(raw=st.sampled_from(list(PRODUCERS.values())), data=st.data())
def test_reading_is_total(raw: dict[str, Any], data: st.DataObject) -> None:
    mutated = json.loads(json.dumps(raw))
    place = mutated
    if "transformer_layer_config" in mutated and data.draw(st.booleans()):
        place = mutated["transformer_layer_config"]
    for key in data.draw(st.lists(st.sampled_from(sorted(place)), min_size=1, max_size=3)):
        place[key] = data.draw(json_values)
    try:
        config = parse_draft_config(mutated, where="c")
    except Eagle3PackError:
        return
    assert config.num_attention_heads % config.num_key_value_heads == 0
