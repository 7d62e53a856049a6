"""The draft's folder as it will be published: which files, what is in them, read once.

Every file is hashed in one pass and never again: the hubs' clients are told the sha256.
"""

from __future__ import annotations

import hashlib
import shlex
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from eagle3pack.checkpoint.digest import draft_digest, draft_files, hash_files, ignore_bytes
from eagle3pack.checkpoint.files import list_files
from eagle3pack.documents import read_json_object
from eagle3pack.draft.config import parse_draft_config
from eagle3pack.errors import ConflictError, InputError
from eagle3pack.publish.guards import (
    ALLOWED_NAMES,
    require_content,
    require_distinct_names,
    require_no_secrets,
    require_plain_file,
)
from eagle3pack.publish.hub import PublishedFile

SMALL_BYTES = 10_000_000  # up to this size git itself may keep a file on Hugging Face
GENERATED_NAMES = frozenset({"README.md", "configuration.json"})
Stamp = tuple[int, int, int]  # inode, size, time of the last change in ns


@dataclass(frozen=True, slots=True)
class DraftFolder:
    """What stands in the folder.

    Attributes:
        path: the folder.
        files: what is published from it, sorted by name.
        left_out: names that are not.
        digest: of the draft; None where the folder has no weights and can only be rendered.
        stamps: to notice a file that changes while we work.
    """

    path: Path
    files: tuple[PublishedFile, ...]
    left_out: tuple[str, ...]
    digest: str | None
    stamps: tuple[tuple[Path, Stamp], ...]

    def require_unchanged(self) -> None:
        """Refuse to commit files that are no longer those that were hashed.

        Raises:
            ConflictError: one was written to meanwhile.
        """
        for path, stamp in self.stamps:
            if _stamp(path) != stamp:
                raise ConflictError(
                    "changed while it was being published; nothing was committed",
                    where=str(path),
                    hint="Run again when it is finished.",
                )


def read_folder(folder: Path, on_bytes: Callable[[int], None] = ignore_bytes) -> DraftFolder:
    """Examine and hash a draft's folder.

    Args:
        folder: holds config.json and, unless the card is only to be rendered, the weights.
        on_bytes: told how many more bytes were hashed.

    Raises:
        InputError: a guard refuses one of the files.
        PermissionDenied: something may not be read.
    """
    names = list_files(folder)
    chosen = [folder / name for name in names if ALLOWED_NAMES.fullmatch(name)]
    left_out = [name for name in names if not ALLOWED_NAMES.fullmatch(name)]
    left_out += sorted(path.name for path in folder.iterdir() if path.name.startswith("."))
    if not (folder / "config.json").exists():
        raise InputError("has no config.json", where=str(folder), hint="FOLDER is a draft that was verified.")
    for path in chosen:
        require_plain_file(path)
    require_distinct_names([path.name for path in chosen] + sorted(GENERATED_NAMES))
    stamps = tuple((path, _stamp(path)) for path in chosen)
    hashes = hash_files([path for path in chosen if path.stat().st_size > SMALL_BYTES], on_bytes)
    files = tuple(_read_file(path, hashes.get(path), on_bytes) for path in chosen)
    core = {path.name for path in draft_files(folder)}
    has_weights = any(name.endswith(".safetensors") for name in core)
    if any(not name.endswith((".safetensors", ".json")) for name in core):
        raise InputError(
            "has its weights as pickles, which run code when they are loaded",
            where=str(folder),
            hint=f"Write safetensors, with as many heads: {_convert_command(folder)}",
        )
    digest = draft_digest((f.path, f.size, f.sha256) for f in files if f.path in core)
    return DraftFolder(folder, files, tuple(left_out), digest if has_weights else None, stamps)


def _convert_command(folder: Path) -> str:
    """The command that rewrites a draft's pickles as safetensors and changes nothing else."""
    path = folder / "config.json"
    heads = parse_draft_config(read_json_object(path), where=str(path)).num_key_value_heads
    out = folder.parent / f"{folder.resolve().name}-safetensors"
    return shlex.join(["eagle3pack", "convert", str(folder), str(out), "--num-kv-heads", str(heads)])


def total_bytes(folder: Path) -> int:
    """How much there is to hash, for the progress bar."""
    return sum(
        path.stat().st_size
        for name in list_files(folder)
        if ALLOWED_NAMES.fullmatch(name) and (path := folder / name).is_file()
    )


def published_file(path: str, local: Path) -> PublishedFile:
    """A small file, hashed for both hubs."""
    content = local.read_bytes()
    return PublishedFile(path, local, len(content), hashlib.sha256(content).hexdigest(), git_sha1(content))


def git_sha1(content: bytes) -> str:
    """The id that git gives to a file with this content."""
    return hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()


def _read_file(path: Path, sha256: str | None, on_bytes: Callable[[int], None]) -> PublishedFile:
    """Guard one file; `sha256` is known for large ones."""
    size = path.stat().st_size
    with path.open("rb") as stream:
        start = stream.read(1024)
    require_content(path, size, start)
    if sha256 is None:
        file = published_file(path.name, path)
        on_bytes(size)
    else:
        file = PublishedFile(path.name, path, size, sha256)
    require_no_secrets(_text_of(path), where=str(path))
    return file


def _text_of(path: Path) -> bytes:
    """What of a file is text: all of it, or the header of a safetensors file."""
    with path.open("rb") as stream:
        if path.suffix != ".safetensors":
            return stream.read()
        length = int.from_bytes(stream.read(8), "little")
        return stream.read(min(length, 100_000_000))  # the format's own limit


def _stamp(path: Path) -> Stamp:
    try:
        found = path.lstat()
    except OSError:
        return (0, -1, 0)
    return (found.st_ino, found.st_size, found.st_mtime_ns)
