"""One normalised view over the config.json of every producer of EAGLE3 drafts.

Shape letters, here and in tensors.py: V vocabulary, Vd draft vocabulary, H hidden, Ht hidden of the
target, A auxiliary hidden states, I intermediate, N query heads, K key/value heads, D head_dim.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from eagle3pack.documents import describe
from eagle3pack.draft.fields import Fields
from eagle3pack.draft.rope import RopeConfig, parse_rope
from eagle3pack.errors import InputError, UnsupportedDraftError

Dialect = Literal["native", "speculators"]

# What vLLM 0.32 (models/registry.py) and SGLang load as an EAGLE3 draft with plain attention.
LLAMA_ARCHITECTURES = frozenset(
    {
        "LlamaForCausalLM",
        "LlamaForCausalLMEagle3",
        "Eagle3LlamaForCausalLM",
        "EAGLE3LlamaForCausalLM",  # TensorRT-LLM
        "Eagle3MiniMaxM2ForCausalLM",
        "Eagle3Qwen2_5vlForCausalLM",
        "Eagle3Qwen3vlForCausalLM",
    }
)
QWEN3_ARCHITECTURES = frozenset({"Qwen3ForCausalLM", "Eagle3Qwen3ForCausalLM", "Qwen3ForCausalLMEagle3"})
SPECULATORS_ARCHITECTURES = frozenset({"Eagle3Speculator", "Eagle3DraftModel"})
DEFAULT_NUM_AUX_HIDDEN_STATES = 3  # every producer's default: an early, a middle and a late layer


@dataclass(frozen=True, slots=True)
class DraftConfig:
    """What a draft's config.json says, in one vocabulary.

    Attributes:
        dialect: "native" (flat, Llama style) or "speculators" (`transformer_layer_config`).
        architecture: the first of `architectures`, as written.
        hidden_size: H.
        target_hidden_size: Ht; equal to H unless the config says otherwise.
        num_attention_heads: N, query heads.
        num_key_value_heads: K; equal to N where the config is silent or null.
        head_dim: D, explicit or H / N.
        intermediate_size: I.
        vocab_size: V, the target's vocabulary.
        draft_vocab_size: Vd; equal to V where the config is silent or null.
        num_hidden_layers: decoder layers of the draft.
        aux_hidden_state_layer_ids: ids as vLLM counts (k = the state after k layers), top level before
            `eagle_config`; None where the config is silent.
        num_aux_hidden_states: A.
        use_aux_hidden_state: false where the draft takes the last hidden state alone and has no fc.
        norm_before_residual, norm_before_fc, fc_norm, norm_output: the norm switches as vLLM 0.32
            reads them (norm_before_residual defaults to true in the speculators dialect).
        attention_bias: q/k/v/o projections have biases.
        qk_norm: per-head RMSNorm on queries and keys before RoPE (Qwen3 drafts).
        rms_norm_eps: epsilon of every RMSNorm.
        hidden_act: activation of the MLP.
        tie_word_embeddings: as written; engines differ in what they make of it.
        max_position_embeddings: positions, or None where the config is silent.
        rope: rotary settings.
        dtype: "bfloat16" and the like, or None.
        quantization: the quantisation method, or None.
        raw: the JSON object itself, in its order.
    """

    dialect: Dialect
    architecture: str
    hidden_size: int
    target_hidden_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    draft_vocab_size: int
    num_hidden_layers: int
    aux_hidden_state_layer_ids: tuple[int, ...] | None
    num_aux_hidden_states: int
    use_aux_hidden_state: bool
    norm_before_residual: bool
    norm_before_fc: bool
    fc_norm: bool
    norm_output: bool
    attention_bias: bool
    qk_norm: bool
    rms_norm_eps: float
    hidden_act: str
    tie_word_embeddings: bool
    max_position_embeddings: int | None
    rope: RopeConfig
    dtype: str | None
    quantization: str | None
    raw: Mapping[str, Any] = field(repr=False, compare=False)

    @property
    def group_size(self) -> int:
        """Query heads that share one key/value head."""
        return self.num_attention_heads // self.num_key_value_heads

    @property
    def is_mha(self) -> bool:
        """Every query head has its own key/value head."""
        return self.num_key_value_heads == self.num_attention_heads

    @property
    def has_full_vocabulary(self) -> bool:
        """The draft predicts over the target's whole vocabulary."""
        return self.draft_vocab_size == self.vocab_size

    @property
    def layer_path(self) -> tuple[str, ...]:
        """Where this dialect keeps the shape of the decoder layer, as keys from the top."""
        return ("transformer_layer_config",) if self.dialect == "speculators" else ()


