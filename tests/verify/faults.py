"""One fault at a time, over a good draft, and what each must raise.

Rows are those of the table that was measured against vLLM 0.32 (its column `outcome` is in docs/faults.md)
and of public issues, `#N` for the N-th of the list there.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tests.verify import drafts
from tests.verify.drafts import (
    DRAFT_VOCAB,
    HEAD,
    HEAD_DIM,
    HEADS,
    HIDDEN,
    THETA,
    VOCAB,
    Draft,
    float_tensor,
    make,
    native,
    speculators_draft,
    without,
)

ATTENTION = "layers.0.self_attn."


@dataclass(frozen=True)
class Fault:
    """A fault and what verify must say.

    Attributes:
        row: of the measured table, or an issue.
        name: what is wrong, in words.
        make: builds the draft.
        errors: exactly the ids of the error-level checks that fail.
        warnings: ids among the checks that fail as warnings.
        options: of the examination, where they differ from the default.
    """

    row: str
    name: str
    make: Callable[[], Draft]
    errors: frozenset[str]
    warnings: frozenset[str]
    options: dict[str, Any]


FAULTS: list[Fault] = []


def fault(
    row: str, name: str, errors: str = "", *, warnings: str = "", **options: Any
) -> Callable[[Callable[[], Draft]], Callable[[], Draft]]:
    """Put a builder into the corpus."""

    def add(build: Callable[[], Draft]) -> Callable[[], Draft]:
        FAULTS.append(
            Fault(row, name, build, frozenset(errors.split()), frozenset(warnings.split()), options)
        )
        return build

    return add


def full(**changes: Any) -> Draft:
    """A good draft of the whole vocabulary."""
    return make(native(draft_vocab_size=VOCAB, **changes))


def with_config(draft: Draft, **changes: Any) -> Draft:
    """The same weights under another config; None removes a key."""
    draft.raw.update(changes)
    draft.raw = {key: value for key, value in draft.raw.items() if value is not None or key == "rope_scaling"}
    return draft


def random(*shape: int, seed: int = 9, dtype: str = "BF16") -> tuple[str, tuple[int, ...], bytes]:
    """A tensor of small random values."""
    return float_tensor(np.random.default_rng(seed).standard_normal(shape).astype(np.float32) / 8, dtype)


def integers(values: Any, dtype: str = "I64") -> tuple[str, tuple[int, ...], bytes]:
    """A tensor of whole numbers."""
    array = np.asarray(values).astype({"I64": "<i8", "I32": "<i4"}[dtype])
    return dtype, array.shape, array.tobytes()


def offsets(draft: Draft) -> np.ndarray[Any, Any]:
    """d2t of a draft."""
    return np.frombuffer(draft.tensors["d2t"][2], "<i8").copy()


def edited(draft: Draft, name: str, change: Callable[[np.ndarray[Any, Any]], None]) -> Draft:
    """The draft with the bits of a bfloat16 tensor changed in place."""
    dtype, shape, data = draft.tensors[name]
    bits = np.frombuffer(data, "<u2").copy().reshape(shape)
    change(bits)
    draft.tensors[name] = (dtype, shape, bits.tobytes())
    return draft


@fault("02", "MHA weights under a GQA config", "C10")
def mha_weights() -> Draft:
    return with_config(make(native(num_key_value_heads=HEADS)), num_key_value_heads=4)


@fault("03", "GQA weights under an MHA config", "C10")
def gqa_weights() -> Draft:
    return with_config(make(), num_key_value_heads=HEADS)


@fault("03", "GQA weights, num_key_value_heads lost", "C10")
def lost_heads() -> Draft:
    return with_config(make(), num_key_value_heads=None)


@fault("04", "wider MLP than intermediate_size", "C12")
def wide_mlp() -> Draft:
    return with_config(make(native(intermediate_size=128)), intermediate_size=112)


@fault("05", "narrower MLP than intermediate_size", "C12")
def narrow_mlp() -> Draft:
    return with_config(make(native(intermediate_size=96)), intermediate_size=112)


@fault("06", "full vocabulary with a d2t of zeros", "V02")
def needless_map() -> Draft:
    draft = full()
    draft.tensors["d2t"] = integers(np.zeros(VOCAB))
    draft.tensors["t2d"] = ("BOOL", (VOCAB,), b"\1" * VOCAB)
    return draft


@fault("07", "full vocabulary with a t2d alone")
def needless_mask() -> Draft:
    draft = full()
    draft.tensors["t2d"] = ("BOOL", (VOCAB,), b"\1" * VOCAB)
    return draft


@fault("08", "reduced vocabulary without d2t", "V01")
def no_map() -> Draft:
    return without(make(), "d2t")


@fault("09", "reduced vocabulary without lm_head", "V07")
def no_head() -> Draft:
    return without(make(), "lm_head.weight")


@fault("10", "names with the prefix model.", "T02")
def model_prefix() -> Draft:
    draft = make(prefix="layers.0.")
    draft.name_prefix = "model."
    return draft


@fault("11", "norm.weight missing", "T01")
def no_norm() -> Draft:
    return without(make(), "norm.weight")


@fault("12", "k_proj missing", "T01")
def no_keys() -> Draft:
    return without(make(), f"{ATTENTION}k_proj.weight")


@fault("13", "fc missing", "T01")
def no_fc() -> Draft:
    return without(make(), "fc.weight")


@fault("14", "fc for four states, no layer ids", "T08", warnings="A05")
def four_states_unsaid() -> Draft:
    draft = make(native(eagle_aux_hidden_state_layer_ids=None, eagle_config=None))
    draft.tensors["fc.weight"] = random(HIDDEN, 4 * HIDDEN)
    return draft


@fault("15", "fc for four states, the ids at the top alone", "T09")
def four_states_at_the_top() -> Draft:
    return drafts.four_states(nested=False)


@fault("15", "speculators: four states, which vLLM cannot size", "T09")
def four_states_speculators() -> Draft:
    return speculators_draft({"eagle_aux_hidden_state_layer_ids": [1, 2, 4, 5]})


@fault("16", "fc for four states, ids in both places")
def four_states_nested() -> Draft:
    ids = [1, 2, 4, 5]
    eagle = {"eagle_aux_hidden_state_layer_ids": ids, "use_aux_hidden_state": True}
    return make(native(eagle_aux_hidden_state_layer_ids=ids, eagle_config=eagle))


@fault("17", "bias tensors, attention_bias false", "C14")
def unsaid_bias() -> Draft:
    return with_config(make(native(attention_bias=True)), attention_bias=False)


@fault("18", "attention_bias true, no bias tensors", "C14")
def no_bias() -> Draft:
    return with_config(make(), attention_bias=True)


@fault("18", "attention_bias true, the bias of o_proj missing", "C14")
def no_output_bias() -> Draft:
    return without(make(native(attention_bias=True)), f"{ATTENTION}o_proj.bias")


@fault("19", "fc_norm tensors, no switch", "C22")
def unsaid_fc_norm() -> Draft:
    return with_config(make(native(fc_norm=True)), fc_norm=None)


@fault("20", "fc_norm true, no tensors", "C22")
def no_fc_norm() -> Draft:
    return with_config(make(), fc_norm=True)


@fault("21", "fewer rows in lm_head than draft_vocab_size", "C19")
def short_head() -> Draft:
    return with_config(make(), draft_vocab_size=DRAFT_VOCAB + 8)


@fault("22", "d2t shorter than the draft vocabulary", "V03")
def short_map() -> Draft:
    draft = make()
    draft.tensors["d2t"] = integers(offsets(draft)[:-8])
    return draft


@fault("23", "d2t int32", warnings="V03")
def int32_map() -> Draft:
    draft = make()
    draft.tensors["d2t"] = integers(offsets(draft), "I32")
    return draft


@fault("24", "d2t float32", "V03")
def float_map() -> Draft:
    draft = make()
    draft.tensors["d2t"] = float_tensor(offsets(draft).astype(np.float32), "F32")
    return draft


@fault("25", "d2t holds ids, out of range as offsets", "V06")
def absolute_map() -> Draft:
    draft = make()
    draft.tensors["d2t"] = integers(offsets(draft) + np.arange(DRAFT_VOCAB))
    return draft


@fault("25", "d2t holds ids that stay in range as offsets", "V06")
def low_absolute_map() -> Draft:
    draft = make()
    tokens = drafts.chosen_tokens()
    tokens = np.sort(np.random.default_rng(0).permutation(VOCAB - DRAFT_VOCAB)[:DRAFT_VOCAB])
    draft.tensors |= drafts.vocabulary_maps(tokens)
    draft.tensors["d2t"] = integers(tokens)
    draft.tensors["lm_head.weight"] = float_tensor(HEAD[tokens])
    return draft


@fault("26", "embedding with other rows than vocab_size", "T12")
def short_embedding() -> Draft:
    draft = make()
    draft.tensors["embed_tokens.weight"] = random(VOCAB - 8, HIDDEN)
    return draft


@fault("27", "a tensor that no draft has", "T03")
def unknown_tensor() -> Draft:
    draft = make()
    draft.tensors["foo.weight"] = random(4, 4)
    return draft


@fault("28", "rotary_emb.inv_freq left in")
def buffer_left_in() -> Draft:
    draft = make()
    draft.tensors[f"{ATTENTION}rotary_emb.inv_freq"] = random(HEAD_DIM // 2, dtype="F32")
    return draft


@fault("29", "architecture LlamaForCausalLM", warnings="C02")
def llama_architecture() -> Draft:
    return make(native(architectures=["LlamaForCausalLM"]))


@fault("29", "architecture LlamaForCausalLM for SGLang", "C02", engines=("sglang",), engines_named=True)
def llama_architecture_for_sglang() -> Draft:
    return make(native(architectures=["LlamaForCausalLM"]))


@fault("30", "architecture Eagle3Speculator in a native config", "C02")
def speculator_architecture() -> Draft:
    return with_config(make(), architectures=["Eagle3Speculator"])


@fault("30", "architecture of another family", "C02")
def other_architecture() -> Draft:
    return with_config(make(), architectures=["MistralForCausalLM"])


@fault("31", "no model_type", "C01")
def no_model_type() -> Draft:
    return with_config(make(), model_type=None)


@fault("32", "no architectures", "C02")
def no_architectures() -> Draft:
    return with_config(make(), architectures=None)


@fault("33", "head_dim lost", "C07")
def lost_head_dim() -> Draft:
    return with_config(make(), head_dim=None)


@fault("33", "speculators: head_dim lost", "C07")
def lost_head_dim_speculators() -> Draft:
    draft = speculators_draft()
    del draft.raw["transformer_layer_config"]["head_dim"]
    return draft


@fault("34", "num_hidden_layers 4, one layer in the file", "C06")
def too_many_layers() -> Draft:
    return with_config(make(), num_hidden_layers=4)


@fault("34", "num_hidden_layers 1, two layers in the file", "C06")
def too_few_layers() -> Draft:
    return with_config(make(native(num_hidden_layers=2)), num_hidden_layers=1)


@fault("35", "the first layer under both names", "F08")
def both_names() -> Draft:
    draft = make(prefix="layers.0.")
    draft.tensors |= {
        name.replace("layers.0.", "midlayer."): tensor
        for name, tensor in draft.tensors.items()
        if name.startswith("layers.0.")
    }
    return draft


@fault("36", "full vocabulary, draft_vocab_size absent", warnings="C19")
def absent_vocabulary() -> Draft:
    return with_config(full(), draft_vocab_size=None)


@fault("37", "reduced vocabulary, draft_vocab_size absent", "C19")
def absent_reduced_vocabulary() -> Draft:
    return with_config(make(), draft_vocab_size=None)


@fault("38", "vocab_size smaller than the target's", "C18")
def small_vocabulary() -> Draft:
    return make(native(vocab_size=448, draft_vocab_size=448))


@fault("39", "float16 tensors under bfloat16", warnings="F13")
def other_dtype() -> Draft:
    return with_config(make(dtype="F16"), torch_dtype="bfloat16")


@fault("40", "NaN in a tensor", "F11")
def not_a_number() -> Draft:
    return edited(make(), "layers.0.mlp.up_proj.weight", lambda bits: bits.__setitem__((3, 5), 0x7FC0))


@fault("40", "infinity in a norm", "F11")
def infinite() -> Draft:
    return edited(make(), "norm.weight", lambda bits: bits.__setitem__(3, 0xFF80))


@fault("40", "a head of NaN", "F11")
def head_of_nan() -> Draft:
    return edited(make(), "lm_head.weight", lambda bits: bits.fill(0x7FC0))


@fault("41", "hidden_act gelu", "C13")
def gelu() -> Draft:
    return with_config(make(), hidden_act="gelu")


@fault("42", "o_proj too wide", "T06")
def wide_output() -> Draft:
    draft = make()
    draft.tensors[f"{ATTENTION}o_proj.weight"] = random(HIDDEN, (HEADS + 1) * HEAD_DIM)
    return draft


@fault("43", "q_proj reads H in place of 2H", "T07")
def narrow_queries() -> Draft:
    draft = make()
    draft.tensors[f"{ATTENTION}q_proj.weight"] = random(HEADS * HEAD_DIM, HIDDEN)
    return draft


@fault("44", "tie_word_embeddings true beside an lm_head", "C16")
def tied() -> Draft:
    return with_config(make(), tie_word_embeddings=True)


@fault("45", "hidden_size not a multiple of the heads", "C08")
def odd_heads() -> Draft:
    return make(native(num_attention_heads=9, num_key_value_heads=3))


@fault("46", "use_cache null", "C05")
def null_switch() -> Draft:
    draft = make()
    draft.raw["use_cache"] = None
    return draft


@fault("47", "verifier_lm_head left in", "T04")
def verifier_left_in() -> Draft:
    draft = make()
    draft.tensors["verifier_lm_head.weight"] = random(16, HIDDEN)
    return draft


@fault("49", "no rope_theta", "R01")
def no_theta() -> Draft:
    return with_config(make(), rope_theta=None)


@fault("50", "more rows in lm_head than draft_vocab_size", "C19")
def long_head() -> Draft:
    return with_config(make(), draft_vocab_size=DRAFT_VOCAB - 8)


@fault("51", "quantization_config over plain weights", "C28")
def false_quantisation() -> Draft:
    return with_config(make(), quantization_config={"quant_method": "fp8", "activation_scheme": "dynamic"})


@fault("52", "num_aux_hidden_states wrong", "T08")
def wrong_count() -> Draft:
    return with_config(make(), num_aux_hidden_states=4)


@fault("53", "fc.bias", "C15")
def fc_bias() -> Draft:
    draft = make()
    draft.tensors["fc.bias"] = random(HIDDEN)
    return draft


@fault("54", "target_hidden_size wrong", "T11")
def wrong_target_width() -> Draft:
    return with_config(make(), target_hidden_size=2 * HIDDEN)


@fault("55", "Qwen3 architecture without q/k norms", "C03")
def no_query_norm() -> Draft:
    return without(drafts.qwen3(), f"{ATTENTION}q_norm.weight", f"{ATTENTION}k_norm.weight")


@fault("56", "q/k norms in a Llama architecture", "C03")
def stray_query_norm() -> Draft:
    return with_config(drafts.qwen3(), architectures=["LlamaForCausalLMEagle3"], model_type="llama")


@fault("57", "hidden_size not a multiple of the heads, head_dim absent", "C08")
def odd_heads_without_head_dim() -> Draft:
    return with_config(make(native(num_attention_heads=9, num_key_value_heads=3)), head_dim=None)


@fault("59", "heads not a multiple of key/value heads", "C09")
def uneven_heads() -> Draft:
    return with_config(make(), num_key_value_heads=3)


@fault("60", "MHA, num_key_value_heads null", warnings="C10")
def null_heads() -> Draft:
    draft = make(native(num_key_value_heads=HEADS))
    draft.raw["num_key_value_heads"] = None
    return draft


@fault("61", "MHA, num_key_value_heads absent", warnings="C10")
def absent_heads() -> Draft:
    return with_config(make(native(num_key_value_heads=HEADS)), num_key_value_heads=None)


@fault("63", "d2t out of range", "V04")
def map_out_of_range() -> Draft:
    draft = make()
    values = offsets(draft)
    values[-1] = VOCAB
    draft.tensors["d2t"] = integers(values)
    return draft


@fault("64", "speculators format")
def speculators_format() -> Draft:
    return speculators_draft()


@fault("65", "hidden_norm missing", "T01")
def no_hidden_norm() -> Draft:
    return without(make(), "layers.0.hidden_norm.weight")


@fault("66", "t2d uint8", warnings="V09")
def uint8_mask() -> Draft:
    draft = make()
    _, shape, data = draft.tensors["t2d"]
    draft.tensors["t2d"] = ("U8", shape, data)
    return draft


@fault("68", "num_key_value_heads a text", "C05")
def text_for_number() -> Draft:
    return with_config(make(), num_key_value_heads="4")


@fault("68", "rms_norm_eps a text", "C05")
def text_for_epsilon() -> Draft:
    return with_config(make(), rms_norm_eps="1e-6")


@fault("68", "rms_norm_eps 1", "C05")
def whole_epsilon() -> Draft:
    return with_config(make(), rms_norm_eps=1)


@fault("68", "bos_token_id a text", "C05")
def text_for_token() -> Draft:
    return with_config(make(), bos_token_id="1")


@fault("68", "layer_types of another length", "C29")
def layer_types_length() -> Draft:
    return with_config(make(), layer_types=["full_attention"] * 3)


@fault("68", "yarn without factor", "R03")
def yarn_without_factor() -> Draft:
    return with_config(make(), rope_scaling={"rope_type": "yarn"})


@fault("68", "unknown rope_type", "R03")
def bogus_rope() -> Draft:
    return with_config(make(), rope_scaling={"rope_type": "bogus", "factor": 2.0})


@fault("69", "input_norm, norm_before_fc not set", "C23")
def unsaid_input_norm() -> Draft:
    return with_config(make(native(norm_before_fc=True)), norm_before_fc=None)


@fault("69", "norm_before_fc true, no input_norm", "C23")
def no_input_norm() -> Draft:
    return with_config(make(), norm_before_fc=True)


@fault("#1", "another page size than a hybrid target's", warnings="K05")
def hybrid_pages() -> Draft:
    draft = make(native(num_key_value_heads=HEADS))
    draft.target = drafts.target_config(
        layer_types=["sliding_attention", "full_attention"] * 4, sliding_window=128
    )
    return draft


@fault("#2", "MHA draft, GQA target", warnings="K03 K06")
def larger_pages() -> Draft:
    return make(native(num_key_value_heads=HEADS))


@fault("#6", "other width, no embedding of its own", "T11")
def no_embedding() -> Draft:
    return without(drafts.other_width(), "embed_tokens.weight")


@fault("#6", "other width, target_hidden_size lost", "K11")
def lost_target_width() -> Draft:
    return with_config(drafts.other_width(), target_hidden_size=None)


@fault("#7", "an embedding that differs by rounding", warnings="T13")
def rounded_embedding() -> Draft:
    draft = make()
    draft.tensors["embed_tokens.weight"] = float_tensor(drafts.EMBEDDING * 1.004)
    return draft


@fault("#8", "vocab_size padded by 64", "C18")
def padded_vocabulary() -> Draft:
    return make(native(vocab_size=VOCAB + 64))


@fault("#9", "fewer positions than the target", warnings="C27")
def few_positions() -> Draft:
    draft = make(native(max_position_embeddings=256))
    draft.target = drafts.target_config(max_position_embeddings=131072)
    return draft


@fault("#10", "layer ids in eagle_config alone", "A01")
def nested_ids() -> Draft:
    eagle = {"eagle_aux_hidden_state_layer_ids": [1, 3, 6], "use_aux_hidden_state": True}
    return make(native(eagle_aux_hidden_state_layer_ids=None, eagle_config=eagle))


@fault("#10", "layer ids at the top alone", "A01")
def top_ids() -> Draft:
    return make(native(eagle_aux_hidden_state_layer_ids=[1, 3, 6], eagle_config=None))


@fault("#10", "layer ids that contradict each other", "A01")
def contradicting_ids() -> Draft:
    return with_config(make(), eagle_aux_hidden_state_layer_ids=[1, 3, 6])


@fault("#11", "layer ids in SGLang's numbering", warnings="A04")
def ids_off_by_one() -> Draft:
    ids = [1, 3, 4]
    return with_config(
        make(), eagle_aux_hidden_state_layer_ids=ids, eagle_config={"eagle_aux_hidden_state_layer_ids": ids}
    )


@fault("#12", "a layer that the target does not have", "A03")
def id_out_of_range() -> Draft:
    ids = [2, 3, 99]
    return with_config(
        make(), eagle_aux_hidden_state_layer_ids=ids, eagle_config={"eagle_aux_hidden_state_layer_ids": ids}
    )


@fault("#12", "layer ids not ascending", "A02")
def ids_in_disorder() -> Draft:
    ids = [5, 2, 4]
    return with_config(
        make(), eagle_aux_hidden_state_layer_ids=ids, eagle_config={"eagle_aux_hidden_state_layer_ids": ids}
    )


@fault("#13", "SpecForge's norm_output", warnings="C25")
def specforge_norm_output() -> Draft:
    return make(native(fc_norm=True, norm_output=True))


@fault("#14", "a second layer that reads 2H", "T07")
def wide_second_layer() -> Draft:
    draft = make(native(num_hidden_layers=2))
    draft.tensors["layers.1.self_attn.q_proj.weight"] = random(HEADS * HEAD_DIM, 2 * HIDDEN)
    return draft


@fault("#18", "a target whose class gives no states", "K08")
def target_without_states() -> Draft:
    draft = make()
    draft.target = drafts.target_config(architectures=["Gemma3ForCausalLM"])
    return draft


@fault("#18", "a target that vLLM has no class for", warnings="K08")
def unknown_target() -> Draft:
    draft = make()
    draft.target = drafts.target_config(architectures=["SomethingNewForCausalLM"])
    return draft


@fault("#21", "the first layer named layers.0", warnings="T05")
def portable_prefix() -> Draft:
    return make(prefix="layers.0.")


@fault("#23", "num_hidden_layers of the target", "C06")
def layers_of_the_target() -> Draft:
    return with_config(make(), num_hidden_layers=drafts.LAYERS)


@fault("#24", "theta in rope_parameters alone", warnings="R02")
def new_spelling_alone() -> Draft:
    return with_config(make(), rope_theta=None, rope_parameters={"rope_type": "default", "rope_theta": THETA})


@fault("#25", "a random embedding", "T13")
def random_embedding() -> Draft:
    draft = make()
    draft.tensors["embed_tokens.weight"] = random(VOCAB, HIDDEN, seed=77)
    return draft


@fault("#28", "yarn that lost its factor in the export", "R03")
def lost_factor() -> Draft:
    draft = drafts.scaled("yarn")
    del draft.raw["rope_scaling"]["factor"]
    return draft


@fault("#29", "TorchSpec: head pruned with offsets", "T15")
def pruned_with_offsets() -> Draft:
    draft = make()
    draft.tensors["lm_head.weight"] = float_tensor(HEAD[offsets(draft)])
    return draft


@fault("#29", "TorchSpec: fewer tokens than declared", "C19")
def pruned_too_far() -> Draft:
    draft = make()
    keep = DRAFT_VOCAB - 20
    draft.tensors |= drafts.vocabulary_maps(drafts.chosen_tokens()[:keep])
    draft.tensors["lm_head.weight"] = float_tensor(HEAD[drafts.chosen_tokens()[:keep]])
    return draft


@fault("#30", "d2t of another sample", "T16")
def relabelled() -> Draft:
    draft = make()
    draft.tensors |= drafts.vocabulary_maps(drafts.chosen_tokens(seed=99))
    return draft


@fault("#31", "two thetas", "R02")
def two_thetas() -> Draft:
    return with_config(make(), rope_parameters={"rope_type": "default", "rope_theta": 10000.0})


@fault("#33", "d2t never filled", "V08")
def map_of_zeros() -> Draft:
    draft = make()
    draft.tensors["d2t"] = integers(np.zeros(DRAFT_VOCAB))
    return draft


@fault("#36", "rope_scaling dropped", warnings="R05")
def lost_scaling() -> Draft:
    return with_config(drafts.scaled("yarn"), rope_scaling=None)


@fault("#37", "speculators: maps for a full vocabulary", "V02")
def speculators_needless_map() -> Draft:
    draft = speculators_draft({"draft_vocab_size": VOCAB})
    draft.tensors |= drafts.vocabulary_maps(np.arange(VOCAB))
    return draft


@fault("#38", "speculators: norm_before_residual absent", "C20")
def absent_switch_speculators() -> Draft:
    draft = speculators_draft()
    del draft.raw["norm_before_residual"]
    return draft


@fault("#38", "norm_before_residual absent", warnings="C20")
def absent_switch() -> Draft:
    return with_config(make(), norm_before_residual=None)


@fault("#40", "NeMo: prefix and no d2t", "T02 V01")
def nemo_before() -> Draft:
    draft = without(make(prefix="layers.0."), "d2t", "t2d")
    draft.name_prefix = "model."
    return draft


@fault("#41", "d2t is arange", "V06")
def arange_map() -> Draft:
    draft = without(make(), "t2d")
    draft.tensors["d2t"] = integers(np.arange(DRAFT_VOCAB))
    return draft


@fault("#41", "two rows for one token", "V05")
def double_token() -> Draft:
    draft = without(make(), "t2d")
    values = offsets(draft)
    values[10] = values[9] - 1
    draft.tensors["d2t"] = integers(values)
    return draft


@fault("#43", "theta of another model", warnings="R05")
def other_theta() -> Draft:
    return make(native(rope_theta=10000.0))


@fault("#46", "other layers than llama.cpp takes", "A07", engines=("llama.cpp",), engines_named=True)
def llama_cpp_layers() -> Draft:
    ids = [1, 3, 6]
    return with_config(
        make(), eagle_aux_hidden_state_layer_ids=ids, eagle_config={"eagle_aux_hidden_state_layer_ids": ids}
    )


@fault("#47", "SGLang's old names of fc_norm", "C22 T03")
def legacy_norms() -> Draft:
    draft = make(native(fc_norm=True, norm_output=False))
    for i, name in enumerate(("low", "mid", "high")):
        draft.tensors[f"aux_norm_{name}"] = draft.tensors.pop(f"fc_norm.{i}.weight")
    return draft


def _after(draft: Draft, step: Callable[[Path], None]) -> Draft:
    draft.afterwards.append(step)
    return draft


@fault("F01", "no config.json", "F01")
def no_config() -> Draft:
    return _after(make(), lambda folder: (folder / "config.json").unlink())


@fault("F01", "config.json cut short", "F01")
def broken_config() -> Draft:
    return _after(make(), lambda folder: (folder / "config.json").write_text('{"architectures": ["Llama'))


@fault("F02", "a shard missing", "F02 T01")
def missing_shard() -> Draft:
    draft = make(shards=2)
    return _after(draft, lambda folder: (folder / "model-00002-of-00002.safetensors").unlink())


@fault("F02", "a stale shard", "F02")
def stale_shard() -> Draft:
    return _after(
        make(),
        lambda folder: (folder / "old.safetensors").write_bytes((folder / "model.safetensors").read_bytes()),
    )


@fault("F02", "one file and an index", "F02")
def two_sources() -> Draft:
    def step(folder: Path) -> None:
        part = folder / "model-00001-of-00001.safetensors"
        part.write_bytes((folder / "model.safetensors").read_bytes())
        names = [drafts_name(name) for name in make().tensors]
        index = {"metadata": {"total_size": 1}, "weight_map": dict.fromkeys(names, part.name)}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))

    return _after(make(), step)


def drafts_name(name: str) -> str:
    """The name in the file of a plain draft."""
    return make().name_in_file(name)


@fault("F02", "no weights", "F02")
def no_weights() -> Draft:
    return _after(make(), lambda folder: (folder / "model.safetensors").unlink())


@fault("F03", "a pickle alone", "F03")
def pickle_alone() -> Draft:
    return _after(make(), lambda folder: (folder / "model.safetensors").rename(folder / "pytorch_model.bin"))


@fault("F04", "a pickle beside", warnings="F04")
def pickle_beside() -> Draft:
    return _after(make(), lambda folder: (folder / "pytorch_model.bin").write_bytes(b"old"))


@fault("F05", "a truncated file", "F05")
def truncated() -> Draft:
    def step(folder: Path) -> None:
        path = folder / "model.safetensors"
        path.write_bytes(path.read_bytes()[:-100])

    return _after(make(), step)


@fault("F05", "a Git LFS pointer", "F05")
def lfs_pointer() -> Draft:
    text = "version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1\n"
    return _after(make(), lambda folder: (folder / "model.safetensors").write_text(text))


@fault("F06", "no format in the metadata", warnings="F06")
def no_format() -> Draft:
    return make(metadata={"torchspec_version": "0.1.0"})


@fault("F07", "an index of another size", warnings="F07")
def wrong_total() -> Draft:
    def step(folder: Path) -> None:
        path = folder / "model.safetensors.index.json"
        index = json.loads(path.read_text())
        index["metadata"]["total_size"] += 2
        path.write_text(json.dumps(index))

    return _after(make(shards=2), step)


@fault("F09", "a leftover quantisation file", warnings="F09")
def leftover() -> Draft:
    return _after(make(), lambda folder: (folder / "hf_quant_config.json").write_text("{}"))


@fault("F10", "optimizer state in the folder", warnings="F10 F04")
def optimizer_state() -> Draft:
    return _after(make(), lambda folder: (folder / "optimizer.pt").write_bytes(b"x"))


@fault("F12", "a matrix of zeros", "F12")
def zeros() -> Draft:
    return edited(make(), "layers.0.mlp.down_proj.weight", lambda bits: bits.fill(0))


@fault("F14", "values that float16 cannot hold", "F14", warnings="F13")
def overflow() -> Draft:
    draft = with_config(make(), torch_dtype="float16")
    return edited(draft, "fc.weight", lambda bits: bits.__setitem__((0, 0), 0x4800))  # 131072


@fault("C04", "plain attention under an MLA architecture", "C04")
def mla() -> Draft:
    return with_config(make(), architectures=["Eagle3DeepseekV2ForCausalLM"], model_type="kimi_k2")


@fault("C11", "speculators: heads edited at the top", "C11")
def heads_at_the_top() -> Draft:
    return with_config(speculators_draft(), num_key_value_heads=2)


@fault("C23", "norm_before_fc in two minds", "C23")
def two_minds() -> Draft:
    draft = make(native(norm_before_fc=True))
    draft.raw["norm_before_fc"] = False
    draft.raw["eagle_config"] = {**draft.raw["eagle_config"], "norm_before_fc": True}
    return draft


@fault("C24", "fc_norm and norm_before_fc", warnings="C24")
def two_norms() -> Draft:
    return make(native(fc_norm=True, norm_before_fc=True, norm_output=False))


@fault("C26", "use_aux_hidden_state false beside an fc", "C26")
def unused_fc() -> Draft:
    eagle = {"eagle_aux_hidden_state_layer_ids": drafts.DEFAULT_IDS, "use_aux_hidden_state": False}
    return make(native(eagle_config=eagle))


@fault("C30", "auto_map", warnings="C30")
def remote_code() -> Draft:
    return make(native(auto_map={"AutoModel": "modeling.Draft"}))


@fault("C31", "n_predict", "C31")
def leaked_key() -> Draft:
    return make(native(n_predict=2))


@fault("C32", "another eos", warnings="C32")
def other_eos() -> Draft:
    return make(native(eos_token_id=7))


@fault("R06", "half the head rotated", warnings="R06")
def partial_rotation() -> Draft:
    return make(native(partial_rotary_factor=0.5))


@fault("R07", "mrope_section for a text target", warnings="R07")
def stray_mrope() -> Draft:
    scaling = {"rope_type": "default", "mrope_section": [4, 6, 6]}
    return make(native(rope_scaling=scaling))


@fault("R08", "odd head_dim", "R08", warnings="K04 K07")
def odd_head_dim() -> Draft:
    return make(native(head_dim=33))


@fault("T06", "a norm of another width", "T06")
def wide_norm() -> Draft:
    draft = make()
    draft.tensors["norm.weight"] = random(HIDDEN + 1)
    return draft


@fault("T10", "a norm of ones", warnings="T10")
def untouched_norm() -> Draft:
    return edited(make(), "layers.0.input_layernorm.weight", lambda bits: bits.fill(0x3F80))


@fault("V09", "t2d of another vocabulary", "V09")
def other_mask() -> Draft:
    draft = make()
    draft.tensors["t2d"] = drafts.vocabulary_maps(drafts.chosen_tokens(seed=5))["t2d"]
    return draft


@fault("V10", "eos not in the draft's vocabulary", warnings="V10")
def no_eos() -> Draft:
    draft = make()
    tokens = np.sort(np.random.default_rng(1).permutation(np.arange(3, VOCAB))[:DRAFT_VOCAB])
    draft.tensors |= drafts.vocabulary_maps(tokens)
    draft.tensors["lm_head.weight"] = float_tensor(HEAD[tokens])
    return draft


@fault("K01", "heads that do not divide over the ranks", "K01 K02", tensor_parallel_size=3)
def ranks_that_do_not_fit() -> Draft:
    return make()


@fault("K02", "key/value heads that do not divide over the ranks", "K02", tensor_parallel_size=4)
def heads_that_do_not_fit() -> Draft:
    return make(
        native(num_attention_heads=24, num_key_value_heads=6, hidden_size=48, target_hidden_size=HIDDEN)
    )
