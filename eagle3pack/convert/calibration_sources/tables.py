"""A draft without its target: what it shares is read from the target's files, tensor by tensor."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from eagle3pack.checkpoint.as_torch import load_tensor
from eagle3pack.checkpoint.files import open_checkpoint
from eagle3pack.convert.examine import target_names
from eagle3pack.engine.draft_model import DraftModel
from eagle3pack.engine.loading import load_draft
from eagle3pack.errors import InputError, UsageError
from eagle3pack.sources import resolve_target, resolve_target_weights


def load_draft_alone(folder: Path, target: str | None, dtype: torch.dtype) -> DraftModel:
    """Load a draft on the best device, with embeddings and head from the target's files where it has none.

    Args:
        folder: the draft.
        target: as the user gave it.
        dtype: of the states that it will read; a CPU computes float16 as float32.

    Raises:
        UsageError: it shares the target's tables, and there is no target; or it reads no auxiliary states.
        InputError: draft or target is not what it must be.
    """
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if dtype == torch.float16 and device == "cpu":
        dtype = torch.float32
    draft = load_draft(folder, dtype=dtype, device=device)
    if not draft.config.use_aux_hidden_state:
        raise UsageError(
            "the draft reads the target's last normed state, which hidden-state files do not hold",
            where=str(folder),
            hint="Calibrate in process: --calibrate-with, without --endpoint.",
        )
    if draft.embed_tokens is None or draft.lm_head is None:
        missing = "embed_tokens.weight" if draft.embed_tokens is None else "lm_head.weight"
        if target is None:
            raise UsageError(
                f"the draft shares {missing} with its target", where=str(folder), hint="Give --target."
            )
        embedding = _table(target, "embed_tokens.weight") if draft.embed_tokens is None else torch.empty(0)
        head = _table(target, "lm_head.weight") if draft.lm_head is None else torch.empty(0)
        draft.share_with_target(embedding.to(device, dtype), head.to(device, dtype))
    return draft


def _table(target: str, logical: str) -> Tensor:
    """One matrix of the target, whatever its files call it."""
    names = target_names(resolve_target(target))[logical]
    folder = resolve_target_weights(target, names)
    if folder is None:
        raise UsageError(
            f"the draft shares {logical} with its target, and only the target's config is at hand",
            where="--target",
            hint="Give --target a folder with weights, or hf:ORG/NAME.",
        )
    tensors = open_checkpoint(folder, partial=True).tensors
    found = next((name for name in names if name in tensors), None)
    if found is None:
        raise InputError(f"the target has no tensor {names[0]}", where=str(folder))
    return load_tensor(tensors[found])
