"""SOURCE as TorchSpec's trainer leaves it: MHA -> GQA without an export in between."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from eagle3pack.checkpoint.digest import draft_files
from eagle3pack.errors import InputError, UsageError
from tests.checkpoint.distributed_samples import save_model
from tests.cli import Cli
from tests.convert.fsdp import run_ranks
from tests.convert.handoff.samples import hand_over, write_target
from tests.convert.test_command import convert, load, record
from tests.tiny import native_config, write_draft


def train(folder: Path, raw: dict[str, Any] | None = None, **how: Any) -> tuple[Path, Path]:
    """A draft as files, and the iteration of a trainer that holds the same."""
    exported = write_draft(folder / "exported", raw)
    return exported, save_model(folder / "run" / "iter_0001000", load(exported), **how)


@pytest.mark.parametrize("pieces", [1, 3])
@pytest.mark.parametrize("vocabulary", [96, 40])
@pytest.mark.parametrize("method", ["mean", "als"])
def test_the_result_is_that_of_the_exported_draft(
    tmp_path: Path, pieces: int, vocabulary: int, method: str
) -> None:
    exported, iteration = train(tmp_path, native_config(draft_vocab_size=vocabulary), pieces=pieces)
    (iteration / "config.json").write_bytes((exported / "config.json").read_bytes())
    convert(exported, tmp_path / "one", num_kv_heads=2, method=method)
    convert(iteration, tmp_path / "two", num_kv_heads=2, method=method, prove=True)
    one, two = load(tmp_path / "one"), load(tmp_path / "two")
    assert one.keys() == two.keys()
    assert all(torch.equal(one[name], two[name]) for name in one)
    files = record(tmp_path / "two")["source"]["files"]
    assert {file["path"] for file in files} == {"model/__0_0.distcp"}


def test_the_same_count_exports_it(tmp_path: Path) -> None:
    exported, iteration = train(tmp_path)
    convert(iteration, tmp_path / "out", num_kv_heads=8, draft_config=str(exported / "config.json"))
    assert [path.name for path in draft_files(tmp_path / "out")] == ["config.json", "model.safetensors"]
    assert (tmp_path / "out" / "config.json").read_bytes() == (exported / "config.json").read_bytes()
    found, expected = load(tmp_path / "out"), load(exported)
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_a_config_must_be_given_where_the_trainer_left_none(cli: Cli, tmp_path: Path) -> None:
    exported, iteration = train(tmp_path)
    result = cli("convert", iteration, tmp_path / "gqa", "--num-kv-heads", 2)
    assert result.code == InputError.exit_code
    assert "has no config.json" in result.err
    assert "--draft-config" in result.err
    again = cli(
        *("convert", iteration, tmp_path / "gqa", "--num-kv-heads", 2),
        *("--draft-config", exported / "config.json"),
    )
    assert again.code == 0, again.err
    assert json.loads((tmp_path / "gqa" / "config.json").read_text())["num_key_value_heads"] == 2


def test_the_folder_of_the_run_is_refused_with_the_iteration_to_give(cli: Cli, tmp_path: Path) -> None:
    exported, iteration = train(tmp_path)
    (tmp_path / "run" / "latest_checkpointed_iteration.txt").write_text("1000")
    result = cli(
        *("convert", iteration.parent, tmp_path / "gqa", "--num-kv-heads", 2),
        *("--draft-config", exported / "config.json"),
    )
    assert result.code == InputError.exit_code
    assert str(iteration) in result.err


def test_a_calibration_asks_for_an_export_before_the_target_answers(cli: Cli, tmp_path: Path) -> None:
    exported, iteration = train(tmp_path)
    result = cli(
        *("convert", iteration, tmp_path / "gqa", "--num-kv-heads", 2, "--method", "als"),
        *("--draft-config", exported / "config.json", "--calibrate-with", "shipped"),
        *("--target", write_target(tmp_path / "target")),
    )
    assert result.code == UsageError.exit_code
    assert "--num-kv-heads 8 first" in result.err


def test_what_is_handed_to_torchspec_reads_back_as_the_draft(tmp_path: Path) -> None:
    hand_over(tmp_path, "torchspec", native_config(draft_vocab_size=40))
    convert(tmp_path / "retrain" / "iter_0000000", tmp_path / "back", num_kv_heads=2)
    found, expected = load(tmp_path / "back"), load(tmp_path / "gqa")
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 3])
def test_what_fsdp_shards_over_processes_is_put_together(tmp_path: Path, world: int) -> None:
    exported = write_draft(tmp_path / "exported", native_config(draft_vocab_size=40))
    iteration = tmp_path / "iter_0000001"
    iteration.mkdir()
    (iteration / "config.json").write_bytes((exported / "config.json").read_bytes())
    run_ranks(world, exported / "model.safetensors", save=iteration / "model")
    assert len(list((iteration / "model").glob("*.distcp"))) == world
    convert(iteration, tmp_path / "back", num_kv_heads=8)
    found, expected = load(tmp_path / "back"), load(exported)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
