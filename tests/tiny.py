"""Small but complete EAGLE3 drafts, for tests: every tensor of the inventory, seeded random values.

`safetensors` itself writes the files, so that our own format code is tested against it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

from eagle3pack.draft.config import DraftConfig, parse_draft_config
from eagle3pack.draft.tensors import TensorSpec, expected_tensors

# dtype name in a header -> torch's
DTYPES = {
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F32": torch.float32,
    "I64": torch.int64,
    "I32": torch.int32,
    "BOOL": torch.bool,
    "U8": torch.uint8,
}
Tensor = tuple[str, tuple[int, ...], bytes]  # dtype name in a header, shape, bytes


def native_config(**changes: Any) -> dict[str, Any]:
    """A native config.json of a draft with 8 heads of 16, hidden 64, full vocabulary 96.

    A change to None removes the key.
    """
    config: dict[str, Any] = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "attention_bias": False,
        "head_dim": 16,
        "hidden_act": "silu",
        "hidden_size": 64,
        "intermediate_size": 112,
        "max_position_embeddings": 512,
        "model_type": "llama",
        "num_attention_heads": 8,
        "num_hidden_layers": 1,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "rope_scaling": None,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "vocab_size": 96,
        "draft_vocab_size": 96,
        "norm_before_residual": False,
        "eagle_aux_hidden_state_layer_ids": [2, 4, 5],
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": [2, 4, 5], "use_aux_hidden_state": True},
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    config.update(changes)
    return {key: value for key, value in config.items() if value is not None or key == "rope_scaling"}


def speculators_config(**layer_changes: Any) -> dict[str, Any]:
    """The same draft in the speculators format; changes go to transformer_layer_config."""
    native = native_config()
    layer_keys = [
        "attention_bias",
        "head_dim",
        "hidden_act",
        "hidden_size",
        "intermediate_size",
        "max_position_embeddings",
        "model_type",
        "num_attention_heads",
        "num_hidden_layers",
        "num_key_value_heads",
        "rms_norm_eps",
        "rope_theta",
        "vocab_size",
    ]
    layer = {key: native[key] for key in layer_keys} | layer_changes
    return {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_version": "0.9.0",
        "draft_vocab_size": native["draft_vocab_size"],
        "norm_before_residual": False,
        "target_hidden_size": None,
        "eagle_aux_hidden_state_layer_ids": [2, 4, 5],
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "transformer_layer_config": {key: value for key, value in layer.items() if value is not None},
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 3}],
            "verifier": {"name_or_path": "org/target", "architectures": ["LlamaForCausalLM"]},
        },
    }


def target_config(**changes: Any) -> dict[str, Any]:
    """A target that the tiny draft fits: 8 layers, 8 heads of 16, 2 key/value heads."""
    config: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 8,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "vocab_size": 96,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    config.update(changes)
    return {key: value for key, value in config.items() if value is not None}


def random_tensor(spec: TensorSpec, config: DraftConfig, dtype: str, rng: np.random.Generator) -> Tensor:
    """Values as a trained draft might have them; d2t and t2d agree with each other."""
    if spec.name == "d2t" or spec.name == "t2d":
        step = config.vocab_size / config.draft_vocab_size
        chosen = np.array([int(i * step) for i in range(config.draft_vocab_size)])  # strictly ascending
        if spec.name == "d2t":
            return "I64", spec.shape, (chosen - np.arange(len(chosen))).astype("<i8").tobytes()
        mask = np.zeros(config.vocab_size, dtype=np.uint8)
        mask[chosen] = 1
        return "BOOL", spec.shape, mask.tobytes()
    values = rng.standard_normal(spec.shape).astype("<f4") / max(spec.shape[-1], 1) ** 0.5
    if len(spec.shape) == 1 and spec.name.endswith("weight"):
        values = 1 + 0.1 * values  # norm weights lie around one
    return dtype, spec.shape, encode(values, dtype)


def encode(values: np.ndarray[Any, Any], dtype: str) -> bytes:
    """float32 values as the bytes of a header's dtype, rounded to nearest even."""
    if dtype == "BF16":
        bits = values.astype("<f4").view("<u4")
        return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype("<u2").tobytes()
    return values.astype({"F16": "<f2", "F32": "<f4"}[dtype]).tobytes()


def draft_tensors(raw: dict[str, Any], *, dtype: str = "BF16", seed: int = 0) -> dict[str, Tensor]:
    """Every tensor of the inventory by logical name; no d2t or t2d where the vocabulary is full."""
    config = parse_draft_config(raw, where="tiny")
    rng = np.random.default_rng(seed)
    return {
        spec.name: random_tensor(spec, config, dtype, rng)
        for spec in expected_tensors(config).values()
        if not (spec.name in ("d2t", "t2d") and config.has_full_vocabulary)
    }


def write_tensors(path: Path, tensors: dict[str, Tensor], metadata: dict[str, str] | None = None) -> None:
    """Write a safetensors file with the reference library."""
    save_file(
        {
            name: torch.frombuffer(bytearray(data), dtype=DTYPES[dtype]).reshape(shape)
            for name, (dtype, shape, data) in tensors.items()
        },
        path,
        metadata={"format": "pt"} if metadata is None else metadata,
    )


def write_draft(
    folder: Path,
    raw: dict[str, Any] | None = None,
    *,
    tensors: dict[str, Tensor] | None = None,
    dtype: str = "BF16",
    seed: int = 0,
    prefix: str = "midlayer.",
    shards: int = 1,
) -> Path:
    """Write a draft folder and return it.

    Args:
        folder: created.
        raw: config.json; the native one by default.
        tensors: by logical name; all of the inventory by default.
        dtype: of the float tensors.
        seed: of the values.
        prefix: what stands for `layers.0.` in the file.
        shards: number of files; more than one gets an index.
    """
    folder.mkdir(parents=True, exist_ok=True)
    raw = native_config() if raw is None else raw
    tensors = draft_tensors(raw, dtype=dtype, seed=seed) if tensors is None else tensors
    named = {name.replace("layers.0.", prefix, 1): tensor for name, tensor in tensors.items()}
    (folder / "config.json").write_text(json.dumps(raw, indent=2))
    if shards == 1:
        write_tensors(folder / "model.safetensors", named)
        return folder
    weight_map: dict[str, str] = {}
    names = list(named)
    for i in range(shards):
        file = f"model-{i + 1:05d}-of-{shards:05d}.safetensors"
        part = {name: named[name] for name in names[i::shards]}
        write_tensors(folder / file, part)
        weight_map |= dict.fromkeys(part, file)
    total = sum(len(data) for _, _, data in named.values())
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map})
    )
    return folder
