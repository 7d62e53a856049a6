"""The safetensors format: the header of a file, read with every invariant checked, and rendered.

A file is eight bytes of little-endian length N, N bytes of JSON, then the tensors' bytes, which cover
the rest of the file without holes. Reading costs the header alone, whatever the size of the file, and
needs neither numpy nor torch.

Source: https://github.com/huggingface/safetensors#format and its Rust reader, tensor.rs of 0.8.0.
"""

from __future__ import annotations

import json
import os
import re
import struct
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeGuard

from eagle3pack.checkpoint.opening import GET_ANEW, opened, require_weights
from eagle3pack.documents import describe, parse_json_object
from eagle3pack.errors import InputError

MAX_HEADER_BYTES = 100_000_000  # safetensors' own limit
PAGE_BYTES = 4096  # the block that file systems share, and the granularity of `render_header`'s residue
_LENGTH = struct.Struct("<Q")
_ALIGNMENT = 8  # of the first tensor; the reference writer's

# The width of an element; safetensors 0.8.0 packs the 4- and 6-bit ones.
DTYPE_BITS: Mapping[str, int] = {
    "BOOL": 8,
    "F4": 4,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
    "U8": 8,
    "I8": 8,
    "F8_E5M2": 8,
    "F8_E4M3": 8,
    "F8_E8M0": 8,
    "F8_E4M3FNUZ": 8,
    "F8_E5M2FNUZ": 8,
    "I16": 16,
    "U16": 16,
    "F16": 16,
    "BF16": 16,
    "I32": 32,
    "U32": 32,
    "F32": 32,
    "I64": 64,
    "U64": 64,
    "F64": 64,
    "C64": 64,
}


