"""Drafts that are converted and handed over, and a target for them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file

from eagle3pack.convert.command import ConvertOptions, run_convert
from eagle3pack.convert.summary import Summary
from tests.convert.test_command import NoProgress
from tests.tiny import Tensor, encode, target_config, write_draft, write_tensors


def write_target(folder: Path, **config: Any) -> Path:
    """A target of the tiny draft, with the matrices that a draft may share."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(target_config(**config)))
    rng = np.random.default_rng(7)

    def matrix(*shape: int) -> Tensor:
        return "BF16", shape, encode(rng.standard_normal(shape).astype("<f4"), "BF16")

    tensors = {"model.embed_tokens.weight": matrix(96, 64), "lm_head.weight": matrix(96, 64)}
    write_tensors(folder / "model.safetensors", tensors | {"model.norm.weight": matrix(64)})
    return folder


def hand_over(folder: Path, framework: str, raw: dict[str, Any] | None = None, **options: Any) -> Summary:
    """Write a draft to `mha`, convert it to `gqa` and hand it over in `retrain`; for `target` unless told."""
    source = folder / "mha"
    if not source.exists():
        write_draft(source, raw)
    if "target" not in options:
        target = folder / "target"
        width = (raw or {}).get("target_hidden_size") or 64
        options["target"] = str(target if target.exists() else write_target(target, hidden_size=width))
    options.setdefault("num_kv_heads", 2)
    return run_convert(
        str(source),
        str(folder / "gqa"),
        ConvertOptions(retrain_with=(framework, folder / "retrain"), **options),
        say=lambda text: None,
        progress=NoProgress(),
    )


def load(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of a draft."""
    tensors: dict[str, torch.Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        tensors |= load_file(path)
    return tensors


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    """The same names, dtypes and bits."""
    assert set(found) == set(expected)
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype, name
        assert torch.equal(found[name].view(torch.uint8), tensor.view(torch.uint8)), name
