"""A mended copy of a draft (`--fix`): only mends that are safe and mechanical, each written down.

Names, keys that engines would take as written here anyway, an identity map, both spellings and both
places of a setting. Values of weights are never touched; the source folder never is.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from eagle3pack import __version__
from eagle3pack.checkpoint.digest import draft_digest, header_sha256, sha256_file
from eagle3pack.checkpoint.files import INDEX_FILE
from eagle3pack.checkpoint.folder import new_folder, require_separate
from eagle3pack.checkpoint.writer import PlannedFile, PlannedTensor, index_json, write_file
from eagle3pack.documents import to_json
from eagle3pack.errors import ConflictError, InputError
from eagle3pack.sources import COMPANION_PATTERNS, known_sha256, parse_location
from eagle3pack.verify.check import (
    DropIndex,
    DropTensor,
    Finding,
    Mend,
    RemoveKey,
    RenameTensor,
    SetKey,
    Undecided,
)
from eagle3pack.verify.context import CONFIG_NAME, RECORD_NAME, Context
from eagle3pack.verify.report import Examination, examine
from eagle3pack.verify.schema import without_key


@dataclass(frozen=True, slots=True)
class Mended:
    """A mend and the finding that asked for it."""

    check: str
    message: str
    mend: Mend


def chosen_mends(examination: Examination) -> tuple[Mended, ...]:
    """The mends of all findings, each once; two that disagree are both left out."""
    found: dict[object, list[Mended]] = {}
    for outcome in examination.all:
        for finding in outcome.findings:
            for mend in finding.mends:
                found.setdefault(_place(mend), []).append(
                    Mended(outcome.check.id, _describe(mend, finding), mend)
                )
    agreed = [
        group[-1]  # of two names for one tensor the later check's, which has no prefix either (T02, T05)
        for group in found.values()
        if all(each.mend == group[0].mend for each in group) or isinstance(group[0].mend, RenameTensor)
    ]
    dropped = {each.mend.name for each in agreed if isinstance(each.mend, DropTensor)}
    return tuple(
        each for each in agreed if not (isinstance(each.mend, RenameTensor) and each.mend.name in dropped)
    )


def _place(mend: Mend) -> object:
    """What a mend changes: two mends of one place must agree."""
    if isinstance(mend, (SetKey, RemoveKey)):
        return mend.path
    return type(mend), mend.name if isinstance(mend, (RenameTensor, DropTensor)) else mend.file


def _describe(mend: Mend, finding: Finding) -> str:
    if isinstance(mend, SetKey):
        return f"{'.'.join(mend.path)} = {json.dumps(mend.value, ensure_ascii=False)}"
    if isinstance(mend, RemoveKey):
        return f"left {'.'.join(mend.path)} out, which was null"
    if isinstance(mend, RenameTensor):
        return f"{mend.name} is now {mend.new_name}"
    if isinstance(mend, DropTensor):
        return f"left {mend.name} out"
    if isinstance(mend, DropIndex):
        return f"left {mend.file} out"
    return f"{mend.file}: metadata says format pt"


def mended_config(raw: Mapping[str, Any], mends: Iterable[Mend]) -> dict[str, Any]:
    """config.json with the keys written or left out; a missing object on the way is made."""
    config: dict[str, Any] = deepcopy(dict(raw))
    for mend in mends:
        if isinstance(mend, RemoveKey):
            config = without_key(config, mend.path)
        if not isinstance(mend, SetKey):
            continue
        place = config
        for key in mend.path[:-1]:
            if not isinstance(place.get(key), dict):
                place[key] = {}
            place = place[key]
        place[mend.path[-1]] = deepcopy(mend.value)
    return config


def planned_files(context: Context, mends: Iterable[Mend]) -> tuple[PlannedFile, ...]:
    """The weight files as they will be: the same files, tensors renamed or left out."""
    chosen = tuple(mends)
    dropped = {mend.name for mend in chosen if isinstance(mend, DropTensor)}
    renamed: dict[str, str] = {}
    for mend in chosen:
        if isinstance(mend, RenameTensor):
            renamed[mend.name] = mend.new_name
    files = []
    for header in context.headers.headers:
        kept = [entry for entry in header.tensors if entry.name not in dropped]
        tensors = tuple(
            PlannedTensor(renamed.get(entry.name, entry.name), entry.dtype, entry.shape, entry)
            for entry in kept
        )
        files.append(PlannedFile(header.path.name, tensors))
    names = [tensor.name for file in files for tensor in file.tensors]
    if len(names) != len(set(names)):
        raise InputError("a mend would give two tensors one name", where=str(context.folder))
    return tuple(files)


def require_new(out: Path) -> None:
    """Raise where OUT exists.

    Raises:
        ConflictError: it does.
    """
    if os.path.lexists(out):
        raise ConflictError("exists", where=f"--fix {out}", hint="Give another folder, or delete that one.")


def what_remains(context: Context, out: Path) -> str:
    """Examine the mended copy, and say which errors are left in it."""
    failed = examine(context.of_copy(out)).failed("error")
    if not failed:
        return "no error is left"
    findings = [f for outcome in failed for f in outcome.findings if f.severity == "error"]
    ids = ", ".join(outcome.check.id for outcome in failed)
    return f"{len(findings)} error{'' if len(findings) == 1 else 's'} left: {ids}"


def write_mended_copy(context: Context, examination: Examination, out: Path) -> list[str]:
    """Write the mended draft into OUT.

    Returns:
        What was done, one line a mend; empty where there is nothing to mend, and then nothing is written.

    Raises:
        InputError: the draft cannot be read.
        ConflictError: OUT exists.
        PermissionDenied, TransportError, UsageError: see `checkpoint.folder.new_folder`.
    """
    done = chosen_mends(examination)
    if not done:
        return []
    try:
        raw = context.raw
        if not context.tensors:
            return []
        _ = context.config  # the record of a copy tells its heads
    except Undecided as answer:
        raise InputError(f"cannot be mended: {answer.reason}", where=str(context.folder)) from None
    require_separate(context.folder, out)
    require_new(out)
    mends = [each.mend for each in done]
    files = planned_files(context, mends)
    with new_folder(out, overwrite=False, nbytes=sum(file.nbytes for file in files)) as folder:
        written = []
        for planned in files:
            result = write_file(planned, folder, _nothing_computed)
            written.append((result.name, result.nbytes, result.sha256 or ""))
        if context.files.has_index and not context.files.index_is_stale:
            (folder / INDEX_FILE).write_bytes(index_json(files))
        (folder / CONFIG_NAME).write_text(to_json(mended_config(raw, mends)), "utf-8")
        for name in (INDEX_FILE, CONFIG_NAME):
            if (folder / name).exists():
                written.append((name, (folder / name).stat().st_size, sha256_file(folder / name)))
        _copy_companions(context.folder, folder)
        record = _record(context, done, written)
        (folder / RECORD_NAME).write_text(to_json(record), "utf-8")
    return [f"{each.check}: {each.message}" for each in done]


def _nothing_computed(planned: PlannedTensor) -> Iterator[bytes]:
    raise AssertionError(f"{planned.name} has a source")


def _copy_companions(source: Path, folder: Path) -> None:
    """Tokenizer, licence, card: whatever belongs to the model and lies in the folder itself."""
    for pattern in (*COMPANION_PATTERNS, "README.md"):
        for path in sorted(source.glob(pattern)):
            if path.is_file() and not path.is_symlink():
                shutil.copyfile(path, folder / path.name)


def _record(
    context: Context, done: tuple[Mended, ...], written: list[tuple[str, int, str]]
) -> dict[str, Any]:
    """The conversion record with the mends appended; a record of a mere copy where there was none."""
    try:
        record = deepcopy(dict(context.record))
    except Undecided:
        record = _new_record(context)
    for each in done:
        if isinstance(each.mend, RenameTensor):
            old, new = each.mend.name, each.mend.new_name
            record["changed_tensors"] = [new if name == old else name for name in record["changed_tensors"]]
            record["renamed_tensors"] = {**record["renamed_tensors"], old: new}
    listed = [{"path": path, "size": size, "sha256": digest} for path, size, digest in sorted(written)]
    record["output"] = {"files": listed, "draft_digest": draft_digest(written)}
    mends = [{"check": each.check, "message": each.message} for each in done]
    record["mends"] = [*record.get("mends", []), *mends]
    return record


def _new_record(context: Context) -> dict[str, Any]:
    location = parse_location(context.draft_name)
    config = context.config
    heads = config.num_key_value_heads
    files = [
        {
            "path": path.name,
            "size": path.stat().st_size,
            "header_sha256": header_sha256(path),
            "sha256": known_sha256(path),
        }
        for path in context.files.used
    ]
    return {
        "schema": "eagle3pack/conversion/1",
        "created": datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "tool": {"name": "eagle3pack", "version": __version__},
        "libraries": {},
        "source": {
            "place": location.place,
            "id": context.folder.resolve().name if location.place == "local" else location.name,
            "revision": location.revision,
            "files": files,
            "previous": None,
        },
        "method": {"name": "copy", "parameters": {}},
        "heads": {
            "num_attention_heads": config.num_attention_heads,
            "num_key_value_heads_before": heads,
            "num_key_value_heads_after": heads,
        },
        "changed_tensors": [],
        "renamed_tensors": {},
        "dropped_tensors": [],
        "layers": [],
        "output": {"files": [], "draft_digest": None},
        "mends": [],
    }
