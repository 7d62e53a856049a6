"""One tensor as torch.save writes it: a zip archive of a pickle and the bare values, uncompressed.

torch.distributed.checkpoint stores every chunk so. The values' place in the file is found without torch
and without running the pickle (see `inert`), so that they can be streamed like any other bytes.

Source: torch 2.13 torch/serialization.py and torch/_utils.py; PKWARE APPNOTE for the archive.
"""

from __future__ import annotations

import io
import os
import struct
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from eagle3pack.checkpoint.header import DTYPE_BITS, tensor_bytes
from eagle3pack.checkpoint.inert import inert, read_inert
from eagle3pack.errors import InputError

_MAX_PICKLE_BYTES = 1 << 16  # it describes one tensor

_STORAGES = {
    "BFloat16Storage": "BF16",
    "HalfStorage": "F16",
    "FloatStorage": "F32",
    "DoubleStorage": "F64",
    "LongStorage": "I64",
    "IntStorage": "I32",
    "ShortStorage": "I16",
    "CharStorage": "I8",
    "ByteStorage": "U8",
    "BoolStorage": "BOOL",
}
_NAMES: Mapping[tuple[str, str], Any] = {
    ("torch._utils", "_rebuild_tensor_v2"): inert("tensor"),
    **{("torch", name): dtype for name, dtype in _STORAGES.items()},
    ("collections", "OrderedDict"): dict,
}


def find_values(
    descriptor: int, offset: int, length: int, dtype: str, sizes: tuple[int, ...], path: Path
) -> int:
    """Offset of a tensor's first byte within the archive that torch.save made of it.

    Raises:
        InputError: the archive is damaged, or holds another tensor than the metadata says.
    """
    window = _Window(descriptor, offset, length)
    try:
        with zipfile.ZipFile(window) as archive:
            records = {record.filename.partition("/")[2]: record for record in archive.infolist()}
            small = {name: records[name] for name in ("data.pkl", "byteorder") if name in records}
            if any(record.file_size > _MAX_PICKLE_BYTES for record in small.values()):
                raise ValueError("too much beside the tensor")
            tensor = read_inert(archive.read(small["data.pkl"]), _NAMES, path)
            endian = archive.read(small["byteorder"]) if "byteorder" in small else b"little"
            storage, start, shape, strides = tensor.arguments[:4]
            _, stored_dtype, key, *_ = storage
            values = records[f"data/{key}"]
    except InputError:
        raise
    except Exception as error:  # whatever a damaged archive makes zipfile, zlib or a tuple say
        raise InputError(
            f"holds a damaged chunk at byte {offset:,} ({error})", where=str(path), hint="Copy it again."
        ) from None
    begin = start * DTYPE_BITS[dtype] // 8 if type(start) is int and start >= 0 else -1
    if (
        (stored_dtype, shape, endian) != (dtype, sizes, b"little")
        or not _row_major(shape, strides)
        or values.compress_type != zipfile.ZIP_STORED
        or not 0 <= begin <= begin + tensor_bytes(dtype, sizes) <= values.file_size
    ):
        raise InputError(
            f"holds another tensor at byte {offset:,} than its metadata says, or one that is not row-major",
            where=str(path),
            hint="Export it with the trainer's own tool, such as TorchSpec's tools/convert_to_hf.py.",
        )
    return _data_offset(window, values, path) + begin


def is_shape(value: Any) -> bool:
    """Whether a value that a pickle gave can be a shape."""
    return isinstance(value, tuple) and all(type(size) is int and 0 <= size < 2**40 for size in value)


def _row_major(shape: tuple[int, ...], strides: Any) -> bool:
    if not is_shape(strides) or len(strides) != len(shape):
        return False
    expected, found = 1, True
    for size, stride in zip(reversed(shape), reversed(strides), strict=True):
        found = found and (stride == expected or size <= 1)
        expected *= size
    return found or 0 in shape


def _data_offset(window: _Window, record: zipfile.ZipInfo, path: Path) -> int:
    """Where a record's bytes begin: behind a header of its own, which the archive's list does not size."""
    window.seek(record.header_offset)
    head = window.read(30)  # PKWARE APPNOTE 4.3.7
    if len(head) < 30 or not head.startswith(b"PK\x03\x04"):
        raise InputError("holds a damaged chunk", where=str(path), hint="Copy it again.")
    name_bytes, extra_bytes = struct.unpack_from("<HH", head, 26)
    start = record.header_offset + 30 + int(name_bytes) + int(extra_bytes)
    if start + record.file_size > window.length:
        raise InputError("holds a chunk that is cut off", where=str(path), hint="Copy it again.")
    return start


class _Window(io.RawIOBase):
    """A part of an open file, as a file that can only be read."""

    def __init__(self, descriptor: int, start: int, length: int) -> None:
        self._descriptor = descriptor
        self._start = start
        self.length = length
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = os.SEEK_SET, /) -> int:
        origin = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self.length}[whence]
        if origin + offset < 0:
            raise ValueError("before the first byte")
        self._position = origin + offset
        return self._position

    def readinto(self, buffer: Any, /) -> int:
        view = memoryview(buffer).cast("B")
        wanted = max(0, min(len(view), self.length - self._position))
        count = os.preadv(self._descriptor, [view[:wanted]], self._start + self._position) if wanted else 0
        self._position += count
        return count
