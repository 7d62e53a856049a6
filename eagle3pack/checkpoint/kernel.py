"""The calls of Linux that Python's os module lacks; each says False where the system cannot do it."""

from __future__ import annotations

import errno
import fcntl
import os
import struct
from functools import cache
from pathlib import Path
from typing import Any

DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # EFBIG: a limit on file sizes, ulimit -f

_FICLONERANGE = 0x4020940D  # linux/fs.h: _IOW(0x94, 13, struct file_clone_range)
_FILE_CLONE_RANGE = struct.Struct("=qQQQ")  # source descriptor, source offset, length, target offset
_SYNC_FILE_RANGE_WRITE = 2
_AT_FDCWD = -100
_RENAME_EXCHANGE = 2


def clone_range(source: int, source_start: int, target: int, target_start: int, nbytes: int) -> bool:
    """Let two files share blocks (btrfs, XFS, ...): nothing is copied until one of them changes.

    All three numbers must be multiples of the block size.
    """
    try:
        fcntl.ioctl(target, _FICLONERANGE, _FILE_CLONE_RANGE.pack(source, source_start, nbytes, target_start))
    except OSError:  # whatever the reason, the copy that follows meets it again and names it
        return False
    return True


def reserve(descriptor: int, start: int, nbytes: int) -> bool:
    """Allocate disk space, so that a full disk shows before the work and not after it.

    Not os.posix_fallocate: where the file system cannot, glibc would write to every block instead.

    Raises:
        OSError: the disk is full, or a quota or a limit is reached.
    """
    code = _call("fallocate", "iill", descriptor, 0, start, nbytes) if nbytes else 0
    if code in DISK_FULL:
        raise OSError(code, os.strerror(code))
    return code == 0


def begin_writeback(descriptor: int, start: int, nbytes: int) -> bool:
    """Have the disk begin to write a range now, without waiting for it.

    The fsync at the end then finds little left to do: 1 GB is durable on ext4 in half of cp's time.
    """
    return _call("sync_file_range", "illI", descriptor, start, nbytes, _SYNC_FILE_RANGE_WRITE) == 0


def exchange(one: Path, other: Path) -> bool:
    """Swap two names in one step: at no moment is either missing."""
    names = os.fsencode(one), os.fsencode(other)
    return _call("renameat2", "iPiPI", _AT_FDCWD, names[0], _AT_FDCWD, names[1], _RENAME_EXCHANGE) == 0


def _call(name: str, types: str, *arguments: Any) -> int:
    """Call a function of the C library and return its errno, 0 for success."""
    import ctypes

    function = _function(name, types)
    if function is None:
        return errno.ENOSYS
    return 0 if function(*arguments) == 0 else ctypes.get_errno()


@cache
def _function(name: str, types: str) -> Any:
    """A function of the C library; None where it has no such one (musl, an old glibc)."""
    import ctypes

    function = getattr(ctypes.CDLL(None, use_errno=True), name, None)
    if function is not None:
        kinds = {"i": ctypes.c_int, "I": ctypes.c_uint, "l": ctypes.c_int64, "P": ctypes.c_char_p}
        function.argtypes = [kinds[kind] for kind in types]
    return function
