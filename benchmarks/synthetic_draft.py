"""Write a draft of a given shape with random weights: python synthetic_draft.py FOLDER SHAPE_JSON."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from eagle3pack.checkpoint.writer import PlannedTensor, plan_files, write_file
from eagle3pack.draft.config import parse_draft_config
from eagle3pack.draft.tensors import expected_tensors


def write_synthetic_draft(folder: Path, shape: dict[str, int]) -> None:
    """Write a full-vocabulary MHA draft in bfloat16 with its own embedding and head."""
    config = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        **shape,
        "num_key_value_heads": shape["num_attention_heads"],
        "num_hidden_layers": 1,
        "draft_vocab_size": shape["vocab_size"],
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": 5000000.0,
        "max_position_embeddings": 524288,
        "attention_bias": False,
        "tie_word_embeddings": False,
        "norm_before_residual": False,
        "torch_dtype": "bfloat16",
        "eagle_aux_hidden_state_layer_ids": [2, 30, 57],
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": [2, 30, 57], "use_aux_hidden_state": True},
    }
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    specs = expected_tensors(parse_draft_config(config, where="synthetic")).values()
    planned = [
        PlannedTensor(spec.name.replace("layers.0.", "midlayer."), "BF16", spec.shape, None)
        for spec in sorted(specs, key=lambda spec: spec.name)
        if spec.dtype_class == "float"
    ]
    # Odd, so that the rows of lm_head do not repeat with the block: `verify` would say so.
    values = np.random.default_rng(0).standard_normal((8 << 20) - 1).astype("<f4") * np.float32(0.02)
    block = (values.view("<u4") >> 16).astype("<u2").tobytes()

    def compute(tensor: PlannedTensor) -> Iterator[memoryview]:
        for start in range(0, tensor.nbytes, len(block)):
            yield memoryview(block)[: min(len(block), tensor.nbytes - start)]

    for file in plan_files(planned, shard_bytes=10**12):
        write_file(file, folder, compute, hashing=False)


if __name__ == "__main__":
    write_synthetic_draft(Path(sys.argv[1]), json.loads(sys.argv[2]))
