"""An output folder that appears complete or not at all.

Everything is written into a temporary sibling, `.NAME.eagle3pack`, made durable, and renamed. The
sibling is locked while its writer lives: one that nobody has locked is the leftover of a killed run, and
is removed by the next run that writes to the same place. It is never taken for output.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from fnmatch import fnmatch
from pathlib import Path

from eagle3pack.checkpoint.files import list_files
from eagle3pack.checkpoint.kernel import DISK_FULL, exchange
from eagle3pack.errors import ConflictError, PermissionDenied, TransportError, UsageError

# A folder that is replaced must hold one of these: --overwrite with a wrong path is no way to lose a home.
_MARKS = ("config.json", "eagle3pack.json")
_WEIGHTS = ("*.safetensors", "*.safetensors.index.json")
# A name that cannot be, a mount point, a folder in a lower layer of a container's image.
_NO_PLACE = (errno.ENAMETOOLONG, errno.ENOTDIR, errno.ELOOP, errno.EBUSY, errno.EXDEV)
_ELSEWHERE = "Give a folder apart from the source."


def require_separate(source: Path, out: Path) -> None:
    """Raise unless two folders lie apart, so that writing one cannot touch the other.

    Folders are told apart by inode: symlinks and bind mounts do not hide that two names are one folder.

    Raises:
        UsageError: they are the same, one is inside the other, or the source's files lie in OUT.
        InputError: there is no source folder.
        PermissionDenied: it may not be read.
    """
    place, where = Path(os.path.realpath(out)), f"OUT {out}"
    if _identity(source) in _lineage(place):
        problem = "is" if _identity(place) == _identity(source) else "lies in"
        raise UsageError(f"{problem} the source folder", where=where, hint=_ELSEWHERE)
    links = [source / name for name in list_files(source) if (source / name).is_symlink()]
    for path in (source, *links):
        require_outside(path, out, "the source", hint=_ELSEWHERE)


def require_outside(path: Path, out: Path, what: str, *, hint: str) -> None:
    """Raise where making or replacing OUT would take away a file or folder; it need not exist yet.

    Args:
        path: of the file or folder.
        out: the folder to make.
        what: the path is, in a sentence.
        hint: for the error.

    Raises:
        UsageError: it is OUT, or lies in it.
    """
    place, real = Path(os.path.realpath(out)), Path(os.path.realpath(path))
    if place in (real, *real.parents) or _identity(place) in _lineage(path):
        problem = "is" if real == place else "holds"
        raise UsageError(f"{problem} {what} ({path})", where=f"OUT {out}", hint=hint)


def _identity(path: Path) -> tuple[int, int] | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_dev, status.st_ino


def _lineage(path: Path) -> list[tuple[int, int]]:
    """The identities of a path and of the folders it lies in, as far as they exist."""
    real = Path(os.path.realpath(path))
    return [found for place in (real, *real.parents) if (found := _identity(place)) is not None]


@contextmanager
def new_folder(out: Path, *, overwrite: bool, nbytes: int = 0, beside: Sequence[str] = ()) -> Iterator[Path]:
    """Yield a temporary folder that becomes OUT when the block ends, and vanishes when it raises.

    Args:
        out: the folder to make; missing parents are made too.
        overwrite: a draft folder that is there already is replaced, in one step where the system can.
        nbytes: about how much will be written, for the message about a full disk.
        beside: as `require_free`.

    Raises:
        ConflictError: OUT exists, or another run is writing it.
        PermissionDenied: OUT's parent cannot be written.
        TransportError: the disk is full, or broken.
        UsageError: no folder of that name can be made.
    """
    place = Path(os.path.realpath(out))  # what a symlink points to is replaced, not the symlink
    with _explained(out, place, nbytes):
        _finish_swap(place)
        require_free(out, overwrite=overwrite, beside=beside)
        with _parents(place), _locked(_sibling(place), out) as temporary:
            try:
                yield temporary
                for path in (*temporary.rglob("*"), temporary):
                    _sync(path)
                require_free(out, overwrite=overwrite, beside=beside)
                _move(temporary, place)
            finally:
                shutil.rmtree(temporary, ignore_errors=True)  # after an error ours, after a swap the old one


def _sibling(place: Path, suffix: str = "") -> Path:
    return place.with_name(f".{place.name}.eagle3pack{suffix}")


def require_free(out: Path, *, overwrite: bool, beside: Sequence[str] = ()) -> None:
    """Raise unless OUT is free and can be made, or may be replaced.

    `new_folder` asks this itself; asked before a long download it spares that.

    Args:
        out: the folder to make.
        overwrite: a draft folder that is there already may be replaced.
        beside: patterns of names that such a folder may hold beside config, record and weights.

    Raises:
        ConflictError: it is not free: with `overwrite`, it holds what no conversion writes.
        PermissionDenied: OUT's parent cannot be written.
    """
    place = Path(os.path.realpath(out))
    where = f"OUT {out}"
    with _explained(out, place, 0):
        _require_writable(place)
    if not os.path.lexists(place):
        return
    if not place.is_dir():
        raise ConflictError("exists and is no folder", where=where)
    if not overwrite:
        raise ConflictError("exists", where=where, hint="Give another folder, or --overwrite.")
    if any(place.iterdir()) and not any((place / mark).exists() for mark in _MARKS):
        raise ConflictError(
            "holds files but no config.json, so it is no draft; it is not replaced",
            where=where,
            hint="Delete it yourself if you mean it.",
        )
    known = (*_MARKS, *_WEIGHTS, *beside)
    others = sorted(
        path.name
        for path in place.iterdir()
        if path.is_dir() or not any(fnmatch(path.name, pattern) for pattern in known)
    )
    if others:
        named = ", ".join(others[:3]) + (f" and {len(others) - 3} more" if len(others) > 3 else "")
        raise ConflictError(
            f"holds what no conversion writes ({named}); it is not replaced",
            where=where,
            hint="Move that elsewhere, or delete it yourself if you mean it.",
        )


def _require_writable(place: Path) -> None:
    """Raise what the system would say of a folder made there, as far as it can be asked."""
    above = next(parent for parent in place.parents if os.path.lexists(parent))
    if not above.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
    if not os.access(above, os.W_OK | os.X_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))


@contextmanager
def _parents(place: Path) -> Iterator[None]:
    """Make the folders above a place; those that were made are gone after an error."""
    made = [parent for parent in place.parents if not parent.exists()]
    try:
        try:
            place.parent.mkdir(parents=True, exist_ok=True)
        except FileExistsError:
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR)) from None
        yield
    except BaseException:
        for parent in made:
            with suppress(OSError):
                parent.rmdir()
        raise


@contextmanager
def _locked(temporary: Path, out: Path) -> Iterator[Path]:
    """Make the temporary folder and keep it locked; what a killed run left there is removed."""
    busy = ConflictError(
        "is being written by another run",
        where=f"OUT {out}",
        hint=f"If there is none, delete {temporary}.",
    )
    if temporary.exists():
        with _directory(temporary) as leftover:
            if _lock(leftover) is not True:
                raise busy
            shutil.rmtree(temporary, ignore_errors=True)
    try:
        temporary.mkdir()
    except FileExistsError:
        raise busy from None
    with _directory(temporary) as descriptor:
        # Between mkdir and the lock another run may have taken it for a leftover and made its own.
        if _lock(descriptor) is False or not os.path.samestat(os.fstat(descriptor), temporary.stat()):
            raise busy
        yield temporary


@contextmanager
def _directory(path: Path) -> Iterator[int]:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _lock(descriptor: int) -> bool | None:
    """Lock a folder until its descriptor is closed, by us or by our death.

    Returns:
        True: it is ours. False: another process has it. None: the file system has no such locks.
    """
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


def _sync(path: Path) -> None:
    """Make a file durable, or a folder's list of its files."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Some network file systems cannot for a folder, and do it anyway when it changes.
        if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP) or not path.is_dir():
            raise
    finally:
        os.close(descriptor)


