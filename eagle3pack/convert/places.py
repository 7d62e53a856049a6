"""What a conversion reads and writes lies apart, and nothing is written over that is not its own.

All of it is asked before the target or a server is touched: a recording may take hours.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from eagle3pack.checkpoint.folder import require_outside
from eagle3pack.checkpoint.header import read_header
from eagle3pack.errors import ConflictError, Eagle3PackError, PermissionDenied, UsageError
from eagle3pack.sources import parse_location, require_no_model_file

if TYPE_CHECKING:
    from eagle3pack.convert.command import ConvertOptions

_LONGEST_NAME = 230  # of 255 that file systems take, less what is added while a file is written


def require_places_apart(source: str, out: Path, options: ConvertOptions) -> None:
    """Raise where a conversion would write over what it reads, or over what no conversion wrote.

    OUT and the folder of --retrain-with themselves are for `require_free` and `require_separate`.

    Args:
        source: as the user wrote it.
        out: the folder to make or replace.
        options: of the command.

    Raises:
        UsageError: it would.
        ConflictError: an earlier calibration would be replaced without --overwrite.
        InputError: the file of --heal-state is none.
        PermissionDenied: a file's folder may not be written.
    """
    folders = [out, options.retrain_with[1]] if options.retrain_with else [out]
    models = [text for text in (source, options.target) if text is not None]
    read: dict[str, str | Path | None] = {
        "the target": options.target and parse_location(options.target).name,
        "the file of --draft-config": options.draft_config,
        "the file of --grouping": options.grouping,
        "the prompts of --calibrate-with": options.calibrate_with,
        "the folder of --calibrate-from": options.calibrate_from,
        **{f"the calibration {path.name}": path for path in options.calibration},
    }
    for folder in folders:
        for what, path in read.items():
            if path is not None and os.path.lexists(path):
                require_outside(Path(path), folder, what, hint="Give another folder.")
    if (save := options.save_calibration) is not None:
        _require_file(save, "--save-calibration", models, folders)
        _require_no_other_file(save, overwrite=options.overwrite)
    if (state := options.heal_state) is not None:
        _require_file(state, "--heal-state", models, folders)
        if os.path.lexists(state):
            from eagle3pack.convert.merging.heal_state import read_state

            read_state(state)


def _require_no_other_file(path: Path, *, overwrite: bool) -> None:
    where = f"--save-calibration {path}"
    if not os.path.lexists(path):
        return
    if not _is_calibration(path):
        raise UsageError(
            "exists and is no calibration; it is not overwritten",
            where=where,
            hint="Give another name, or delete it yourself if you mean it.",
        )
    if not overwrite:
        raise ConflictError("exists", where=where, hint="Give another name, or --overwrite.")


def _require_file(path: Path, option: str, models: Iterable[str], folders: Iterable[Path]) -> None:
    where = f"{option} {path}"
    require_no_model_file(path, models, where)
    parent = path.absolute().parent
    if len(os.fsencode(path.name)) > _LONGEST_NAME:
        raise UsageError("has too long a name", where=where)
    if not parent.is_dir():
        raise UsageError(f"the folder {path.parent} does not exist", where=where, hint="Make it first.")
    if path.is_dir():
        raise UsageError("is a folder, not a file", where=where, hint="Name a file in it.")
    for folder in folders:
        require_outside(path, folder, f"the file of {option}", hint=f"Give {option} a file elsewhere.")
    if not os.access(parent, os.W_OK | os.X_OK):
        raise PermissionDenied("may not be written", where=where, hint="Check the mode of its folder.")


def _is_calibration(path: Path) -> bool:
    from eagle3pack.convert.merging.calibration import METADATA_KEY

    try:
        return METADATA_KEY in read_header(path).metadata
    except Eagle3PackError:
        return False
