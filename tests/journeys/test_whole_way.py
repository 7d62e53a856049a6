"""From what a trainer wrote to what would be published, by the three commands."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.cli import Cli
from tests.verify import drafts

PUBLISH_YAML = """\
name: tiny-eagle3
license: mit
target: {huggingface: org/target, modelscope: org/target, measured_as: target}
summary: A tiny draft for tests.
"""
NULLS = (
    "draft_vocab_size",
    "eagle_aux_hidden_state_layer_ids",
    "eagle_config",
    "layer_types",
    "norm_before_residual",
    "num_key_value_heads",
    "pad_token_id",
    "quantization_config",
    "rope_scaling",
    "sliding_window",
    "target_hidden_size",
)


def angelslim_pickle(folder: Path) -> None:
    drafts.angelslim(num_key_value_heads=drafts.HEADS).write(folder)
    weights = folder / "model.safetensors"
    torch.save(load_file(weights), folder / "pytorch_model.bin")
    weights.unlink()


def sharded_speculators(folder: Path) -> None:
    draft = drafts.speculators_draft(num_key_value_heads=drafts.HEADS)
    draft.shards = 3
    draft.write(folder)


def full_of_nulls(folder: Path) -> None:
    draft = drafts.torchspec()
    draft.raw |= dict.fromkeys(NULLS)
    draft.write(folder)


@pytest.mark.parametrize("write", [angelslim_pickle, sharded_speculators, full_of_nulls])
@pytest.mark.parametrize("method", ["mean", "als"])
def test_a_draft_is_converted_verified_and_ready_to_be_published(
    write: Callable[[Path], None], method: str, cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write(Path("draft"))
    drafts.write_target(Path("target"))
    Path("publish.yaml").write_text(PUBLISH_YAML)

    converted = cli("convert", "draft", "gqa", "--target", "target", "--method", method, "--canonical")
    assert converted.code == 0, converted.err
    assert "8 -> 4" in " ".join(converted.err.split())

    verified = cli("verify", "gqa", "--target", "target", "--engine", "none", "--report", "report.json")
    assert verified.code == 0, verified.out
    assert "0 errors" in verified.out

    publish = ("publish", "gqa", "--report", "report.json", "--to", "hf:org/gqa", "--to", "ms:org/gqa")
    dry = ("--dry-run", "--offline", "--render-to", "cards")
    refused = cli(*publish, *dry)
    assert (refused.code, "--allow-unverified REASON" in refused.err) == (3, True)
    published = cli(*publish, *dry, "--allow-unverified", "no engine in this test")
    assert published.code == 0, published.err
    digest = json.loads(Path("report.json").read_text())["draft"]["digest"]
    assert digest[:8] in converted.err
    for hub in ("hf", "ms"):
        assert "no engine in this test" in Path("cards", hub, "README.md").read_text("utf-8")
        weights = [
            path.name for path in Path("cards", hub).iterdir() if path.suffix in (".bin", ".safetensors")
        ]
        assert weights in ([], ["model.safetensors"])