def _move(temporary: Path, place: Path) -> None:
    """Give the finished folder its name; a folder that had it before has the temporary one afterwards."""
    if not os.path.lexists(place):
        temporary.rename(place)
    elif not exchange(temporary, place):
        old = _sibling(place, "-old")
        try:
            place.rename(old)
            temporary.rename(place)
        finally:
            _finish_swap(place)
    _sync(place.parent)


def _finish_swap(place: Path) -> None:
    """Undo or finish a swap by two renames, after whatever came between them: an error, a kill."""
    old = _sibling(place, "-old")
    if old.exists() and not place.exists():
        old.rename(place)
    shutil.rmtree(old, ignore_errors=True)


@contextmanager
def _explained(out: Path, place: Path, nbytes: int) -> Iterator[None]:
    """Put what the system says about a folder that cannot be written into words."""
    try:
        yield
    except OSError as error:
        where = f"OUT {out}"
        reason = error.strerror or str(error)
        if error.errno in DISK_FULL:
            needed = f"{nbytes:,} bytes are needed and {_free_bytes(place):,} are free; " if nbytes else ""
            if error.errno == errno.EFBIG:
                needed = f"a file of up to {nbytes:,} bytes is more than may be written (ulimit -f); "
            raise TransportError(
                f"could not be written ({reason}); {needed}nothing was left behind",
                where=where,
                hint="Make room, or give an OUT on another disk, and run it again.",
            ) from None
        if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
            raise PermissionDenied(
                f"may not be written ({reason})",
                where=where,
                hint="Check the mode of the folder it is to lie in.",
            ) from None
        if error.errno in _NO_PLACE or _is_about(error, _sibling(place)):
            raise UsageError(f"cannot be made or replaced there ({reason})", where=where) from None
        if error.errno == errno.ENOTEMPTY:
            raise ConflictError("appeared while it was being written", where=where) from None
        if error.errno in (errno.EIO, errno.ESTALE, errno.ETIMEDOUT):
            raise TransportError(f"could not be written ({reason})", where=where) from None
        raise


def _is_about(error: OSError, path: Path) -> bool:
    """The folder itself could not be made: some file systems (/proc) answer that it does not exist."""
    return error.errno == errno.ENOENT and error.filename == str(path)


def _free_bytes(place: Path) -> int:
    """Bytes that a user may still write where a folder is to be."""
    parent = next(parent for parent in place.parents if parent.exists())
    status = os.statvfs(parent)
    return status.f_bavail * status.f_frsize