def parse_draft_config(raw: Mapping[str, Any], *, where: str) -> DraftConfig:
    """Read a config.json of any producer.

    Args:
        raw: the JSON object.
        where: its file, as messages show it.

    Raises:
        InputError: a key is missing or has a wrong type, or head counts do not divide.
        UnsupportedDraftError: a sound config of something that is not a plain-attention EAGLE3 draft.
    """
    top = Fields(raw, where)
    dialect = _dialect(top)
    layer = top.object("transformer_layer_config") if dialect == "speculators" else top
    eagle = top.object("eagle_config")
    architecture, qk_norm = _architecture(top, layer, dialect)

    hidden = layer.integer("hidden_size")
    heads = layer.integer("num_attention_heads")
    key_value_heads = layer.integer("num_key_value_heads", heads)
    if heads % key_value_heads:
        raise InputError(
            f"{layer.path}num_attention_heads {heads} is not a multiple of "
            f"num_key_value_heads {key_value_heads}",
            where=where,
        )
    if not layer.has("head_dim") and hidden % heads:
        raise layer.wrong("head_dim", f"a whole number, since hidden_size {hidden} / {heads} heads is none")
    vocab = layer.integer("vocab_size")
    draft_vocab = top.integer("draft_vocab_size", vocab)
    if draft_vocab > vocab:
        raise top.wrong("draft_vocab_size", f"at most vocab_size, {vocab}")
    ids, num_aux = _aux_hidden_states(top, eagle)
    quantization = top.object("quantization_config")
    return DraftConfig(
        dialect=dialect,
        architecture=architecture,
        hidden_size=hidden,
        target_hidden_size=top.integer("target_hidden_size", hidden),
        num_attention_heads=heads,
        num_key_value_heads=key_value_heads,
        head_dim=layer.integer("head_dim", hidden // heads or 1),
        intermediate_size=layer.integer("intermediate_size"),
        vocab_size=vocab,
        draft_vocab_size=draft_vocab,
        num_hidden_layers=layer.integer("num_hidden_layers", 1 if dialect == "speculators" else None),
        aux_hidden_state_layer_ids=ids,
        num_aux_hidden_states=num_aux,
        use_aux_hidden_state=eagle.boolean("use_aux_hidden_state", top.boolean("use_aux_hidden_state", True)),
        norm_before_residual=top.boolean("norm_before_residual", dialect == "speculators"),
        norm_before_fc=eagle.boolean("norm_before_fc", top.boolean("norm_before_fc", False)),
        fc_norm=top.boolean("fc_norm", False),
        norm_output=top.boolean("norm_output", False),
        attention_bias=layer.boolean("attention_bias", False),
        qk_norm=qk_norm,
        rms_norm_eps=layer.number("rms_norm_eps", 1e-6),
        hidden_act=layer.string("hidden_act", "silu"),
        tie_word_embeddings=top.boolean("tie_word_embeddings", False),
        max_position_embeddings=(
            layer.integer("max_position_embeddings") if layer.has("max_position_embeddings") else None
        ),
        rope=parse_rope(layer),
        dtype=_dtype(top, layer),
        quantization=quantization.string("quant_method", "unnamed") if quantization.values else None,
        raw=raw,
    )


def _dialect(top: Fields) -> Dialect:
    kind = top.string("speculators_model_type", "")
    if kind and kind != "eagle3":
        raise UnsupportedDraftError(
            f"speculators_model_type is {describe(kind)}, not an EAGLE3 draft", where=top.where
        )
    if kind and not top.has("transformer_layer_config"):
        raise top.wrong("transformer_layer_config", "the object that holds the decoder layer's shape")
    return "speculators" if kind or top.has("transformer_layer_config") else "native"


def _architecture(top: Fields, layer: Fields, dialect: Dialect) -> tuple[str, bool]:
    """The architecture's name, and whether it norms queries and keys."""
    known = sorted(
        SPECULATORS_ARCHITECTURES if dialect == "speculators" else LLAMA_ARCHITECTURES | QWEN3_ARCHITECTURES
    )
    names = top.strings("architectures")
    if not names:
        raise top.wrong("architectures", f"a list with one of {', '.join(known)}")
    name = names[0]
    if "deepseek" in name.lower() or "kimi_k2" in top.string("model_type", ""):
        raise UnsupportedDraftError(
            f"architectures is {describe(name)}, an MLA draft: its keys and values are one compressed "
            "latent, there are no key/value heads to merge",
            where=top.where,
        )
    for word, what in (("dflash", "DFlash"), ("mtp", "multi-token prediction"), ("peagle", "P-EAGLE")):
        if word in name.lower():
            raise UnsupportedDraftError(
                f"architectures is {describe(name)}, a {what} head, not EAGLE3", where=top.where
            )
    if dialect == "speculators":
        kind = layer.string("model_type", "llama")
        if kind not in ("llama", "qwen3"):
            raise layer.wrong("model_type", "llama or qwen3, the layers that engines load in this format")
        return name, kind == "qwen3"
    if name not in LLAMA_ARCHITECTURES | QWEN3_ARCHITECTURES:
        raise top.wrong("architectures", f"one of {', '.join(known)}")
    return name, name in QWEN3_ARCHITECTURES


def _aux_hidden_states(top: Fields, eagle: Fields) -> tuple[tuple[int, ...] | None, int]:
    key = "eagle_aux_hidden_state_layer_ids"
    ids = top.integers(key)
    if ids is None:
        ids = eagle.integers(key)
    return ids, top.integer("num_aux_hidden_states", len(ids) if ids else DEFAULT_NUM_AUX_HIDDEN_STATES)


def _dtype(top: Fields, layer: Fields) -> str | None:
    for fields in (top, layer):
        for key in ("dtype", "torch_dtype"):
            if fields.has(key):
                return fields.string(key).removeprefix("torch.")
    return None