# torch's name of a dtype -> its name in a header.
TORCH_DTYPES: Mapping[str, str] = {
    "bfloat16": "BF16",
    "float16": "F16",
    "float32": "F32",
    "float64": "F64",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint8": "U8",
    "bool": "BOOL",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
}


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """A tensor in a file, and where its bytes are.

    Attributes:
        name: in the file.
        dtype: as a safetensors header spells it ("BF16", "I64", ...).
        shape: row-major.
        path: the file.
        start: offset of the first byte from the start of the file.
        nbytes: size.
        values: gives the bytes where the file does not hold them as one run (a tensor in a pickle);
            `start` is then without meaning. See `reading`.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    path: Path
    start: int
    nbytes: int
    values: Callable[[], memoryview] | None = field(default=None, compare=False, repr=False)

    @property
    def end(self) -> int:
        """Offset just past the last byte."""
        return self.start + self.nbytes


@dataclass(frozen=True, slots=True)
class Header:
    """What the head of a weight file says.

    Attributes:
        path: the file.
        tensors: in the order of their bytes.
        metadata: free text, usually {"format": "pt"}.
        data_start: offset of the first tensor, 8 + N; 0 for a pickle.
        file_bytes: size of the whole file.
    """

    path: Path
    tensors: tuple[TensorEntry, ...]
    metadata: Mapping[str, str]
    data_start: int
    file_bytes: int


def is_tensor_name(name: str) -> bool:
    """Whether a header can hold a tensor of this name.

    It cannot hold half a surrogate pair, which JSON may escape and UTF-8 does not have.
    """
    return name != "__metadata__" and (name.isascii() or not re.search("[\ud800-\udfff]", name))


def tensor_bytes(dtype: str, shape: Iterable[int]) -> int:
    """Bytes of a tensor; rounded up where packed elements do not fill the last byte."""
    bits = DTYPE_BITS[dtype]
    for size in shape:
        bits *= size
    return -(-bits // 8)


def read_header(path: Path) -> Header:
    """Read and check the header of a safetensors file.

    Raises:
        InputError: the file breaks the format, or is something else under this name.
        PermissionDenied: it may not be read.
    """
    with opened(path) as descriptor:
        file_bytes = os.fstat(descriptor).st_size
        length = _header_length(os.pread(descriptor, 32, 0), file_bytes, path)
        text = os.pread(descriptor, length, _LENGTH.size)
    if len(text) != length:
        raise InputError("became shorter while it was read", where=str(path))
    return parse_header(text, file_bytes, path)


def parse_header(text: bytes, file_bytes: int, path: Path) -> Header:
    """Check the JSON of a header against the size of its file.

    Args:
        text: the N bytes after the length.
        file_bytes: size of the whole file.
        path: for messages and for the entries.

    Raises:
        InputError: not JSON, a key twice, an unknown dtype, sizes or offsets that do not fit.
    """
    where = f"{path} (header)"
    if not text.startswith(b"{"):
        raise InputError("does not begin with `{` as a safetensors header must", where=where)
    raw = parse_json_object(text, where=where, finite=True)
    metadata = _parse_metadata(raw.pop("__metadata__", None), where)
    data_start = _LENGTH.size + len(text)
    entries = [_parse_entry(name, value, path, data_start) for name, value in raw.items()]
    entries.sort(key=lambda entry: (entry.start, entry.nbytes))  # an empty tensor before one that has bytes
    _require_cover(entries, data_start, file_bytes, path)
    return Header(path, tuple(entries), metadata, data_start, file_bytes)


def render_header(
    tensors: Iterable[tuple[str, str, tuple[int, ...]]],
    metadata: Mapping[str, str],
    residue: int | None = None,
) -> bytes:
    """Render the head of a file: the length, the JSON, and the spaces that align what follows.

    The JSON is what the reference writer makes of the same tensors in the same order, byte for byte.

    Args:
        tensors: (name, dtype, shape) in the order of their bytes.
        metadata: free text.
        residue: what the offset of the first tensor should be modulo 4096, so that a block-aligned
            clone of the source is possible. Left aside where it would break the 8-byte alignment.

    Returns:
        8 + N bytes; the first tensor follows at once.
    """
    document: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    offset = 0
    for name, dtype, shape in tensors:
        end = offset + tensor_bytes(dtype, shape)
        document[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(document, ensure_ascii=False, separators=(",", ":")).encode("utf-8")
    size = _LENGTH.size + len(text)
    padding = -size % _ALIGNMENT
    if residue is not None and residue % _ALIGNMENT == 0:
        padding = (residue - size) % PAGE_BYTES
    return _LENGTH.pack(len(text) + padding) + text + b" " * padding


def _header_length(head: bytes, file_bytes: int, path: Path) -> int:
    """N, from the first bytes of a file."""
    if head[_LENGTH.size : _LENGTH.size + 1] != b"{":
        require_weights(head, path)
    if len(head) < _LENGTH.size:
        raise InputError(
            f"is {file_bytes} bytes long, too short for a safetensors file",
            where=str(path),
            hint=GET_ANEW,
        )
    (length,) = _LENGTH.unpack_from(head)
    if length > MAX_HEADER_BYTES:
        raise InputError(
            f"is no safetensors file (its first eight bytes would make a header of {length:,} bytes)",
            where=str(path),
        )
    if _LENGTH.size + length > file_bytes:
        raise InputError(
            f"is truncated: its header alone is {length:,} bytes and the file {file_bytes:,}",
            where=str(path),
            hint=GET_ANEW,
        )
    return int(length)


def _parse_metadata(value: Any, where: str) -> dict[str, str]:
    if value is None:
        return {}
    if not isinstance(value, dict) or not all(isinstance(text, str) for text in value.values()):
        raise InputError(f"__metadata__ is {describe(value)}, expected text by name", where=where)
    return value


def _parse_entry(name: str, value: Any, path: Path, data_start: int) -> TensorEntry:
    """One tensor of a header, its bytes counted."""
    where = f"{path}: tensor {describe(name)}"
    if not is_tensor_name(name):
        raise InputError("its name is no valid Unicode", where=where)
    if not isinstance(value, dict):
        raise InputError(f"is described by {describe(value)}, expected an object", where=where)
    dtype, shape, offsets = value.get("dtype"), value.get("shape"), value.get("data_offsets")
    if not isinstance(dtype, str) or dtype not in DTYPE_BITS:
        raise InputError(f"has dtype {describe(dtype)}, expected one of {', '.join(DTYPE_BITS)}", where=where)
    if not _is_counts(shape):
        raise InputError(f"has shape {describe(shape)}, expected a list of sizes", where=where)
    if not _is_counts(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise InputError(f"has data_offsets {describe(offsets)}, expected [begin, end]", where=where)
    nbytes = offsets[1] - offsets[0]
    if _element_count(shape, limit=8 * nbytes + 1) * DTYPE_BITS[dtype] != 8 * nbytes:
        raise InputError(
            f"has {nbytes:,} bytes, which {dtype} of shape {describe(shape)} does not fill", where=where
        )
    return TensorEntry(name, dtype, tuple(shape), path, data_start + offsets[0], nbytes)


def _is_counts(value: Any) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(type(item) is int and item >= 0 for item in value)


def _element_count(shape: list[int], limit: int) -> int:
    """Elements of a shape, at most `limit`: a hostile header must not cost a product of huge numbers."""
    if 0 in shape:
        return 0
    count = 1
    for size in shape:
        count *= size
        if count >= limit:
            return limit
    return count


def _require_cover(entries: list[TensorEntry], data_start: int, file_bytes: int, path: Path) -> None:
    """Raise unless the tensors follow each other without holes up to the end of the file."""
    expected = data_start
    for entry in entries:
        if entry.start != expected:
            raise InputError(
                f"begins at byte {entry.start - data_start:,} of the data, expected "
                f"{expected - data_start:,}: tensors follow each other without holes or overlaps",
                where=f"{path}: tensor {describe(entry.name)}",
            )
        expected = entry.end
    if expected > file_bytes:
        raise InputError(
            f"is truncated: {expected - file_bytes:,} of {expected:,} bytes are missing",
            where=str(path),
            hint=GET_ANEW,
        )
    if expected < file_bytes:
        raise InputError(f"has {file_bytes - expected:,} bytes after its last tensor", where=str(path))
