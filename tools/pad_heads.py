#!/usr/bin/env python3
"""Give a Llama-style target more attention heads without changing what it computes.

    tools/pad_heads.py FOLDER OUT --num-key-value-heads 4

SmolLM2 has 9 query and 3 key/value heads, which do not divide by four ranks. With a fourth group of
heads (12 and 4) it runs at tensor-parallel size 4: the new heads' q, k and v rows are zero, and so are
the columns of o that read them, so they add exact zeros.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

_ROWS = re.compile(r"self_attn\.([qkv])_proj\.(weight|bias)$")
_COLUMNS = re.compile(r"self_attn\.o_proj\.weight$")


def padded(name: str, tensor: Tensor, query_rows: int, key_value_rows: int) -> Tensor:
    """A tensor with zeros for the heads that it lacks.

    Args:
        name: of the tensor.
        tensor: as it is.
        query_rows: query heads times head_dim, after.
        key_value_rows: key/value heads times head_dim, after.
    """
    if match := _ROWS.search(name):
        rows = query_rows if match[1] == "q" else key_value_rows
        return torch.cat([tensor, tensor.new_zeros(rows - len(tensor), *tensor.shape[1:])])
    if _COLUMNS.search(name):
        return torch.cat([tensor, tensor.new_zeros(len(tensor), query_rows - tensor.shape[1])], dim=1)
    return tensor


def pad_heads(folder: Path, out: Path, num_key_value_heads: int) -> None:
    """Write the padded model; the size of a group of heads stays.

    Raises:
        ValueError: the model has as many heads already, or several weight files.
    """
    config = json.loads((folder / "config.json").read_text())
    heads, old = config["num_attention_heads"], config["num_key_value_heads"]
    if num_key_value_heads <= old:
        raise ValueError(f"{folder} has {old} key/value heads already")
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    new_heads = heads // old * num_key_value_heads
    if config["hidden_size"] % new_heads:
        raise ValueError(f"hidden_size {config['hidden_size']} is no multiple of {new_heads} heads")
    tensors = load_file(folder / "model.safetensors")
    out.mkdir(parents=True, exist_ok=True)
    for file in folder.iterdir():
        if file.suffix in (".json", ".jinja", ".txt", ".model"):
            shutil.copy(file, out)
    changed = {
        "num_attention_heads": new_heads,
        "num_key_value_heads": num_key_value_heads,
        "head_dim": head_dim,
    }
    (out / "config.json").write_text(json.dumps(config | changed, indent=2) + "\n")
    query_rows, key_value_rows = new_heads * head_dim, num_key_value_heads * head_dim
    save_file(
        {name: padded(name, tensor, query_rows, key_value_rows) for name, tensor in tensors.items()},
        out / "model.safetensors",
        metadata={"format": "pt"},
    )


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="the model")
    parser.add_argument("out", type=Path, help="folder to write")
    parser.add_argument("--num-key-value-heads", type=int, default=4)
    arguments = parser.parse_args()
    try:
        pad_heads(arguments.folder, arguments.out, arguments.num_key_value_heads)
    except (OSError, ValueError, KeyError) as error:
        sys.exit(f"{parser.prog}: {error}")


if __name__ == "__main__":
    main()
