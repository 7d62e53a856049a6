"""One read of every weight file: its sha256, and what the values of its tensors show.

Hashing and looking share each block while it is in the cache, and nothing is kept of a tensor but a few
numbers: memory does not grow with the draft. The maps d2t and t2d are kept whole, a megabyte or two.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from eagle3pack.checkpoint.digest import draft_digest, draft_files, sha256_file
from eagle3pack.checkpoint.header import Header, TensorEntry
from eagle3pack.checkpoint.opening import opened
from eagle3pack.checkpoint.reading import BLOCK_BYTES, iter_blocks, read_part, read_tensor
from eagle3pack.draft.tensors import logical_name
from eagle3pack.errors import InputError
from eagle3pack.verify.check import Undecided
from eagle3pack.verify.values import FLOATS, MAP_DTYPES, Array, to_float32

if TYPE_CHECKING:
    from eagle3pack.verify.context import Context

ROW_SAMPLES = 128  # 16-bit words of a row that stand for it: equal ones are compared whole
MAX_COMPARED_PAIRS = 64
# Odd, so that multiplying loses nothing: the golden ratio's bits (Knuth, TAOCP 6.4), and its multiples.
_MULTIPLIERS = (np.arange(1, ROW_SAMPLES // 4 + 1, dtype=np.uint64) * 2 - 1) * np.uint64(0x9E3779B97F4A7C15)


@dataclass(frozen=True, slots=True)
class TensorFacts:
    """What the values of one tensor show.

    Attributes:
        name, logical, path, dtype, shape: as in its header.
        count: elements.
        is_float: a float type whose values were looked at.
        nonfinite: values that are NaN or infinite.
        is_constant: all values have the same bits.
        first: the first value.
        max_abs: the largest finite or infinite magnitude; 0 where the tensor is empty.
    """

    name: str
    logical: str
    path: Path
    dtype: str
    shape: tuple[int, ...]
    count: int
    is_float: bool
    nonfinite: int = 0
    is_constant: bool = False
    first: float = 0.0
    max_abs: float = 0.0


@dataclass(frozen=True, slots=True)
class RowFacts:
    """How many rows of a matrix are copies of an earlier one.

    Attributes:
        rows: of the matrix.
        distinct: rows that differ from all before them.
        example: two equal rows, or None.
    """

    rows: int
    distinct: int
    example: tuple[int, int] | None

    @property
    def copies(self) -> int:
        """Rows that an earlier one equals."""
        return self.rows - self.distinct


@dataclass(frozen=True, slots=True)
class EmbeddingFacts:
    """The draft's embedding beside the target's, of the same dtype and shape.

    Attributes:
        differing_rows: rows with any different byte.
        max_difference: largest difference of two values.
    """

    differing_rows: int
    max_difference: float


@dataclass(frozen=True, slots=True)
class Scan:
    """What one read of the draft found.

    Attributes:
        files: (path, size, sha256) of config.json, the weight files and their index.
        digest: the draft's.
        tensors: by logical name.
        d2t: int64 as stored; None where it is absent or not one row of numbers.
        t2d: boolean; None likewise.
        lm_head: its equal rows; None where it is absent or no matrix of floats.
        embedding: beside the target's; None where one of both is absent or they cannot be compared.
    """

    files: tuple[tuple[str, int, str], ...]
    digest: str
    tensors: Mapping[str, TensorFacts] = field(repr=False)
    d2t: Array | None = field(repr=False)
    t2d: Array | None = field(repr=False)
    lm_head: RowFacts | None
    embedding: EmbeddingFacts | None


def scan_draft(context: Context) -> Scan:
    """Read every file that belongs to the draft, once.

    Raises:
        Eagle3PackError: a file became unreadable or shorter while it was read.
    """
    scanner = _Scanner(context)
    headers = {header.path: header for header in context.headers.headers}
    files = []
    for path in draft_files(context.folder):
        header = headers.get(path)
        on_bytes = context.options.on_bytes
        digest = sha256_file(path, on_bytes) if header is None else scanner.read_file(header)
        files.append((path.name, path.stat().st_size, digest))
    tensors = context.headers.tensors
    return Scan(
        files=tuple(files),
        digest=draft_digest(files),
        tensors=scanner.facts,
        d2t=_read_map(tensors.get("d2t"), np.int64),
        t2d=_read_map(tensors.get("t2d"), np.bool_),
        lm_head=scanner.rows,
        embedding=scanner.embedding,
    )


def _read_map(entry: TensorEntry | None, dtype: type[np.generic]) -> Array | None:
    """d2t or t2d, whatever type of number they were stored in."""
    if entry is None or len(entry.shape) != 1 or entry.dtype not in {**MAP_DTYPES, **FLOATS}:
        return None
    data = read_tensor(entry)
    if entry.dtype in FLOATS:
        values = to_float32(data, entry.dtype)
        return None if not np.isfinite(values).all() else values.astype(dtype)
    return np.frombuffer(data, MAP_DTYPES[entry.dtype]).astype(dtype)


class _Scanner:
    """Reads files block by block and keeps what the blocks show."""

    def __init__(self, context: Context) -> None:
        self.on_bytes = context.options.on_bytes
        self.facts: dict[str, TensorFacts] = {}
        self.rows: RowFacts | None = None
        self.embedding: EmbeddingFacts | None = None
        self.target_embedding = _comparable_embedding(context)

    def read_file(self, header: Header) -> str:
        """Hash a weight file and look at its tensors; returns the sha256."""
        digest = hashlib.sha256()
        for block in _head_of(header):
            digest.update(block)
            self.on_bytes(len(block))
        for entry in header.tensors:
            looks = self._looks(entry)
            for block in iter_blocks(entry, _block_bytes(entry)):
                digest.update(block)
                for look in looks:
                    look.add(block)
                self.on_bytes(len(block))
            self._keep(entry, looks)
        return digest.hexdigest()

    def _looks(self, entry: TensorEntry) -> list[_Look]:
        logical = logical_name(entry.name)
        looks: list[_Look] = [_Values(entry)] if entry.dtype in FLOATS else []
        if logical == "lm_head.weight" and len(entry.shape) == 2 and entry.dtype in FLOATS and entry.nbytes:
            looks.append(_Rows(entry))
        if logical == "embed_tokens.weight" and self.target_embedding is not None:
            looks.append(_Comparison(entry, self.target_embedding))
        return looks

    def _keep(self, entry: TensorEntry, looks: list[_Look]) -> None:
        logical = logical_name(entry.name)
        count = int(np.prod(entry.shape, dtype=np.int64))
        basic = (entry.name, logical, entry.path, entry.dtype, entry.shape, count)
        self.facts[logical] = TensorFacts(*basic, is_float=False)
        for look in looks:
            if isinstance(look, _Values):
                self.facts[logical] = look.facts(*basic)
            elif isinstance(look, _Rows):
                self.rows = look.facts()
            elif isinstance(look, _Comparison):
                self.embedding = EmbeddingFacts(look.differing_rows, look.max_difference)


def _comparable_embedding(context: Context) -> TensorEntry | None:
    mine = context.headers.tensors.get("embed_tokens.weight")
    if mine is None:
        return None
    try:
        theirs = context.target_weights.embedding
    except Undecided:
        return None
    same_kind = theirs is not None and theirs.dtype == mine.dtype and theirs.shape == mine.shape
    return theirs if same_kind and mine.dtype in FLOATS and len(mine.shape) == 2 and mine.nbytes else None


def _block_bytes(entry: TensorEntry) -> int:
    """About a megabyte, in whole rows."""
    row_bytes = entry.nbytes // entry.shape[0] if entry.shape and entry.shape[0] else 0
    if not row_bytes:
        return BLOCK_BYTES
    return max(BLOCK_BYTES // row_bytes, 1) * row_bytes


def _head_of(header: Header) -> Iterator[memoryview]:
    with opened(header.path) as descriptor:
        position = 0
        while position < header.data_start:
            block = os.pread(descriptor, min(BLOCK_BYTES, header.data_start - position), position)
            if not block:
                raise InputError("became shorter while it was read", where=str(header.path))
            yield memoryview(block)
            position += len(block)


class _Look:
    """Something that is shown every block of a tensor."""

    def add(self, block: memoryview) -> None:
        """Look at the next block."""
        raise NotImplementedError


class _Values(_Look):
    """NaN, infinity, constancy and the largest magnitude, by integer arithmetic on the bits.

    Without its sign bit, a float's bits grow with its magnitude; infinity and NaN are above all numbers.
    """

    def __init__(self, entry: TensorEntry) -> None:
        self.kind = FLOATS[entry.dtype]
        self.dtype = entry.dtype
        self.first: Any = None
        self.is_constant = True
        self.max_bits = 0
        self.nonfinite = 0
        self.scratch = np.empty(0, self.kind.bits)

    def add(self, block: memoryview) -> None:
        bits = np.frombuffer(block, self.kind.bits)
        if bits.size == 0:
            return
        if self.first is None:
            self.first = bits[0]
        if self.is_constant:
            self.is_constant = bool((bits == self.first).all())
        if self.scratch.size < bits.size:
            self.scratch = np.empty(bits.size, self.kind.bits)
        magnitude = np.bitwise_and(bits, self.kind.magnitude, out=self.scratch[: bits.size])
        largest = int(magnitude.max())
        if largest >= self.kind.infinity:
            self.nonfinite += int((magnitude >= self.kind.infinity).sum())
        self.max_bits = max(self.max_bits, largest)

    def facts(
        self, name: str, logical: str, path: Path, dtype: str, shape: tuple[int, ...], count: int
    ) -> TensorFacts:
        """What was seen, once every block was shown."""

        def value(bits: Any) -> float:
            return float(to_float32(np.array([bits], self.kind.bits).tobytes(), self.dtype)[0])

        return TensorFacts(
            name,
            logical,
            path,
            dtype,
            shape,
            count,
            is_float=True,
            nonfinite=self.nonfinite,
            is_constant=self.is_constant and count > 1,
            first=0.0 if self.first is None else value(self.first),
            max_abs=value(self.max_bits),
        )


class _Rows(_Look):
    """Finds equal rows by words spread over each row, then compares candidates whole."""

    def __init__(self, entry: TensorEntry) -> None:
        self.entry = entry
        self.row_bytes = entry.nbytes // entry.shape[0]
        words = self.row_bytes // 2
        self.columns = np.unique(np.linspace(0, words - 1, min(words, ROW_SAMPLES)).astype(np.int64))
        self.keys: list[Array] = []

    def add(self, block: memoryview) -> None:
        rows = np.frombuffer(block, np.uint16).reshape(-1, self.row_bytes // 2)
        sample = np.zeros((len(rows), ROW_SAMPLES), np.uint16)
        sample[:, : len(self.columns)] = rows[:, self.columns]
        self.keys.append((sample.view(np.uint64) * _MULTIPLIERS).sum(axis=1, dtype=np.uint64))

    def facts(self) -> RowFacts:
        """Count the rows that differ."""
        keys = np.concatenate(self.keys)
        order = np.argsort(keys, kind="stable")
        same = np.flatnonzero(keys[order][1:] == keys[order][:-1])
        if not same.size:
            return RowFacts(len(keys), len(keys), None)
        chosen = same[np.linspace(0, same.size - 1, min(same.size, MAX_COMPARED_PAIRS)).astype(np.int64)]
        pairs = [(int(order[i]), int(order[i + 1])) for i in chosen]
        equal = [pair for pair in pairs if self._row(pair[0]) == self._row(pair[1])]
        copies = round(
            same.size * len(equal) / len(pairs)
        )  # all, unless chance or an adversary made keys meet
        return RowFacts(len(keys), len(keys) - copies, equal[0] if equal else None)

    def _row(self, row: int) -> bytes:
        return bytes(read_part(self.entry, row * self.row_bytes, self.row_bytes))


class _Comparison(_Look):
    """Holds the embedding against the target's, block beside block."""

    def __init__(self, entry: TensorEntry, theirs: TensorEntry) -> None:
        self.dtype = entry.dtype
        self.row_bytes = entry.nbytes // entry.shape[0]
        self.blocks = iter_blocks(theirs, _block_bytes(entry))
        self.differing_rows = 0
        self.max_difference = 0.0

    def add(self, block: memoryview) -> None:
        theirs = next(self.blocks)
        if block == theirs:
            return
        mine, other = (np.frombuffer(data, np.uint8).reshape(-1, self.row_bytes) for data in (block, theirs))
        rows = np.flatnonzero((mine != other).any(axis=1))
        self.differing_rows += len(rows)
        row = rows[0]  # one row a block is enough to tell a rounding from another matrix
        with np.errstate(invalid="ignore", over="ignore"):
            difference = np.abs(
                to_float32(mine[row].tobytes(), self.dtype) - to_float32(other[row].tobytes(), self.dtype)
            )
        self.max_difference = max(self.max_difference, float(np.nan_to_num(difference, posinf=0).max()))
