"""`--retrain-with FRAMEWORK DIR`: refused before the conversion if it cannot be done, written with it."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from eagle3pack.checkpoint.files import open_checkpoint
from eagle3pack.checkpoint.folder import new_folder, require_separate
from eagle3pack.checkpoint.header import TensorEntry
from eagle3pack.convert.examine import target_names
from eagle3pack.convert.handoff import specforge, speculators, torchspec
from eagle3pack.convert.handoff.draft import ConvertedDraft, Written, read_converted
from eagle3pack.convert.plan import Plan
from eagle3pack.convert.requirements import FLOAT_DTYPES
from eagle3pack.draft.config import DraftConfig
from eagle3pack.draft.target import TargetSpec
from eagle3pack.draft.tensors import expected_tensors, logical_name
from eagle3pack.errors import ConflictError, UsageError
from eagle3pack.sources import resolve_target_weights


class Framework(Protocol):
    """What a framework's module offers."""

    RELEASE: str
    NEEDS: tuple[str, ...]

    def require(self, config: DraftConfig, target: TargetSpec | None) -> None:
        """Raise for a draft that the framework's release cannot train."""

    def write(
        self, draft: ConvertedDraft, folder: Path, place: Path, on_bytes: Callable[[int], None]
    ) -> Written:
        """Write what the framework starts from."""


FRAMEWORKS: Mapping[str, Framework] = {
    "torchspec": torchspec,
    "specforge": specforge,
    "speculators": speculators,
}


@dataclass(frozen=True, slots=True)
class HandOff:
    """A hand-off that is to be written, or was.

    Attributes:
        framework: a key of FRAMEWORKS.
        place: the folder.
        lent: by logical name, tensors of the target that the draft does not bring.
        target: what the draft is for.
        written: what the framework's module said; None before it wrote.
    """

    framework: str
    place: Path
    lent: Mapping[str, TensorEntry]
    target: TargetSpec | None
    written: Written | None = None

    def as_json(self) -> dict[str, Any]:
        """The JSON object in the result of `--json`."""
        return {
            "framework": self.framework,
            "folder": str(self.place),
            "command": self.written.command if self.written else None,
            "notes": list(self.written.notes) if self.written else [],
        }


def require_place(framework: str, place: Path, source: Path, out: Path) -> None:
    """Raise unless the folder of a hand-off can be made; asked before anything is read.

    Raises:
        ConflictError: it exists.
        UsageError: it and OUT, or it and the source, are not apart.
    """
    where = f"--retrain-with {framework} {place}"
    if os.path.lexists(place):
        raise ConflictError("exists", where=where, hint="Give a folder that does not exist yet.")
    real, beside = Path(os.path.realpath(place)), Path(os.path.realpath(out))
    if real == beside or real in beside.parents or beside in real.parents:
        raise UsageError("must lie beside OUT, not in it or around it", where=where)
    require_separate(source, place)


def plan_hand_off(
    framework: str, place: Path, plan: Plan, target: TargetSpec | None, target_text: str | None
) -> HandOff:
    """Check that a framework can train what a conversion will make, and find what it needs beside it.

    Raises:
        UnsupportedDraftError: its release cannot.
        UsageError: the target, or a tensor that only the target has, is needed.
    """
    chosen = FRAMEWORKS[framework]
    chosen.require(plan.after, target)
    names = {logical_name(tensor.name) for file in plan.files for tensor in file.tensors}
    missing = [name for name in chosen.NEEDS if name not in names]
    lent = _lent(missing, plan.after, target, target_text) if missing else {}
    for name in missing:
        if name not in lent:
            raise UsageError(
                f"{chosen.RELEASE} wants {name}, which the draft does not bring",
                where=f"--retrain-with {framework}",
                hint="Give --target a folder with weights, or hf:ORG/NAME, to take it from there.",
            )
    return HandOff(framework, place, lent, target)


def _lent(
    missing: Collection[str], config: DraftConfig, target: TargetSpec | None, text: str | None
) -> dict[str, TensorEntry]:
    """Tensors of the target that fit the draft, by the draft's logical names."""
    if target is None or text is None:
        return {}
    wanted = {name: spellings for name, spellings in target_names(target).items() if name in missing}
    folder = resolve_target_weights(text, tuple(name for all_ in wanted.values() for name in all_))
    tensors = open_checkpoint(folder, partial=True).tensors if folder else {}
    expected = expected_tensors(config)
    return {
        name: tensors[found]
        for name, spellings in wanted.items()
        if (found := next((spelling for spelling in spellings if spelling in tensors), None))
        and tensors[found].shape == expected[name].shape
        and tensors[found].dtype in FLOAT_DTYPES
    }


def write_hand_off(
    hand_off: HandOff, draft_folder: Path, plan: Plan, on_bytes: Callable[[int], None]
) -> Written:
    """Write a hand-off; its folder appears complete or not at all.

    Args:
        hand_off: what to write.
        draft_folder: where the converted draft is.
        plan: what it was made by.
        on_bytes: told how many more bytes are written.

    Raises:
        InputError: the draft's vocabulary map is broken.
        ConflictError, PermissionDenied, TransportError: see `new_folder`.
    """
    draft = read_converted(draft_folder, plan.after, hand_off.lent, hand_off.target, plan.request.shard_bytes)
    with new_folder(hand_off.place, overwrite=False, nbytes=plan.output_bytes) as folder:
        place = Path(os.path.realpath(hand_off.place))
        written = FRAMEWORKS[hand_off.framework].write(draft, folder, place, on_bytes)
        (folder / "README.md").write_text(_readme(hand_off.framework, written), "utf-8")
    return written


def _readme(framework: str, written: Written) -> str:
    notes = "".join(f"- {note}.\n" for note in written.notes)
    return (
        f"# Retraining with {FRAMEWORKS[framework].RELEASE.split()[0]}\n\n"
        f"Written by `eagle3pack convert --retrain-with {framework}` for {FRAMEWORKS[framework].RELEASE}. "
        f"Start with\n\n```console\n{written.command}\n```\n\nwhere words in capitals are yours to fill in. "
        f"Paths are absolute: change them if you move this folder.\n{chr(10) + notes if notes else ''}"
    )
