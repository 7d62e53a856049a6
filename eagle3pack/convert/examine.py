"""What a conversion must know of the data before it is planned: equality with the target, identity maps."""

from __future__ import annotations

from collections.abc import Callable, Container
from pathlib import Path

from eagle3pack.checkpoint.files import Checkpoint, open_checkpoint
from eagle3pack.checkpoint.header import TensorEntry
from eagle3pack.checkpoint.reading import read_tensor, same_bytes
from eagle3pack.draft.config import DraftConfig
from eagle3pack.draft.target import TargetSpec

# Where targets keep the two matrices that engines share with a draft; multimodal ones nest them.
_TARGET_NAMES = {
    "embed_tokens.weight": (
        "model.embed_tokens.weight",
        "model.language_model.embed_tokens.weight",
        "language_model.model.embed_tokens.weight",
        "embed_tokens.weight",
    ),
    "lm_head.weight": ("lm_head.weight", "language_model.lm_head.weight"),
}


def target_names(target: TargetSpec) -> dict[str, tuple[str, ...]]:
    """Logical name -> the names under which a target may store what engines share with its draft."""
    if not target.tie_word_embeddings:
        return dict(_TARGET_NAMES)
    embedding = _TARGET_NAMES["embed_tokens.weight"]
    return {"embed_tokens.weight": embedding, "lm_head.weight": embedding}


def shared_with_target(
    config: DraftConfig,
    draft: Checkpoint,
    names: dict[str, str],
    target: TargetSpec,
    target_folder: Path,
    on_bytes: Callable[[int], None],
) -> tuple[dict[str, str], dict[str, str]]:
    """Find the tensors that a draft need not bring, since the target has the same bytes.

    vLLM and SGLang share the target's embedding with a draft that has none of its own, and vLLM the
    target's head where the draft vocabulary is the full one.

    Args:
        config: of the draft.
        draft: its weights.
        names: logical name -> name in the draft's files.
        target: the target.
        target_folder: a folder with the target's files that hold the tensors in question.
        on_bytes: told how many bytes of the draft were compared.

    Returns:
        (logical name -> name in the target) of the equal ones, and logical name -> why of the others.
    """
    theirs = open_checkpoint(target_folder, partial=True).tensors
    equal: dict[str, str] = {}
    different: dict[str, str] = {}
    for logical, candidates in target_names(target).items():
        if logical not in names:
            continue
        if logical == "lm_head.weight" and not config.has_full_vocabulary:
            different[logical] = "the draft predicts over a smaller vocabulary than the target"
            continue
        found = next((name for name in candidates if name in theirs), None)
        if found is None:
            different[logical] = f"the target has no tensor {candidates[0]}"
        elif reason := _difference(draft.tensors[names[logical]], theirs[found], on_bytes):
            different[logical] = reason
        else:
            equal[logical] = found
    return equal, different


def taken_from_target(
    config: DraftConfig, present: Container[str], target: TargetSpec, target_folder: Path
) -> dict[str, TensorEntry]:
    """Find what engines give a draft that has no embedding or no head of its own.

    Args:
        config: of the draft.
        present: logical names of the draft's own tensors.
        target: the target.
        target_folder: a folder with the target's files that hold the tensors in question.

    Returns:
        Logical name -> the target's tensor; without those that the target lacks or has in another shape.
    """
    theirs = open_checkpoint(target_folder, partial=True).tensors
    taken: dict[str, TensorEntry] = {}
    for logical, candidates in target_names(target).items():
        if logical in present or (logical == "lm_head.weight" and not config.has_full_vocabulary):
            continue
        found = next((theirs[name] for name in candidates if name in theirs), None)
        if found is not None and found.shape == (config.vocab_size, config.hidden_size):
            taken[logical] = found
    return taken


def _difference(ours: TensorEntry, theirs: TensorEntry, on_bytes: Callable[[int], None]) -> str | None:
    """Why two tensors are not the same bytes, or None where they are."""
    if ours.shape != theirs.shape:
        return f"its shape is {list(ours.shape)}, the target's {list(theirs.shape)}"
    if ours.dtype != theirs.dtype:
        return f"it is stored as {ours.dtype}, the target's as {theirs.dtype}"
    return None if same_bytes(ours, theirs, on_bytes) else "its values differ from the target's"


def vocabulary_map_is_identity(draft: Checkpoint, names: dict[str, str]) -> bool | None:
    """Whether d2t, which holds offsets, is zero everywhere; None where there is no d2t."""
    if "d2t" not in names:
        return None
    return not any(bytes(read_tensor(draft.tensors[names["d2t"]])))
