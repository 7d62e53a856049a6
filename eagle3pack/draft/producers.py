"""Writing a config.json back in its producer's dialect, or in the portable form.

Every function returns a new JSON object and keeps the keys in their order.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from eagle3pack.draft.config import DraftConfig
from eagle3pack.errors import UnsupportedDraftError, UsageError

PORTABLE_ARCHITECTURE = "LlamaForCausalLMEagle3"  # SGLang's only entry class; vLLM and llama.cpp load it too

# Keys that the portable form writes itself, so what a producer wrote under them is not carried over.
_NESTED_OR_RENAMED = frozenset(
    {
        "transformer_layer_config",
        "speculators_config",
        "speculators_model_type",
        "speculators_version",
        "auto_map",
        "dtype",
        "num_aux_hidden_states",
    }
)


def with_key_value_heads(config: DraftConfig, num_key_value_heads: int) -> dict[str, Any]:
    """The producer's own config.json with another number of key/value heads, nothing else changed."""
    raw = dict(config.raw)
    if config.dialect == "native":
        raw["num_key_value_heads"] = num_key_value_heads
        return raw
    layer = dict(raw["transformer_layer_config"])
    layer["num_key_value_heads"] = num_key_value_heads
    raw["transformer_layer_config"] = layer
    if "num_key_value_heads" in raw:  # a stray copy that would contradict the one engines read
        raw["num_key_value_heads"] = num_key_value_heads
    return raw


def canonical_config(
    config: DraftConfig,
    num_key_value_heads: int,
    aux_hidden_state_layer_ids: tuple[int, ...] | None,
    dtype: str,
) -> dict[str, Any]:
    """The portable config.json: every default that engines disagree on is written out.

    Args:
        config: the draft as read, of any dialect.
        num_key_value_heads: of the draft that it will describe.
        aux_hidden_state_layer_ids: in vLLM's numbering; the draft's own or the target's default.
        dtype: of the float tensors, "bfloat16" and the like.

    Raises:
        UnsupportedDraftError: a draft with q/k norms, which the portable architecture cannot express.
        UsageError: no auxiliary layer ids are known, or theta is not.

    Source: the defaults of vLLM 0.32, SGLang, TensorRT-LLM, llama.cpp and SpecForge as compared in
        docs/checks.md.
    """
    if config.qk_norm:
        raise UnsupportedDraftError(
            f"{config.architecture} norms queries and keys, which {PORTABLE_ARCHITECTURE} cannot express",
            where="--canonical",
            hint="Convert without --canonical; vLLM loads the producer's own form.",
        )
    if aux_hidden_state_layer_ids is None:
        raise UsageError(
            "the draft's config names no auxiliary hidden state layers",
            where="--canonical",
            hint="Give --target, whose default layers are then written.",
        )
    if config.rope.theta is None:
        raise UsageError(
            "the draft's config gives no rope_theta, which engines then take to be 10000",
            where="--canonical",
            hint="Write the rope_theta that the draft was trained with into its config.json.",
        )
    written = _canonical_keys(config, num_key_value_heads, list(aux_hidden_state_layer_ids), dtype)
    kept = {key: value for key, value in _flat(config).items() if key not in _NESTED_OR_RENAMED}
    eagle = dict(kept.get("eagle_config") or {}) | written["eagle_config"]
    nulls = {key for key, value in kept.items() if value is None}
    kept = {key: value for key, value in kept.items() if key not in nulls or key == "rope_scaling"}
    return {**kept, **written, "eagle_config": eagle}


def _flat(config: DraftConfig) -> Mapping[str, Any]:
    if config.dialect == "native":
        return config.raw
    return {**config.raw["transformer_layer_config"], **config.raw}


def _canonical_keys(config: DraftConfig, kv_heads: int, ids: list[int], dtype: str) -> dict[str, Any]:
    keys: dict[str, Any] = {
        "architectures": [PORTABLE_ARCHITECTURE],
        "model_type": "llama",
        "hidden_size": config.hidden_size,
        "num_hidden_layers": config.num_hidden_layers,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": kv_heads,
        "head_dim": config.head_dim,
        "intermediate_size": config.intermediate_size,
        "vocab_size": config.vocab_size,
        "draft_vocab_size": config.draft_vocab_size,
        "hidden_act": config.hidden_act,
        "rms_norm_eps": config.rms_norm_eps,
        "attention_bias": config.attention_bias,
        "tie_word_embeddings": False,
        "norm_before_residual": config.norm_before_residual,
        "norm_before_fc": config.norm_before_fc,
        "fc_norm": config.fc_norm,
        "norm_output": config.norm_output,
        "torch_dtype": dtype,
        "eagle_aux_hidden_state_layer_ids": ids,
        **config.rope.as_v4(),
        "rope_parameters": config.rope.as_v5(),
    }
    if config.target_hidden_size != config.hidden_size:
        keys["target_hidden_size"] = config.target_hidden_size
    eagle: dict[str, Any] = {
        "eagle_aux_hidden_state_layer_ids": ids,
        "use_aux_hidden_state": config.use_aux_hidden_state,
    }
    if config.norm_before_fc:
        eagle["norm_before_fc"] = True
    keys["eagle_config"] = eagle
    if config.max_position_embeddings is not None:
        keys["max_position_embeddings"] = config.max_position_embeddings
    return keys
