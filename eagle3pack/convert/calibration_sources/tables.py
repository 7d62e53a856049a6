"""A draft without its target: what it shares is read from the target's files, tensor by tensor."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from eagle3pack.checkpoint.as_torch import load_tensor
from eagle3pack.convert.examine import taken_from_target, target_names
from eagle3pack.draft.config import DraftConfig
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
    missing = [
        name
        for name, module in (("embed_tokens.weight", draft.embed_tokens), ("lm_head.weight", draft.lm_head))
        if module is None
    ]
    if missing:
        tables = _tables(draft.config, missing, target, where=str(folder))
        nothing = torch.empty(0)  # in the place of what the draft has itself
        embedding, head = (tables.get(name, nothing) for name in ("embed_tokens.weight", "lm_head.weight"))
        draft.share_with_target(embedding.to(device, dtype), head.to(device, dtype))
    return draft


def _tables(
    config: DraftConfig, missing: Sequence[str], target: str | None, *, where: str
) -> dict[str, Tensor]:
    """What a draft shares with its target, by logical name."""
    if target is None:
        raise UsageError(f"the draft shares {missing[0]} with its target", where=where, hint="Give --target.")
    spec = resolve_target(target)
    names = target_names(spec)
    folder = resolve_target_weights(target, tuple(spelling for name in missing for spelling in names[name]))
    if folder is None:
        raise UsageError(
            f"the draft shares {missing[0]} with its target, and only the target's config is at hand",
            where="--target",
            hint="Give --target a folder with weights, or hf:ORG/NAME.",
        )
    present = names.keys() - set(missing)
    taken = taken_from_target(config, present, spec, folder)
    for name in missing:
        if name not in taken:
            raise InputError(
                f"{name} is not in the draft, and the target has none of the draft's shape",
                where=where,
                hint="Is this the target the draft was trained for?",
            )
    return {name: load_tensor(entry) for name, entry in taken.items()}
