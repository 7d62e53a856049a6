"""Tiny targets and drafts that speculate in milliseconds, seeded."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from eagle3pack.engine.draft_model import DraftModel
from eagle3pack.engine.loading import load_draft
from eagle3pack.engine.target import Target, load_target
from tests.tiny import draft_tensors, native_config, target_config, write_draft


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def make_target(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Write a random target with transformers itself; changes go to its config."""

    def write(*, seed: int = 0, scale: float = 3.0, **changes: Any) -> Path:
        from transformers import AutoConfig, AutoModelForCausalLM
        from transformers.utils import logging

        logging.disable_progress_bar()
        folder = tmp_path_factory.mktemp("target")
        (folder / "config.json").write_text(json.dumps(target_config(torch_dtype="float32", **changes)))
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.ndim > 1:  # far from the tiny default, so that texts do not all look alike
                    parameter.copy_(torch.randn_like(parameter) * scale / parameter.shape[-1] ** 0.5)
        model.save_pretrained(folder)
        return folder

    return write


@pytest.fixture(scope="session")
def target_folder(make_target: Callable[..., Path]) -> Path:
    """The default tiny target."""
    return make_target()


@pytest.fixture(scope="session")
def target(target_folder: Path) -> Target:
    """The default tiny target, loaded."""
    return load_target(target_folder)


@pytest.fixture
def make_draft(tmp_path: Path) -> Callable[..., DraftModel]:
    """Write a random float32 draft and load it; changes go to its config."""

    def build(
        *,
        target: Target | None = None,
        without: tuple[str, ...] = (),
        seed: int = 0,
        dtype: torch.dtype = torch.float32,
        **changes: Any,
    ) -> DraftModel:
        raw = native_config(**changes)
        tensors = draft_tensors(raw, dtype="F32", seed=seed)
        kept = {name: tensor for name, tensor in tensors.items() if name not in without}
        folder = write_draft(tmp_path / "draft", raw, tensors=kept, dtype="F32")
        return load_draft(folder, target=target, dtype=dtype)

    return build
