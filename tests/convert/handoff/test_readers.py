"""Hand-offs as the frameworks themselves read them, each in a Python of its own.

EAGLE3PACK_TORCHSPEC_PYTHON, EAGLE3PACK_SPECFORGE_PYTHON and EAGLE3PACK_SPECULATORS_PYTHON name it; a
framework that is not there is skipped. docs/retraining.md has the versions that passed.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.convert.handoff.samples import assert_same, hand_over, load
from tests.tiny import draft_tensors, native_config, speculators_config, write_draft

pytestmark = pytest.mark.slow
READERS = Path(__file__).parent / "readers"

ROPE = {"rope_theta": 5e5, "eagle_aux_hidden_state_layer_ids": [2, 4, 5]}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 128,
}
DRAFTS: dict[str, dict[str, Any]] = {
    "native": native_config(**ROPE),
    "native, a smaller vocabulary": native_config(draft_vocab_size=40, **ROPE),
    "native, llama3 rope": native_config(rope_scaling=LLAMA3, **ROPE),
    "speculators": speculators_config(rope_theta=5e5),
    "speculators, a smaller vocabulary": speculators_config(rope_theta=5e5) | {"draft_vocab_size": 40},
}


def python_of(framework: str) -> str:
    """The Python that has a framework, or skip."""
    variable = f"EAGLE3PACK_{framework.upper()}_PYTHON"
    python = os.environ.get(variable)
    if not python:
        pytest.skip(f"{variable} names no Python that has {framework}")
    found = subprocess.run([python, "-c", f"import {framework}"], capture_output=True, text=True)
    if found.returncode:
        pytest.skip(f"{python} cannot import {framework}: {found.stderr.strip().splitlines()[-1]}")
    return python


def run(python: str, *arguments: object) -> None:
    done = subprocess.run([python, *map(str, arguments)], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]


def assert_rotates_alike(found: torch.Tensor, raw: dict[str, Any]) -> None:
    """The frequencies are those that transformers computes; a model in bfloat16 may have rounded them."""
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    config = LlamaConfig(
        head_dim=16,
        max_position_embeddings=512,
        rope_theta=5e5,
        rope_scaling=raw.get("rope_scaling"),
    )
    torch.testing.assert_close(found, LlamaRotaryEmbedding(config).inv_freq, rtol=2**-8, atol=0)


def expected_of(folder: Path, prefix: str, maps: bool) -> dict[str, torch.Tensor]:
    converted = load(folder / "gqa")
    tensors = {name.replace("midlayer.", "layers.0."): x for name, x in converted.items()}
    if not maps:
        tensors = {name: x for name, x in tensors.items() if name not in ("d2t", "t2d")}
    elif "d2t" not in tensors:
        tensors |= {"d2t": torch.zeros(96, dtype=torch.int64), "t2d": torch.ones(96, dtype=torch.bool)}
    return {name.replace("layers.0.", prefix): x for name, x in tensors.items()}


@pytest.mark.parametrize("what", DRAFTS)
def test_torchspecs_trainer_loads_every_tensor(tmp_path: Path, what: str) -> None:
    python = python_of("torchspec")
    hand_over(tmp_path, "torchspec", DRAFTS[what], method="als")
    run(
        python, READERS / "read_torchspec.py", tmp_path / "retrain" / "run.yaml", tmp_path / "out.safetensors"
    )
    found = load_file(tmp_path / "out.safetensors")
    assert_rotates_alike(found.pop("inv_freq"), DRAFTS[what])
    assert_same(found, expected_of(tmp_path, "midlayer.", maps="smaller" in what))


@pytest.mark.parametrize("what", [what for what in DRAFTS if "smaller" not in what])
def test_torchspecs_exporter_gives_the_converted_draft_back(tmp_path: Path, what: str) -> None:
    python = python_of("torchspec")
    hand_over(tmp_path, "torchspec", DRAFTS[what], method="als")
    where = "import torchspec, pathlib; print(pathlib.Path(torchspec.__file__).parent.parent / 'tools')"
    printed = subprocess.run([python, "-c", where], capture_output=True, text=True, check=True)
    tool = Path(printed.stdout.strip().splitlines()[-1]) / "convert_to_hf.py"
    iteration = tmp_path / "retrain" / "iter_0000000"
    run(python, tool, "--input-dir", iteration, "--output-dir", tmp_path / "exported")
    assert_same(load(tmp_path / "exported"), expected_of(tmp_path, "midlayer.", maps=False))


ONLY_SPECFORGE = {"fc_norm": native_config(fc_norm=True, **ROPE)}
ONLY_SPECULATORS = {
    "qwen3, smaller": native_config(
        architectures=["Eagle3Qwen3ForCausalLM"], norm_before_residual=True, draft_vocab_size=40, **ROPE
    ),
    "two layers": native_config(num_hidden_layers=2, attention_bias=True, norm_before_fc=True, **ROPE),
}


@pytest.mark.parametrize("what", DRAFTS | ONLY_SPECFORGE)
def test_specforges_warm_start_loads_every_tensor(tmp_path: Path, what: str) -> None:
    python = python_of("specforge")
    raw = (DRAFTS | ONLY_SPECFORGE)[what]
    hand_over(tmp_path, "specforge", raw, method="als")
    run(
        python, READERS / "read_specforge.py", tmp_path / "retrain" / "run.yaml", tmp_path / "out.safetensors"
    )
    found = load_file(tmp_path / "out.safetensors")
    assert_rotates_alike(found.pop("inv_freq"), raw)
    assert_same(found, expected_of(tmp_path, "midlayer.", maps=True))


@pytest.mark.parametrize("what", DRAFTS | ONLY_SPECULATORS)
def test_speculators_loads_every_tensor(tmp_path: Path, what: str) -> None:
    python = python_of("speculators")
    raw = (DRAFTS | ONLY_SPECULATORS)[what]
    hand_over(tmp_path, "speculators", raw, shard_size=100_000)
    run(python, READERS / "read_speculators.py", tmp_path / "retrain" / "draft", tmp_path / "out.safetensors")
    found = load_file(tmp_path / "out.safetensors")
    assert_rotates_alike(found.pop("inv_freq"), raw)
    assert_same(found, expected_of(tmp_path, "layers.0.", maps="smaller" in what))


def test_speculators_gets_a_missing_embedding_and_head_of_the_target(tmp_path: Path) -> None:
    python = python_of("speculators")
    tensors = draft_tensors(native_config())
    del tensors["embed_tokens.weight"], tensors["lm_head.weight"]
    write_draft(tmp_path / "mha", tensors=tensors)
    hand_over(tmp_path, "speculators")
    run(python, READERS / "read_speculators.py", tmp_path / "retrain" / "draft", tmp_path / "out.safetensors")
    found, target = load_file(tmp_path / "out.safetensors"), load(tmp_path / "target")
    assert torch.equal(found["embed_tokens.weight"], target["model.embed_tokens.weight"])
    assert torch.equal(found["lm_head.weight"], target["lm_head.weight"])
