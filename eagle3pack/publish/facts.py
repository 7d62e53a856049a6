"""What the folder itself says of the draft, as one document that a card can bind values to."""

from __future__ import annotations

import hashlib
import math
from typing import Any

from eagle3pack.checkpoint.files import open_checkpoint
from eagle3pack.documents import read_json_object, to_json
from eagle3pack.draft.config import DraftConfig, parse_draft_config
from eagle3pack.draft.tensors import expected_tensors
from eagle3pack.errors import InputError
from eagle3pack.publish.folder import DraftFolder
from eagle3pack.publish.ledger import Document

NAME = "the draft's files"
DTYPE_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}


def read_facts(folder: DraftFolder) -> Document:
    """Shapes from config.json, parameters and dtypes from the weights' headers, files with their digests.

    Raises:
        InputError: config.json or the weights are not those of an EAGLE3 draft.
    """
    path = folder.path / "config.json"
    config = parse_draft_config(read_json_object(path), where=str(path))
    parameters, dtypes = _weights(folder) if folder.digest else _implied(config)
    width = DTYPE_BYTES.get(config.dtype or "", 2)
    value: dict[str, Any] = {
        "draft_digest": folder.digest,
        "architecture": config.architecture,
        "dialect": config.dialect,
        "num_parameters": parameters,
        "dtypes": dtypes,
        "num_hidden_layers": config.num_hidden_layers,
        "hidden_size": config.hidden_size,
        "target_hidden_size": config.target_hidden_size,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "vocab_size": config.vocab_size,
        "draft_vocab_size": config.draft_vocab_size,
        "num_aux_hidden_states": config.num_aux_hidden_states,
        "aux_hidden_state_layer_ids": list(config.aux_hidden_state_layer_ids or ()),
        "kv_cache_shrink": config.group_size,
        "kv_bytes_per_token": (
            2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * width
        ),
        "files": [{"path": f.path, "size": f.size, "sha256": f.sha256} for f in folder.files],
    }
    return Document(NAME, hashlib.sha256(to_json(value).encode()).hexdigest(), value)


def _weights(folder: DraftFolder) -> tuple[int, list[str]]:
    tensors = open_checkpoint(folder.path).tensors.values()
    floats = [entry for entry in tensors if entry.dtype.startswith(("F", "BF"))]
    if not floats:
        raise InputError("holds no floating-point tensor", where=str(folder.path))
    return sum(math.prod(entry.shape) for entry in floats), sorted({entry.dtype for entry in floats})


def _implied(config: DraftConfig) -> tuple[int, list[str]]:
    """What a draft of this config.json has with nothing stripped, where there are no weights to count."""
    specs = [spec for spec in expected_tensors(config).values() if spec.dtype_class == "float"]
    kept = [spec for spec in specs if spec.required or spec.name.startswith(("embed_tokens", "lm_head"))]
    names = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}
    return sum(math.prod(spec.shape) for spec in kept), [names.get(config.dtype or "", "BF16")]
