"""Drafts from folders to modules: names resolved, shapes checked, nothing left uninitialised."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from eagle3pack.checkpoint.as_torch import load_tensor
from eagle3pack.checkpoint.files import open_checkpoint
from eagle3pack.checkpoint.header import TensorEntry
from eagle3pack.documents import read_json_object
from eagle3pack.draft.config import parse_draft_config
from eagle3pack.draft.tensors import resolve_names
from eagle3pack.engine.draft_model import DraftModel
from eagle3pack.engine.target import Target
from eagle3pack.errors import InputError, UnsupportedDraftError

PLAIN_DTYPES = frozenset({"BF16", "F16", "F32", "F64", "I64", "I32"})  # no scale stands beside them


def load_draft(
    folder: Path,
    *,
    target: Target | None = None,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> DraftModel:
    """Load a draft for inference.

    Tensors that the module does not have (t2d, left-overs of training) are ignored, as engines do:
    the static checks are the place that names them.

    Args:
        folder: holds config.json and the weights.
        target: shares its embeddings and head where the draft has none, and gives dtype and device.
        dtype: of the weights, without a target.
        device: where they go, without a target.

    Raises:
        InputError: a tensor is missing or has another shape than the config says, or does not fit the target.
        UnsupportedDraftError: something that this engine does not compute.
    """
    where = str(folder)
    config = parse_draft_config(read_json_object(folder / "config.json"), where=str(folder / "config.json"))
    entries = open_checkpoint(folder).tensors
    names = resolve_names(entries, where=where)
    if target is not None:
        dtype, device = target.dtype, target.device
    with torch.device("meta"):
        draft = DraftModel(
            config,
            where=where,
            has_embedding="embed_tokens.weight" in names,
            has_head="lm_head.weight" in names,
            max_position=0 if target is None else target.max_position,
        )
    wanted = dict(draft.state_dict())
    found = {name: entries[names[name]] for name in wanted if name in names}
    state = {name: _load(entry, wanted[name], dtype, device, where) for name, entry in found.items()}
    _fill_missing(state, wanted, dtype, device, where)
    draft.load_state_dict(state, assign=True)
    if target is not None:
        _require_same_vocabulary(draft, target)
        draft.share_with_target(target.embedding_weight, target.head_weight)
    return draft.requires_grad_(False).eval()


def _require_same_vocabulary(draft: DraftModel, target: Target) -> None:
    """Refuse ids that one side does not have; vLLM 0.32 would stop at the first of them, mid-text."""
    ours, theirs = draft.config.vocab_size, target.spec.vocab_size
    if ours < theirs:
        raise InputError(
            f"vocab_size is {ours}, but the target's tokens go up to {theirs - 1}",
            where=draft.where,
            hint="Is this the target the draft was trained for?",
        )
    ids = draft.target_ids(torch.arange(draft.config.draft_vocab_size, device=target.device))
    outside = ids[(ids < 0) | (ids >= theirs)]
    if len(outside):
        raise InputError(
            f"the draft proposes token {int(outside[0])}, the target has {theirs}",
            where=draft.where,
            hint="d2t must hold offsets: draft id i stands for token i + d2t[i].",
        )


def _load(
    entry: TensorEntry, expected: Tensor, dtype: torch.dtype, device: torch.device | str, where: str
) -> Tensor:
    if tuple(entry.shape) != tuple(expected.shape):
        raise InputError(
            f"{entry.name} is {list(entry.shape)}, expected {list(expected.shape)} by config.json",
            where=where,
            hint="Run verify without an engine: its static checks say which of the two is wrong.",
        )
    if entry.dtype not in PLAIN_DTYPES:
        raise UnsupportedDraftError(
            f"{entry.name} is {entry.dtype}; the reference engine computes from plain weights only",
            where=where,
            hint="Run the smoke test with --engine vllm.",
        )
    return load_tensor(entry).to(device=device, dtype=dtype if expected.is_floating_point() else torch.int64)


def _fill_missing(
    state: dict[str, Tensor],
    wanted: Mapping[str, Tensor],
    dtype: torch.dtype,
    device: torch.device | str,
    where: str,
) -> None:
    """Fill in the one tensor that producers leave out without harm; everything else must be there."""
    missing = [name for name in wanted if name not in state]
    for name in missing:
        # Trainers with biased q, k and v and an unbiased o_proj write no bias for it.
        if not name.endswith("o_proj.bias"):
            raise InputError(
                f"{name} is missing",
                where=where,
                hint="Engines would compute with uninitialised memory in its place.",
            )
        state[name] = torch.zeros(wanted[name].shape, dtype=dtype, device=device)
