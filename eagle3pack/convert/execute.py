"""Carrying a plan out: stream, hash, prove; the output folder appears complete or not at all."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path

from eagle3pack.checkpoint.files import INDEX_FILE, open_checkpoint
from eagle3pack.checkpoint.reading import same_bytes
from eagle3pack.checkpoint.writer import copy_file, index_json, verify_written, write_file
from eagle3pack.convert.compute import Computation
from eagle3pack.convert.plan import Plan
from eagle3pack.convert.record import OutputFile, Proof
from eagle3pack.documents import read_json_object
from eagle3pack.draft.config import parse_draft_config
from eagle3pack.draft.tensors import expected_tensors, resolve_names
from eagle3pack.errors import InputError, MismatchError


def write_output(
    plan: Plan,
    computation: Computation,
    source_config: Path,
    folder: Path,
    *,
    on_bytes: Callable[[int], None],
    hashing: bool,
) -> list[OutputFile]:
    """Write config.json, the weight files and their index into a folder.

    Args:
        plan: what to write.
        computation: makes the tensors that change.
        source_config: config.json of the source.
        folder: exists and is empty.
        on_bytes: told how many bytes were written.
        hashing: compute the sha256 of every file.

    Returns:
        config.json, the weight files and their index: what the draft's digest is made of.

    Raises:
        InputError: NaN or infinity in a tensor that is merged.
        OSError: the disk is full; `new_folder` puts it in words.
    """
    if plan.verbatim:
        written = [copy_file(path, folder, on_bytes=on_bytes, hashing=hashing) for path in plan.verbatim]
    else:
        written = [
            write_file(planned, folder, computation.compute, on_bytes=on_bytes, hashing=hashing)
            for planned in plan.files
        ]
    files = [OutputFile(file.name, file.nbytes, file.sha256) for file in written]
    if len(plan.files) > 1 and not plan.verbatim:
        (folder / INDEX_FILE).write_bytes(index_json(plan.files))
        files.append(_small_file(folder / INDEX_FILE, hashing))
    config = folder / "config.json"
    if plan.config_changed:
        # As transformers writes it, so that a diff against the source shows the change alone.
        config.write_text(json.dumps(plan.after.raw, indent=2, ensure_ascii=False) + "\n", "utf-8")
    else:
        shutil.copyfile(source_config, config)
    files.append(_small_file(config, hashing))
    return files


def _small_file(path: Path, hashing: bool) -> OutputFile:
    data = path.read_bytes()
    return OutputFile(path.name, len(data), hashlib.sha256(data).hexdigest() if hashing else None)


def prove(plan: Plan, folder: Path, *, every_byte: bool) -> Proof | None:
    """Check what was written: it describes itself, and unchanged tensors have the source's bytes.

    Args:
        plan: what was to be written.
        folder: where it was.
        every_byte: compare unchanged tensors as a whole, not only their first and last block.

    Returns:
        What was compared as a whole; None where `every_byte` is not asked for.

    Raises:
        MismatchError: it does not; this is a fault of the disk or of this program.
    """
    checkpoint = open_checkpoint(folder)
    config_path = folder / "config.json"
    config = parse_draft_config(read_json_object(config_path), where=str(config_path))
    names = resolve_names(checkpoint.tensors, where=str(folder))
    if config != plan.after:
        raise MismatchError("config.json does not read back as planned", where=str(folder))
    for spec in expected_tensors(config).values():
        if spec.name in names and checkpoint.tensors[names[spec.name]].shape != spec.shape:
            raise MismatchError(f"{names[spec.name]} has another shape than planned", where=str(folder))
    unchanged = [tensor.source for file in plan.files for tensor in file.tensors if tensor.source is not None]
    if not plan.verbatim:
        verify_written(plan.files, folder, every_byte=every_byte)
    elif every_byte:
        for entry in unchanged:
            if not same_bytes(entry, checkpoint.tensors[entry.name]):
                raise MismatchError(f"tensor {entry.name} is not the one in {entry.path}", where=str(folder))
    return Proof(len(unchanged), sum(entry.nbytes for entry in unchanged)) if every_byte else None


def copy_companions(source: Path, folder: Path, patterns: tuple[str, ...]) -> list[str]:
    """Copy the files beside the weights that are part of the model: tokenizer, license and the like.

    Hidden files, caches, optimizer and trainer state match none of the patterns.

    Returns:
        Their names.

    Raises:
        InputError: one is a symlink that leads out of the folder, and not into the blobs of a hub's cache:
            what is copied here is published later.
    """
    names = sorted({path.name for pattern in patterns for path in source.glob(pattern) if path.is_file()})
    root = source.resolve()
    allowed = [root]
    if root.parent.name == "snapshots":  # a hub cache: models--ORG--NAME/{blobs,snapshots/REVISION}
        allowed.append(root.parent.parent / "blobs")
    for name in names:
        real = (source / name).resolve()
        if not any(real.is_relative_to(folder_) for folder_ in allowed):
            raise InputError(
                f"is a symlink to {real}, outside the draft's folder",
                where=str(source / name),
                hint="Replace it by the file itself, or remove it.",
            )
        shutil.copyfile(source / name, folder / name)
    return names
