"""Where a training of `heal` stands, and its file.

The file is torch's own format, holding tensors and plain values only: reading one runs no code.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from eagle3pack.convert.merging.attention import AttentionWeights
from eagle3pack.convert.merging.moments import Sample
from eagle3pack.convert.merging.rotary import RopeSpec
from eagle3pack.errors import InputError, PermissionDenied, TransportError

FORMAT = "eagle3pack/heal-state/1"


@dataclass(slots=True)
class HealState:
    """All that a training needs to go on; changes as it goes.

    Attributes:
        fingerprint: of everything that the training depends on.
        step: done.
        weights: in training, by name, working precision.
        optimizer: AdamW's state.
        best: the best weights so far, as they would be stored.
        best_step, best_error: when, and how good on held-out samples.
        error_before: the start's.
        errors: of the steps since the last check.
        checks: as in the report.
    """

    fingerprint: str
    step: int
    weights: dict[str, Tensor]
    optimizer: dict[str, Any]
    best: dict[str, Tensor]
    best_step: int
    best_error: float
    error_before: float
    errors: list[float]
    checks: list[tuple[int, float, float]]


def fingerprint(
    source: AttentionWeights,
    start: AttentionWeights,
    rope: RopeSpec,
    samples: Sequence[Sample],
    held_out: Sequence[Sample],
    options: object,
) -> str:
    """sha256 over both layers, the samples and everything else that decides how a training goes."""
    digest = hashlib.sha256(repr((rope, len(samples), options)).encode())
    for tensor in _everything(source, start, (*samples, *held_out)):
        digest.update(repr((tensor.dtype, tuple(tensor.shape))).encode())
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _everything(
    source: AttentionWeights, start: AttentionWeights, samples: Sequence[Sample]
) -> Iterator[Tensor]:
    for weights in (source, start):
        yield from weights.tensors().values()
    for sample in samples:
        yield from (sample.x, sample.positions)
        if sample.visible is not None:
            yield sample.visible


def write_state(path: Path, state: HealState) -> None:
    """Write a state whole or not at all.

    Raises:
        PermissionDenied, TransportError: the disk does not take it; an older file stays.
    """
    content = {field.name: getattr(state, field.name) for field in fields(state)}
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        try:
            with temporary.open("wb") as file:
                torch.save({"format": FORMAT, **content}, file)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)
    except PermissionError as error:
        raise PermissionDenied(f"cannot be written ({error.strerror})", where=str(path)) from None
    except (OSError, RuntimeError) as error:  # torch wraps a full disk into a RuntimeError
        raise TransportError(f"could not be written ({error})", where=str(path)) from None


def read_state(path: Path) -> HealState | None:
    """Read a state, to the CPU; None if there is no file yet.

    Raises:
        InputError: it is something else, or damaged.
        PermissionDenied: it may not be read.
    """
    if not path.exists():
        return None
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except PermissionError:
        raise PermissionDenied("may not be read", where=str(path)) from None
    except Exception:  # a damaged pickle is a damaged program: it can raise anything
        content = None
    names = {field.name for field in fields(HealState)}
    if not isinstance(content, dict) or content.pop("format", None) != FORMAT or content.keys() != names:
        raise InputError(
            "is no state that --heal wrote, or is damaged",
            where=str(path),
            hint="To start again, give a file that does not exist yet.",
        )
    return HealState(**content)
