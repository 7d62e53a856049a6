"""Writing weight files: planned as values, then streamed in bounded memory.

Unchanged tensors never pass through this process: runs of them that lie together in the source and in
the output are copied as one range (see `copying`), so that a conversion that touches 6 % of a draft
costs what copying it costs. The same plan makes the same bytes, on every file system.
"""

from __future__ import annotations

import json
import os
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TypeAlias

from eagle3pack.checkpoint.copying import copy_range, shareable
from eagle3pack.checkpoint.digest import FollowingSha256, ignore_bytes
from eagle3pack.checkpoint.files import SINGLE_FILE
from eagle3pack.checkpoint.header import (
    DTYPE_BITS,
    PAGE_BYTES,
    TensorEntry,
    read_header,
    render_header,
    tensor_bytes,
)
from eagle3pack.checkpoint.kernel import begin_writeback, clone_range, reserve
from eagle3pack.checkpoint.opening import opened
from eagle3pack.checkpoint.reading import iter_blocks, read_part, same_bytes
from eagle3pack.errors import ConflictError, MismatchError

METADATA: Mapping[str, str] = {"format": "pt"}  # transformers refuses a file without it
DEFAULT_SHARD_BYTES = 5_000_000_000

Buffer: TypeAlias = bytes | bytearray | memoryview
Compute: TypeAlias = "Callable[[PlannedTensor], Iterable[Buffer]]"


