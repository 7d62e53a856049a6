"""Copying a range of one file into another without its bytes passing through this process.

Blocks are shared where the file system can (`shareable` says which), else the kernel copies, else a
buffer does. A bounce through user space costs 1.5 to 2 times the CPU, so that it comes last.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator

from eagle3pack.checkpoint.header import PAGE_BYTES
from eagle3pack.errors import ConflictError

CHUNK_BYTES = 8 << 20  # a call to the kernel: small enough for a lively progress bar and for Ctrl-C
_BUFFER_BYTES = 1 << 20

# A way of copying that answers one of these is not to be had between these two files.
_UNSUPPORTED = (
    errno.EXDEV,
    errno.ENOSYS,
    errno.EOPNOTSUPP,
    errno.EINVAL,
    errno.EPERM,
    errno.EBADF,
    errno.ENOTTY,
)


def shareable(source_start: int, target_start: int, nbytes: int) -> tuple[int, int]:
    """The part of a range that two files can share: whole blocks, at the same place in a block.

    Returns:
        (offset, bytes) within the range; (0, 0) where there is none.
    """
    head = -source_start % PAGE_BYTES
    middle = (nbytes - head) // PAGE_BYTES * PAGE_BYTES
    if (source_start - target_start) % PAGE_BYTES or middle <= 0:
        return 0, 0
    return head, middle


def copy_range(source: int, source_start: int, target: int, target_start: int, nbytes: int) -> Iterator[int]:
    """Copy bytes between two open files, yielding how many more are copied, in order.

    Args:
        source: descriptor to read from.
        source_start: offset in it.
        target: descriptor to write to; its file position may move.
        target_start: offset in it.
        nbytes: how many.

    Raises:
        ConflictError: the source ends before the range does.
        OSError: the disk is full, or broken.
    """
    copied = 0
    for way in _WAYS:
        while copied < nbytes:
            wanted = min(CHUNK_BYTES, nbytes - copied)
            try:
                count = way(source, source_start + copied, target, target_start + copied, wanted)
            except OSError as error:
                if way is _through_a_buffer or error.errno not in _UNSUPPORTED:
                    raise
                break
            if count == 0:  # the end of the source, or a file system that answers so when it cannot
                break
            copied += count
            yield count
    if copied < nbytes:
        raise ConflictError(f"a source file became {nbytes - copied:,} bytes shorter while it was copied")


def _in_the_kernel(source: int, source_start: int, target: int, target_start: int, nbytes: int) -> int:
    return os.copy_file_range(source, target, nbytes, source_start, target_start)


def _by_sendfile(source: int, source_start: int, target: int, target_start: int, nbytes: int) -> int:
    os.lseek(target, target_start, os.SEEK_SET)
    return os.sendfile(target, source, source_start, nbytes)


def _through_a_buffer(source: int, source_start: int, target: int, target_start: int, nbytes: int) -> int:
    return os.pwrite(target, os.pread(source, min(nbytes, _BUFFER_BYTES), source_start), target_start)


_WAYS = (_in_the_kernel, _by_sendfile, _through_a_buffer)
