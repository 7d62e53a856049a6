"""TorchSpec's checkpoint, loaded back by torch.distributed.checkpoint and compared bit for bit."""

from __future__ import annotations

import json
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
import yaml
from safetensors.torch import load_file, save_file

from eagle3pack.errors import UnsupportedDraftError
from tests.convert.fsdp import run_ranks
from tests.convert.handoff.samples import assert_same, hand_over, load
from tests.tiny import draft_tensors, native_config, speculators_config, write_draft

MODEL = Path("retrain/iter_0000000/model")
PREFIX = "model_state.model.draft_model."


def load_back(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of a checkpoint, by torch itself and without knowing them before."""
    metadata = dcp.FileSystemReader(folder).read_metadata()
    state: dict[str, Any] = {
        name: torch.empty(described.size, dtype=described.properties.dtype)
        for name, described in metadata.state_dict_metadata.items()
        if not isinstance(described, dcp.metadata.BytesStorageMetadata)
    }
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        dcp.load(state, checkpoint_id=folder, no_dist=True)
    return state


@pytest.mark.parametrize("dtype", ["BF16", "F16", "F32"])
@pytest.mark.parametrize("prefix", ["midlayer.", "layers.0.", "model.layers.0."])
def test_the_checkpoint_is_the_converted_draft_to_the_bit(tmp_path: Path, dtype: str, prefix: str) -> None:
    write_draft(tmp_path / "mha", dtype=dtype, prefix=prefix)
    hand_over(tmp_path, "torchspec", method="als", shard_size=50_000)
    expected = {
        PREFIX + name.replace(prefix, "midlayer."): tensor for name, tensor in load(tmp_path / "gqa").items()
    }
    assert_same(load_back(tmp_path / MODEL), expected)
    assert (tmp_path / "retrain" / "latest_checkpointed_iteration.txt").read_text() == "0"


def test_a_smaller_vocabulary_has_its_buffers_and_a_warning(tmp_path: Path) -> None:
    raw = native_config(draft_vocab_size=40)
    tensors = draft_tensors(raw)
    t2d = tensors.pop("t2d")  # optional in a file; TorchSpec's model has the buffer
    write_draft(tmp_path / "mha", raw, tensors=tensors)
    summary = hand_over(tmp_path, "torchspec")
    found = load_back(tmp_path / MODEL)
    assert found[PREFIX + "t2d"].dtype == torch.bool
    assert found[PREFIX + "t2d"].numpy().tobytes() == t2d[2]
    assert torch.equal(found[PREFIX + "d2t"], load(tmp_path / "gqa")["d2t"])
    assert summary.hand_off is not None and summary.hand_off.written is not None
    assert any("vocabulary map anew" in note for note in summary.hand_off.written.notes)


def test_a_whole_vocabulary_has_no_buffers(tmp_path: Path) -> None:
    raw = native_config()
    tensors = draft_tensors(raw) | {"d2t": ("I64", (96,), bytes(8 * 96)), "t2d": ("BOOL", (96,), b"\1" * 96)}
    write_draft(tmp_path / "mha", raw, tensors=tensors)
    hand_over(tmp_path, "torchspec")
    assert not {PREFIX + "d2t", PREFIX + "t2d"} & set(load_back(tmp_path / MODEL))


def test_keys_are_nested_as_the_trainer_nests_them(tmp_path: Path) -> None:
    hand_over(tmp_path, "torchspec")
    metadata = dcp.FileSystemReader(tmp_path / MODEL).read_metadata()
    key = ("model_state", "model", "draft_model.fc.weight")
    assert metadata.planner_data[".".join(key)] == key


def test_the_run_configuration_names_checkpoint_config_and_target(tmp_path: Path) -> None:
    hand_over(tmp_path, "torchspec", speculators_config())
    run = yaml.safe_load((tmp_path / "retrain" / "run.yaml").read_text())
    assert run["training"] == {"load_path": str(tmp_path / "retrain"), "continual_training": True}
    assert run["model"]["target_model_path"] == str(tmp_path / "target")
    config = json.loads(Path(run["model"]["draft_model_config"]).read_text())
    assert config["architectures"] == ["LlamaForCausalLMEagle3"]
    assert config["rope_theta"] == config["rope_parameters"]["rope_theta"] == 10000.0
    assert "transformer_layer_config" not in config


@pytest.mark.parametrize(
    ("ids", "layers", "noted"),
    [([2, 4, 5], [1, 3, 4], False), ([1, 3, 4], [1, 3, 4], False), ([3, 5, 7], [2, 4, 6], True)],
)
def test_auxiliary_layers_are_counted_as_the_trainer_counts(
    tmp_path: Path, ids: list[int], layers: list[int], noted: bool
) -> None:
    raw = native_config(eagle_aux_hidden_state_layer_ids=ids, eagle_config=None)
    summary = hand_over(tmp_path, "torchspec", raw)  # a target of 8 layers: 2, 4, 5 by default
    run = yaml.safe_load((tmp_path / "retrain" / "run.yaml").read_text())
    assert run["inference"]["aux_hidden_states_layers"] == layers
    assert summary.hand_off is not None and summary.hand_off.written is not None
    assert bool(summary.hand_off.written.notes) == noted


def test_the_embedding_as_an_auxiliary_layer_is_refused(tmp_path: Path) -> None:
    raw = native_config(eagle_aux_hidden_state_layer_ids=[0, 4, 5], eagle_config=None)
    with pytest.raises(UnsupportedDraftError, match=r"has the embedding \(0\)"):
        hand_over(tmp_path, "torchspec", raw)
    assert not (tmp_path / "gqa").exists()


def test_without_a_target_the_command_asks_for_it(tmp_path: Path) -> None:
    summary = hand_over(tmp_path, "torchspec", target=None)
    assert summary.hand_off is not None and summary.hand_off.written is not None
    assert "model.target_model_path=TARGET" in summary.hand_off.written.command


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 3])
def test_a_model_that_fsdp_sharded_loads_it(tmp_path: Path, world: int) -> None:
    hand_over(tmp_path, "torchspec", native_config(draft_vocab_size=40))
    expected = load(tmp_path / "gqa")
    model = tmp_path / "model.safetensors"
    save_file({name: torch.zeros_like(tensor) for name, tensor in expected.items()}, model)
    run_ranks(world, model, load=tmp_path / MODEL)
    assert_same(load_file(model), expected)


@pytest.mark.slow
def test_memory_does_not_grow_with_the_draft(tmp_path: Path) -> None:
    code = (
        "import pathlib, re, resource, sys\n"
        "import torch\n"
        "from eagle3pack.checkpoint.header import TensorEntry\n"
        "from eagle3pack.convert.handoff.distributed import save_distributed\n"
        "path = pathlib.Path(sys.argv[1])\n"
        "size = 400_000_000\n"
        "with open(path / 'weights', 'wb') as file:\n"
        "    file.truncate(3 * size)\n"
        "entries = {f'{i}': TensorEntry(f'{i}', 'BF16', (size // 2,), path / 'weights', i * size, size) "
        "for i in range(3)}\n"
        "save_distributed(path / 'first', ['a'], {}, lambda count: None)\n"
        "anonymous = lambda: int(re.search(r'RssAnon:\\s+(\\d+)', open('/proc/self/status').read())[1])\n"
        "before, peak = anonymous(), []\n"
        "save_distributed(path / 'model', ['a'], entries, lambda count: peak.append(anonymous()))\n"
        "assert len(peak) == 3\n"
        "assert max(peak) - before < 64_000, peak\n"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True)
