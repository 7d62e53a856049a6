"""The tensor inventory: which tensors a draft must and may hold, by logical name.

A logical name is the vLLM one without `model.`: `fc.weight`, `layers.0.self_attn.k_proj.weight`,
`lm_head.weight`. Producers spell the first layer `midlayer.`, `layers.0.` or `model.layers.0.`.
Shape letters: see config.py.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from eagle3pack.draft.config import DraftConfig
from eagle3pack.errors import InputError

DtypeClass = Literal["float", "integer", "boolean"]

_MIDLAYER = re.compile(r"^midlayer\.(?:(\d+)\.)?")
_LAYER = re.compile(r"^layers\.(\d{1,9})\.")


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One tensor that a draft of a given config must or may hold.

    Attributes:
        name: the logical name.
        shape: exact.
        dtype_class: float weights, integer maps or boolean masks.
        required: engines compute with garbage when it is missing.
    """

    name: str
    shape: tuple[int, ...]
    dtype_class: DtypeClass = "float"
    required: bool = True


def logical_name(name: str) -> str:
    """The logical name of a tensor, whatever prefix its producer writes."""
    name = name.removeprefix("model.")
    return _MIDLAYER.sub(lambda match: f"layers.{match[1] or 0}.", name)


def layer_of(name: str) -> int | None:
    """The decoder layer that a logical name belongs to, or None."""
    match = _LAYER.match(name)
    return int(match[1]) if match else None


def resolve_names(names: Iterable[str], *, where: str) -> dict[str, str]:
    """Map logical names to the names in the file, in the file's order.

    Raises:
        InputError: two spellings of one tensor (engines silently keep the last one, vLLM 0.32 measured).
    """
    found: dict[str, str] = {}
    for name in names:
        logical = logical_name(name)
        if logical in found:
            raise InputError(
                f"{found[logical]} and {name} are two spellings of one tensor",
                where=where,
                hint="Keep the one that was trained and delete the other.",
            )
        found[logical] = name
    return found


def expected_tensors(config: DraftConfig) -> dict[str, TensorSpec]:
    """Every tensor that a draft of this config must or may hold, by logical name.

    Source: vLLM 0.32 model_executor/models/llama_eagle3.py and qwen3_eagle3.py.
    """
    hidden, width = config.hidden_size, config.num_aux_hidden_states * config.target_hidden_size
    specs = [
        TensorSpec("fc.weight", (hidden, width), required=config.use_aux_hidden_state),
        *(spec for layer in range(config.num_hidden_layers) for spec in _layer_tensors(config, layer)),
        TensorSpec("norm.weight", (hidden,)),
        TensorSpec(
            "lm_head.weight", (config.draft_vocab_size, hidden), required=not config.has_full_vocabulary
        ),
        TensorSpec(
            "embed_tokens.weight", (config.vocab_size, hidden), required=config.target_hidden_size != hidden
        ),
        TensorSpec("d2t", (config.draft_vocab_size,), "integer", required=not config.has_full_vocabulary),
        TensorSpec("t2d", (config.vocab_size,), "boolean", required=False),
    ]
    if config.norm_before_fc:
        specs.append(TensorSpec("input_norm.weight", (width,)))
    if config.fc_norm:
        specs += [
            TensorSpec(f"fc_norm.{i}.weight", (config.target_hidden_size,))
            for i in range(config.num_aux_hidden_states)
        ]
    return {spec.name: spec for spec in specs}


def _layer_tensors(config: DraftConfig, layer: int) -> list[TensorSpec]:
    hidden, inner, depth = config.hidden_size, config.intermediate_size, config.head_dim
    inputs = 2 * hidden if layer == 0 else hidden  # layer 0 reads concat(token embedding, hidden state)
    rows = {
        "q": config.num_attention_heads * depth,
        "k": config.num_key_value_heads * depth,
        "v": config.num_key_value_heads * depth,
    }
    prefix = f"layers.{layer}."
    specs = [TensorSpec(f"{prefix}self_attn.{x}_proj.weight", (count, inputs)) for x, count in rows.items()]
    specs.append(TensorSpec(f"{prefix}self_attn.o_proj.weight", (hidden, rows["q"])))
    if config.attention_bias:
        specs += [TensorSpec(f"{prefix}self_attn.{x}_proj.bias", (count,)) for x, count in rows.items()]
        specs.append(TensorSpec(f"{prefix}self_attn.o_proj.bias", (hidden,), required=False))
    if config.qk_norm:
        specs += [TensorSpec(f"{prefix}self_attn.{x}_norm.weight", (depth,)) for x in "qk"]
    norms = ["input_layernorm", "post_attention_layernorm"] + (["hidden_norm"] if layer == 0 else [])
    specs += [TensorSpec(f"{prefix}{norm}.weight", (hidden,)) for norm in norms]
    specs += [TensorSpec(f"{prefix}mlp.{x}_proj.weight", (inner, hidden)) for x in ("gate", "up")]
    specs.append(TensorSpec(f"{prefix}mlp.down_proj.weight", (hidden, inner)))
    return specs
