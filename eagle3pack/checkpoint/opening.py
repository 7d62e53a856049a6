"""Opening files for reading: whatever keeps a file from being read is one clear error that names it."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from eagle3pack.errors import Eagle3PackError, InputError, PermissionDenied

GET_ANEW = "Download it again, or make it again where it is your own."  # trainers' and our own files too

# What stands under the name of a weight file when a download or a renaming went wrong; in lower case.
_LOOKALIKES: Mapping[bytes, tuple[str, str]] = {
    b"version https://git-lfs": (
        "is a Git LFS pointer, not the weights",
        "Run `git lfs pull` in that repository.",
    ),
    b"<!doctype": ("is a web page, not weights", "Download it again; the server sent a page instead."),
    b"<html": ("is a web page, not weights", "Download it again; the server sent a page instead."),
    b"pk\x03\x04": ("is a zip archive, such as torch.save writes, under this name", "Rename it to *.bin."),
    b"gguf": ("is a GGUF file under this name", ""),
}


@contextmanager
def opened(path: Path) -> Iterator[int]:
    """Open a regular file for reading, symlinks followed, and yield its descriptor.

    Raises:
        InputError: it does not exist, is no regular file, or is a symlink that leads nowhere.
        PermissionDenied: it may not be read.
    """
    try:
        # O_NONBLOCK: opening a named pipe would otherwise wait for a writer. It means nothing for a file.
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except (OSError, ValueError) as error:
        raise _unreadable(path, error) from None
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise InputError("is no regular file", where=str(path))
        yield descriptor
    finally:
        os.close(descriptor)


def require_weights(head: bytes, path: Path) -> None:
    """Raise if the first bytes of a file give it away as empty, or as something else than weights.

    Raises:
        InputError: they do.
    """
    if not head:
        raise InputError("is empty", where=str(path), hint=GET_ANEW)
    for magic, (problem, hint) in _LOOKALIKES.items():
        if head.lower().startswith(magic):
            raise InputError(problem, where=str(path), hint=hint)


def _unreadable(path: Path, error: OSError | ValueError) -> Eagle3PackError:
    where = str(path)
    code = error.errno if isinstance(error, OSError) else None
    if code in (errno.EACCES, errno.EPERM):
        return PermissionDenied(
            "may not be read", where=where, hint="Check the modes of the file and its folders."
        )
    if code == errno.ELOOP:
        return InputError("is a symlink that leads back to itself", where=where)
    if code == errno.ENOENT and path.is_symlink():
        return InputError(
            f"is a symlink to {path.readlink()}, which does not exist",
            where=where,
            hint="A copied hub cache keeps its links but not its blobs; download the model again.",
        )
    if code == errno.ENOENT:
        return InputError("does not exist", where=where)
    return InputError(f"cannot be read ({getattr(error, 'strerror', None) or error})", where=where)
