"""The real target and draft of the integration tests, built once and kept in a cache.

EAGLE3PACK_CACHE names the folder; .cache/ in this repository by default.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CACHE = Path(os.environ.get("EAGLE3PACK_CACHE", ROOT / ".cache"))
DRAFT = ROOT / "examples" / "quickstart" / "draft"


def smollm2_target() -> Path:
    """SmolLM2-135M-Instruct, 9 query and 3 key/value heads."""
    out = CACHE / "smollm2-target"
    if not (out / "config.json").exists():
        _run_tool("make_smollm2_target.py", str(out))
    return out


def padded_target() -> Path:
    """The same function with 12 and 4 heads, which divide by four ranks."""
    out = CACHE / "smollm2-target-12-4"
    if not (out / "model.safetensors").exists():
        _run_tool("pad_heads.py", str(smollm2_target()), str(out), "--num-key-value-heads", "4")
    return out


def vllm_command() -> str:
    """The vLLM of the machine; the test is skipped where none is named."""
    command = os.environ.get("EAGLE3PACK_VLLM_COMMAND")
    if not command:
        pytest.skip("EAGLE3PACK_VLLM_COMMAND names no vLLM")
    return command


def _run_tool(name: str, *arguments: str) -> None:
    result = subprocess.run(
        [sys.executable, str(ROOT / "tools" / name), *arguments], capture_output=True, text=True, check=False
    )
    if result.returncode:
        pytest.skip(f"{name}: {result.stderr.strip().splitlines()[-1]}")
