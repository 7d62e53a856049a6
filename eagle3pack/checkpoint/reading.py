"""Reading tensors in bounded memory: one block at a time, into one buffer that is used again.

`preadv` and not mmap: mapped pages count as resident memory, so that a 6 GB file would look like 6 GB.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from eagle3pack.checkpoint.header import TensorEntry
from eagle3pack.checkpoint.opening import opened
from eagle3pack.errors import InputError

BLOCK_BYTES = 1 << 20


def read_tensor(entry: TensorEntry) -> memoryview:
    """Read all bytes of a tensor.

    Raises:
        InputError: the file ends before the tensor does.
        PermissionDenied: the file may not be read.
    """
    return read_part(entry, 0, entry.nbytes)


def read_part(entry: TensorEntry, offset: int, nbytes: int) -> memoryview:
    """Read some bytes of a tensor: the rows of one head, say.

    Args:
        entry: the tensor.
        offset: of the first byte, from the start of the tensor.
        nbytes: how many; the part must lie within the tensor.

    Raises:
        InputError: the file ends before the part does.
        PermissionDenied: the file may not be read.
    """
    buffer = memoryview(bytearray(nbytes))
    for _ in _fill(entry, offset, nbytes, buffer):
        pass
    return buffer


def iter_blocks(entry: TensorEntry, block_bytes: int = BLOCK_BYTES) -> Iterator[memoryview]:
    """Yield a tensor's bytes in order, in blocks of `block_bytes` and a shorter last one.

    Each block is a view of the same buffer: use it before asking for the next.

    Raises:
        InputError: the file ends before the tensor does.
        PermissionDenied: the file may not be read.
    """
    yield from _fill(entry, 0, entry.nbytes, memoryview(bytearray(min(block_bytes, entry.nbytes))))


def same_bytes(
    one: TensorEntry, other: TensorEntry, on_bytes: Callable[[int], None] = lambda count: None
) -> bool:
    """Whether two tensors hold the same bytes, read side by side in bounded memory.

    Args:
        one: a tensor.
        other: another.
        on_bytes: told how many more bytes are equal, once a block.
    """
    if one.nbytes != other.nbytes:
        return False
    for mine, theirs in zip(iter_blocks(one), iter_blocks(other), strict=True):
        if mine != theirs:
            return False
        on_bytes(len(mine))
    return True


def _fill(entry: TensorEntry, offset: int, nbytes: int, buffer: memoryview) -> Iterator[memoryview]:
    """Read a part of a tensor through a buffer, yielding it each time it is full, and at the end."""
    with _reader(entry) as read_into:
        for position in range(offset, offset + nbytes, len(buffer) or 1):
            block = buffer[: min(len(buffer), offset + nbytes - position)]
            read_into(block, position)
            yield block


@contextmanager
def _reader(entry: TensorEntry) -> Iterator[Callable[[memoryview, int], None]]:
    """Yield a function that fills a block with the bytes at a position of the tensor."""
    if entry.values is not None:
        values = entry.values()

        def copy_values(block: memoryview, position: int) -> None:
            block[:] = values[position : position + len(block)]

        yield copy_values
        return
    with opened(entry.path) as descriptor:
        os.posix_fadvise(descriptor, entry.start, entry.nbytes, os.POSIX_FADV_SEQUENTIAL)

        def read_file(block: memoryview, position: int) -> None:
            filled = 0
            while filled < len(block):  # one call reads at most 2 GiB, and may read less
                count = os.preadv(descriptor, [block[filled:]], entry.start + position + filled)
                if count == 0:
                    raise InputError(
                        f"ends within tensor {entry.name}; it became shorter after its header was read",
                        where=str(entry.path),
                    )
                filled += count

        yield read_file
