"""Loading targets, and the states they hand out."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from eagle3pack.engine import target as target_module
from eagle3pack.engine.target import Target, load_target
from eagle3pack.errors import Eagle3PackError, InputError, UsageError

TOKENS = torch.tensor([[5, 17, 3, 80, 41]])


def read(target: Target, layer_ids: tuple[int, ...], kept: slice = slice(None)) -> Any:
    target.capture(layer_ids)
    cache = target.new_cache(1)
    cache.reserve(8)
    return target.forward(TOKENS, cache.at(0, [0], 5), cache, kept)


def test_states_count_layers_as_vllm_does(target: Target) -> None:
    with torch.inference_mode():
        theirs = target.model(TOKENS, output_hidden_states=True).hidden_states

    output = read(target, (0, 1, 4, 7))

    torch.testing.assert_close(output.states, torch.cat([theirs[k] for k in (0, 1, 4, 7)], dim=-1))
    assert torch.equal(theirs[0], torch.nn.functional.embedding(TOKENS, target.embedding_weight))


def test_the_last_id_is_the_state_before_the_final_norm(target: Target) -> None:
    before_norm = read(target, (8,)).states
    final = read(target, ()).states

    torch.testing.assert_close(target.model.model.norm(before_norm), final)


def test_only_the_kept_tokens_reach_the_head(target: Target) -> None:
    everything = read(target, (2,))
    last = read(target, (2,), slice(-1, None))

    assert last.logits.shape == (1, 1, 96)
    torch.testing.assert_close(last.logits, everything.logits[:, -1:])
    assert last.states.shape == everything.states.shape
    torch.testing.assert_close(everything.logits, target.model(TOKENS).logits)


def test_layers_can_be_captured_anew(target: Target) -> None:
    first = read(target, (1, 2, 3)).states
    read(target, (4,))

    assert torch.equal(read(target, (1, 2, 3)).states, first)


def test_facts_come_from_the_config(target: Target) -> None:
    assert target.stop_ids == {2}
    assert target.max_position == 512
    assert target.head_weight.shape == (96, 64)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_dtype_is_the_callers(target_folder: Path, dtype: torch.dtype) -> None:
    assert load_target(target_folder, dtype=dtype).dtype == dtype


def broken(source: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(source, tmp_path / "broken"))


def change_config(folder: Path, **changes: Any) -> Path:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    return folder


def test_missing_weights_are_not_filled_with_random_numbers(target_folder: Path, tmp_path: Path) -> None:
    folder = broken(target_folder, tmp_path)
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.3.mlp.up_proj.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})

    with pytest.raises(InputError, match=r"1 weights are missing, model.layers.3.mlp.up_proj.weight"):
        load_target(folder)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"model_type": "no_such_model"}, "cannot load this target"),
        ({"num_attention_heads": 4, "head_dim": 32, "num_key_value_heads": 4}, "cannot load this target"),
        ({"layer_types": ["linear_attention"] * 4 + ["full_attention"] * 4}, "linear attention layers"),
        ({"layer_types": ["chunked_attention"] * 8}, "chunked attention layers"),
    ],
    ids=str,
)
def test_targets_that_cannot_be_run_are_refused(
    target_folder: Path, tmp_path: Path, changes: dict[str, Any], problem: str
) -> None:
    with pytest.raises(InputError, match=problem) as error:
        load_target(change_config(broken(target_folder, tmp_path), **changes))
    assert "--engine vllm" in error.value.hint


def test_a_folder_without_weights_is_refused(target_folder: Path, tmp_path: Path) -> None:
    folder = broken(target_folder, tmp_path)
    (folder / "model.safetensors").unlink()

    with pytest.raises(InputError, match="holds no weights of the target"):
        load_target(folder)


def test_a_truncated_file_is_refused(target_folder: Path, tmp_path: Path) -> None:
    folder = broken(target_folder, tmp_path)
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])

    with pytest.raises(Eagle3PackError, match="cannot load this target"):
        load_target(folder)


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20 GiB"),
        RuntimeError("[enforce fail at alloc_cpu.cpp:127] DefaultCPUAllocator: can't allocate memory"),
    ],
    ids=["python", "gpu", "cpu"],
)
def test_too_little_memory_is_explained(
    target_folder: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    from transformers import AutoModelForCausalLM

    def fail(*args: object, **keywords: object) -> None:
        raise error

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", fail)

    with pytest.raises(UsageError, match="does not fit into memory") as raised:
        load_target(target_folder)
    assert "bfloat16" in raised.value.hint


def test_a_model_whose_layers_cannot_be_found_is_refused(
    target: Target, make_target: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(InputError, match="no list of 5 decoder layers"):
        target_module._decoder_layers(target.model, _with_layers(target, 5))


def _with_layers(target: Target, count: int) -> Any:
    from dataclasses import replace

    return replace(target.spec, num_hidden_layers=count)