@dataclass(frozen=True, slots=True)
class PlannedTensor:
    """A tensor to be written.

    Attributes:
        name: in the output.
        dtype: as a safetensors header spells it.
        shape: row-major.
        source: the tensor whose bytes it takes unchanged; None where its bytes are computed.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    source: TensorEntry | None

    @property
    def nbytes(self) -> int:
        """Size of the tensor."""
        return tensor_bytes(self.dtype, self.shape)


@dataclass(frozen=True)
class PlannedFile:
    """A weight file to be written.

    Attributes:
        name: of the file.
        tensors: in the order of their bytes.
    """

    name: str
    tensors: tuple[PlannedTensor, ...]

    @cached_property
    def header(self) -> bytes:
        """All bytes before the first tensor."""
        parts = [(tensor.name, tensor.dtype, tensor.shape) for tensor in self.tensors]
        return render_header(parts, METADATA, _clone_residue(self.tensors))

    @property
    def data_bytes(self) -> int:
        """Bytes of all its tensors."""
        return sum(tensor.nbytes for tensor in self.tensors)

    @property
    def nbytes(self) -> int:
        """Size of the whole file."""
        return len(self.header) + self.data_bytes


@dataclass(frozen=True, slots=True)
class WrittenFile:
    """A weight file that was written.

    Attributes:
        name: of the file.
        nbytes: its size.
        sha256: in hexadecimal; None where nothing was hashed.
    """

    name: str
    nbytes: int
    sha256: str | None


@dataclass(frozen=True, slots=True)
class Piece:
    """A run of bytes of an output file that is made in one go.

    Attributes:
        start: offset in the output file.
        nbytes: length.
        path: the file that it is copied from; None where its bytes come from `tensor`.
        source_start: offset in that file.
        tensor: what is computed, or read from a pickle.
    """

    start: int
    nbytes: int
    path: Path | None = None
    source_start: int = 0
    tensor: PlannedTensor | None = None

    @property
    def source_end(self) -> int:
        """Offset in the source just past the last byte."""
        return self.source_start + self.nbytes

    def part(self, offset: int, nbytes: int) -> Piece:
        """A part of a copied run."""
        return Piece(self.start + offset, nbytes, self.path, self.source_start + offset)


def plan_files(
    tensors: Sequence[PlannedTensor], shard_bytes: int = DEFAULT_SHARD_BYTES
) -> tuple[PlannedFile, ...]:
    """Distribute tensors over files, in their order.

    Args:
        tensors: all of the output.
        shard_bytes: a file ends before its tensors exceed this; a larger tensor has one of its own.

    Returns:
        One file `model.safetensors`, or shards named as Hugging Face names them.
    """
    shards: list[list[PlannedTensor]] = [[]]
    filled = 0
    for tensor in tensors:
        if filled + tensor.nbytes > shard_bytes and shards[-1]:
            shards.append([])
            filled = 0
        shards[-1].append(tensor)
        filled += tensor.nbytes
    if len(shards) == 1:
        return (PlannedFile(SINGLE_FILE, _aligned(shards[0])),)
    return tuple(
        PlannedFile(f"model-{i:05d}-of-{len(shards):05d}.safetensors", _aligned(shard))
        for i, shard in enumerate(shards, start=1)
    )


def _aligned(tensors: list[PlannedTensor]) -> tuple[PlannedTensor, ...]:
    """The tensors in their order; wide elements first where that order would misalign one.

    It happens where shards are joined and the first ends with a mask of an odd number of bytes.
    """
    offset = 0
    for tensor in tensors:
        if offset % max(DTYPE_BITS[tensor.dtype] // 8, 1):
            return tuple(sorted(tensors, key=lambda tensor: -DTYPE_BITS[tensor.dtype]))
        offset += tensor.nbytes
    return tuple(tensors)


def _clone_residue(tensors: Iterable[PlannedTensor]) -> int | None:
    """Where in a 4096-byte block the data must begin for most unchanged bytes to lie as in their source."""
    votes: dict[int, int] = defaultdict(int)
    offset = 0
    for tensor in tensors:
        if tensor.source is not None and tensor.source.values is None:
            votes[(tensor.source.start - offset) % PAGE_BYTES] += tensor.nbytes
        offset += tensor.nbytes
    return max(votes, key=lambda residue: (votes[residue], -residue), default=None)


def plan_pieces(planned: PlannedFile) -> tuple[Piece, ...]:
    """The runs that a file is made of after its header, neighbours in one source joined; pure."""
    pieces: list[Piece] = []
    position = len(planned.header)
    for tensor in planned.tensors:
        source = tensor.source
        piece = Piece(position, tensor.nbytes, tensor=tensor)
        if source is not None and source.values is None:
            piece = Piece(position, tensor.nbytes, source.path, source.start)
            if pieces and pieces[-1].path == piece.path and pieces[-1].source_end == piece.source_start:
                piece = replace(pieces[-1], nbytes=pieces.pop().nbytes + piece.nbytes)
        pieces.append(piece)
        position += tensor.nbytes
    return tuple(pieces)


def index_json(files: Sequence[PlannedFile]) -> bytes:
    """The index of several files, as Hugging Face writes it."""
    index = {
        "metadata": {"total_size": sum(file.data_bytes for file in files)},
        "weight_map": {tensor.name: file.name for file in files for tensor in file.tensors},
    }
    return (json.dumps(index, indent=2, sort_keys=True, ensure_ascii=False) + "\n").encode("utf-8")


def write_file(
    planned: PlannedFile,
    folder: Path,
    compute: Compute,
    *,
    on_bytes: Callable[[int], None] = ignore_bytes,
    hashing: bool = True,
) -> WrittenFile:
    """Write a weight file, durable when this returns, and hash it on the way.

    Args:
        planned: what to write.
        folder: where; usually the temporary one of `new_folder`.
        compute: gives the bytes of a tensor without a source, in blocks of any size.
        on_bytes: told how many more bytes are done, in all the size of the file. While hashing it is
            called from another thread (one call at a time), since the hash is the slower part.
        hashing: also make the sha256.

    Raises:
        ConflictError: a source file changed meanwhile.
        InputError: a source cannot be read.
        OSError: the disk is full or the folder cannot be written; `new_folder` puts it in words.
    """
    return _write_pieces(
        folder / planned.name, planned.header, plan_pieces(planned), compute, on_bytes, hashing
    )


def copy_file(
    source: Path, folder: Path, *, on_bytes: Callable[[int], None] = ignore_bytes, hashing: bool = True
) -> WrittenFile:
    """Copy a weight file as it is, its header included; otherwise as `write_file`."""
    whole = Piece(0, source.stat().st_size, source)
    return _write_pieces(folder / source.name, b"", (whole,), lambda _: (), on_bytes, hashing)


def _write_pieces(
    path: Path,
    header: bytes,
    pieces: Sequence[Piece],
    compute: Compute,
    on_bytes: Callable[[int], None],
    hashing: bool,
) -> WrittenFile:
    """Write a header and the pieces that follow it; see `write_file`."""
    nbytes = len(header) + sum(piece.nbytes for piece in pieces)
    with ExitStack() as stack:
        target = stack.enter_context(_created(path))
        paths = dict.fromkeys(piece.path for piece in pieces if piece.path is not None)
        sources = {source: stack.enter_context(_unchanging(source)) for source in paths}
        left = [rest for piece in pieces for rest in _share(piece, sources, target)]
        for piece in left:
            if not reserve(target, piece.start, piece.nbytes):
                break
        follower = stack.enter_context(FollowingSha256(target, on_bytes)) if hashing else None
        report = follower.advance if follower else _increments(on_bytes)
        _write(target, header, 0)
        for piece in left:
            position = piece.start
            report(position)  # whatever lies before it is written, or shared
            for count in _fill(piece, sources, target, compute):
                begin_writeback(target, position, count)
                position += count
                report(position)
        report(nbytes)
        os.fsync(target)
        return WrittenFile(path.name, nbytes, follower.finish() if follower else None)


@contextmanager
def _created(path: Path) -> Iterator[int]:
    """Create a file and yield its descriptor; it is gone after an error."""
    # Not tempfile: its mode 0600 would stay on the weights (safetensors issue 782).
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        yield descriptor
    except BaseException:
        path.unlink(missing_ok=True)
        raise
    finally:
        os.close(descriptor)


@contextmanager
def _unchanging(path: Path) -> Iterator[int]:
    """Open a source file, and raise ConflictError at the end if it was written to meanwhile."""
    with opened(path) as descriptor:
        before = os.fstat(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_SEQUENTIAL)  # a cold copy takes 0.8 of the time
        yield descriptor
        after = os.fstat(descriptor)
        if (before.st_size, before.st_mtime_ns) != (after.st_size, after.st_mtime_ns):
            raise ConflictError("changed while it was copied", where=str(path), hint="Run it again.")


def _share(piece: Piece, sources: Mapping[Path, int], target: int) -> Iterator[Piece]:
    """Share what the file system can of a copied run, and yield what is left to write."""
    if piece.path is not None:
        offset, nbytes = shareable(piece.source_start, piece.start, piece.nbytes)
        source_start, start = piece.source_start + offset, piece.start + offset
        if nbytes and clone_range(sources[piece.path], source_start, target, start, nbytes):
            yield piece.part(0, offset)
            yield piece.part(offset + nbytes, piece.nbytes - offset - nbytes)
            return
    yield piece


def _fill(piece: Piece, sources: Mapping[Path, int], target: int, compute: Compute) -> Iterator[int]:
    """Write a piece, yielding how many more of its bytes are there."""
    if piece.path is not None:
        yield from copy_range(sources[piece.path], piece.source_start, target, piece.start, piece.nbytes)
    if piece.tensor is not None:
        tensor, position = piece.tensor, piece.start
        blocks = iter_blocks(tensor.source) if tensor.source is not None else compute(tensor)
        for block in blocks:
            count = _write(target, block, position)
            position += count
            yield count
        if position != piece.start + piece.nbytes:
            raise ValueError(f"{tensor.name}: {position - piece.start} bytes were made of {piece.nbytes}")


def _write(descriptor: int, block: Buffer, position: int) -> int:
    """Write a whole block at an offset."""
    view = memoryview(block)
    if view.nbytes == 0:
        return 0
    view = view.cast("B")
    written = 0
    while written < view.nbytes:
        written += os.pwrite(descriptor, view[written:], position + written)
    return written


def _increments(on_bytes: Callable[[int], None]) -> Callable[[int], None]:
    """A function that is told how far the work is, and passes on how much that is more than before."""
    reported = 0

    def report(position: int) -> None:
        nonlocal reported
        on_bytes(position - reported)
        reported = position

    return report


def verify_written(files: Iterable[PlannedFile], folder: Path, *, every_byte: bool = False) -> None:
    """Read written files again and hold them against their plan.

    The headers are compared as a whole. Of each unchanged tensor the first and the last block are
    compared with the source's, which shows a range that was taken from, or put, one byte off; that the
    bytes between follow is the kernel's promise, and `every_byte` checks that too at the cost of reading
    both files again.

    Raises:
        MismatchError: a file is not what was planned; the disk, or this program, is at fault.
        InputError: a file breaks the format.
    """
    for planned in files:
        path = folder / planned.name
        header = read_header(path)
        found = [(entry.name, entry.dtype, entry.shape) for entry in header.tensors]
        wanted = [(tensor.name, tensor.dtype, tensor.shape) for tensor in planned.tensors]
        if (found, header.metadata, header.file_bytes) != (wanted, METADATA, planned.nbytes):
            raise MismatchError("its header is not the one that was planned", where=str(path))
        for tensor, entry in zip(planned.tensors, header.tensors, strict=True):
            same = same_bytes if every_byte else _same_ends
            if tensor.source is not None and not same(tensor.source, entry):
                raise MismatchError(
                    f"tensor {tensor.name} is not the one in {tensor.source.path}",
                    where=str(path),
                    hint="Run it again; if it stays so, the disk is damaged.",
                )


def _same_ends(one: TensorEntry, other: TensorEntry) -> bool:
    """Whether the first and the last block of two tensors are the same."""
    size = min(PAGE_BYTES, one.nbytes)
    return one.nbytes == other.nbytes and all(
        read_part(one, offset, size) == read_part(other, offset, size) for offset in (0, one.nbytes - size)
    )
