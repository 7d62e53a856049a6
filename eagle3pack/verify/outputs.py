"""Where a report and a log may go: never over a model's own files, never over what is no report of ours."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from eagle3pack.documents import read_json_object
from eagle3pack.errors import Eagle3PackError, PermissionDenied, UsageError
from eagle3pack.sources import require_no_model_file
from eagle3pack.verify.report import SCHEMA

_LONGEST_NAME = 230  # of 255 that file systems take, less what `write_report` adds meanwhile


def require_report_path(path: Path, models: Iterable[str]) -> None:
    """Raise unless a report may be written there. A report of an earlier run is replaced.

    Args:
        path: the value of --report.
        models: SOURCE, --target and --against as the user wrote them.

    Raises:
        UsageError: it is a file of one of the models, a file that is no report, or its folder is missing.
        PermissionDenied: the folder may not be written.
    """
    where = f"--report {path}"
    require_no_model_file(path, models, where)
    if not _is_folder(path.parent):
        raise UsageError(f"there is no folder {path.parent}", where=where, hint="Make it first.")
    if os.path.lexists(path) and not _is_report(path):
        raise UsageError(
            "exists and is no report of eagle3pack; it is not overwritten",
            where=where,
            hint="Give another name, or delete it yourself if you mean it.",
        )
    if len(os.fsencode(path.name)) > _LONGEST_NAME:
        raise UsageError("has too long a name", where=where)
    if not os.access(path.parent, os.W_OK | os.X_OK):
        raise PermissionDenied("may not be written", where=where, hint="Check the mode of its folder.")


def require_log_path(path: Path, models: Iterable[str]) -> None:
    """Raise where an engine's log would be written over a file of a model, or cannot be written.

    Raises:
        UsageError: it would.
    """
    where = f"--engine-log {path}"
    require_no_model_file(path, models, where)
    if not _is_folder(path.parent):
        raise UsageError(f"there is no folder {path.parent}", where=where, hint="Make it first.")


def _is_folder(path: Path) -> bool:
    """Whether it is one; a name that is too long, at which `Path.is_dir` raises, is none."""
    return os.path.lexists(path) and path.is_dir()


def _is_report(path: Path) -> bool:
    if not path.is_file():
        return False
    try:
        return read_json_object(path).get("schema") == SCHEMA
    except Eagle3PackError:
        return False
