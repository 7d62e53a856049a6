"""The real target and draft of the integration tests, built once and kept in a cache.

EAGLE3PACK_CACHE names the folder; .cache/ in this repository by default.
"""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CACHE = Path(os.environ.get("EAGLE3PACK_CACHE", ROOT / ".cache"))
DRAFT = ROOT / "examples" / "quickstart" / "draft"


def smollm2_target() -> Path:
    """SmolLM2-135M-Instruct, 9 query and 3 key/value heads."""
    out = CACHE / "smollm2-target"
    with _one_at_a_time():
        if not (out / "config.json").exists():
            _run_tool("make_smollm2_target.py", str(out))
    return out


def padded_target() -> Path:
    """The same function with 12 and 4 heads, which divide by four ranks."""
    source, out = smollm2_target(), CACHE / "smollm2-target-12-4"
    with _one_at_a_time():
        if not (out / "model.safetensors").exists():
            _run_tool("pad_heads.py", str(source), str(out), "--num-key-value-heads", "4")
    return out


def vllm_command() -> str:
    """The vLLM of the machine; the test is skipped where none is named."""
    command = os.environ.get("EAGLE3PACK_VLLM_COMMAND")
    if not command:
        pytest.skip("EAGLE3PACK_VLLM_COMMAND names no vLLM")
    return command


@contextmanager
def _one_at_a_time() -> Iterator[None]:
    """Tests in several processes want the same folder; the others wait for the one that makes it."""
    CACHE.mkdir(parents=True, exist_ok=True)
    with (CACHE / ".lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _run_tool(name: str, *arguments: str) -> None:
    result = subprocess.run(
        [sys.executable, str(ROOT / "tools" / name), *arguments], capture_output=True, text=True, check=False
    )
    if result.returncode:
        pytest.skip(f"{name}: {result.stderr.strip().splitlines()[-1]}")
