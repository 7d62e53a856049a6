"""The calls of Linux that Python's os module lacks; each says False where the system cannot do it."""

from __future__ import annotations

import errno
import fcntl
import os
import struct
from pathlib import Path

DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # EFBIG: a limit on file sizes, ulimit -f

_FICLONERANGE = 0x4020940D  # linux/fs.h: _IOW(0x94, 13, struct file_clone_range)
_FILE_CLONE_RANGE = struct.Struct("=qQQQ")  # source descriptor, source offset, length, target offset
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
    import ctypes

    fallocate = getattr(ctypes.CDLL(None, use_errno=True), "fallocate", None)
    if fallocate is None or nbytes == 0:
        return False
    fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
    if fallocate(descriptor, 0, start, nbytes) == 0:
        return True
    code = ctypes.get_errno()
    if code in DISK_FULL:
        raise OSError(code, os.strerror(code))
    return False


def exchange(one: Path, other: Path) -> bool:
    """Swap two names in one step: at no moment is either missing."""
    import ctypes

    renameat2 = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if renameat2 is None:
        return False
    names = os.fsencode(one), os.fsencode(other)
    return bool(renameat2(_AT_FDCWD, names[0], _AT_FDCWD, names[1], _RENAME_EXCHANGE) == 0)
