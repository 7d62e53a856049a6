"""Weights that torch.distributed.checkpoint wrote: the folders that TorchSpec's FSDP trainer saves.

Such a folder holds `.metadata`, a pickle that says where every chunk of every tensor lies, and `*.distcp`
files in which each chunk is a zip archive as torch.save writes it, uncompressed. Both are read here
without torch and without running anything in them (see `inert`). A tensor that one chunk holds is a run
of bytes in its file like any other tensor, and is streamed; one that FSDP cut along its first dimension
is put together when it is asked for, one tensor at a time.

Source: torch 2.13 torch/distributed/checkpoint/{metadata,filesystem}.py and torch/serialization.py.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from eagle3pack.checkpoint.archive import find_values, is_shape
from eagle3pack.checkpoint.files import Checkpoint
from eagle3pack.checkpoint.header import (
    DTYPE_BITS,
    TORCH_DTYPES,
    Header,
    TensorEntry,
    is_tensor_name,
    tensor_bytes,
)
from eagle3pack.checkpoint.inert import Inert, inert, read_inert
from eagle3pack.checkpoint.opening import opened
from eagle3pack.documents import describe
from eagle3pack.errors import InputError

METADATA_FILE = ".metadata"
MODEL_FOLDER = "model"  # beside optimizer/ and lr_scheduler/ in an iteration of TorchSpec
TRACKER_FILE = "latest_checkpointed_iteration.txt"
DRAFT_PREFIX = "draft_model."  # TorchSpec's Eagle3Model holds the draft under this name
_MAX_METADATA_BYTES = 64 << 20
_CLASSES = (
    "Metadata",
    "TensorStorageMetadata",
    "BytesStorageMetadata",
    "ChunkStorageMetadata",
    "TensorProperties",
    "MetadataIndex",
    "StorageMeta",
    "_MEM_FORMAT_ENCODING",
)
_METADATA_NAMES: Mapping[tuple[str, str], Any] = {
    **{("torch.distributed.checkpoint.metadata", name): inert(name) for name in _CLASSES},
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"): inert("_StorageInfo"),
    ("torch.serialization", "_get_layout"): inert("layout"),
    ("torch", "Size"): tuple,
    **{("torch", name): dtype for name, dtype in TORCH_DTYPES.items()},
    ("collections", "OrderedDict"): dict,
    **{
        (module, name): inert("path")  # the folder that it was saved to, which nobody needs
        for module in ("pathlib", "pathlib._local")
        for name in ("PosixPath", "PurePosixPath", "WindowsPath", "PureWindowsPath")
    },
}


def model_folder(folder: Path) -> Path | None:
    """Where the model's weights are in a folder that a trainer saved; None where it is no such folder.

    Raises:
        InputError: it is the run's folder, which holds many iterations.
    """
    for place in (folder / MODEL_FOLDER, folder):
        if (place / METADATA_FILE).is_file():
            return place
    if (folder / TRACKER_FILE).is_file():
        raise InputError(
            "holds the checkpoints of a training run",
            where=str(folder),
            hint=f"Give one of them, such as {_latest(folder)}.",
        )
    return None


def _latest(folder: Path) -> Path:
    text = (folder / TRACKER_FILE).read_text("utf-8", errors="replace").strip()
    return folder / (f"iter_{int(text):07d}" if text.isdecimal() and len(text) < 10 else "iter_0001000")


def open_distributed(folder: Path) -> Checkpoint:
    """Open the draft's tensors of a checkpoint; optimizer state and other modules are left out.

    Args:
        folder: holds `.metadata`; see `model_folder`.

    Raises:
        InputError: it is damaged or incomplete, holds no draft, or asks for anything but weights.
        PermissionDenied: something may not be read.
    """
    metadata_path = folder / METADATA_FILE
    metadata = read_inert(_read_small(metadata_path, _MAX_METADATA_BYTES), _METADATA_NAMES, metadata_path)
    tensors, chunks = _tables(metadata, metadata_path)
    assembly = _Assembly()
    entries: dict[str, TensorEntry] = {}
    paths: set[Path] = set()
    for name, described in tensors.items():
        located = _locate(name, described, chunks, folder)
        paths |= {part.path for part in located.parts}
        entry = located.entry(assembly)
        if entry.name in entries:
            raise InputError(f"holds two tensors {describe(entry.name)}", where=str(metadata_path))
        entries[entry.name] = entry
    if not entries:
        raise InputError(
            f"holds no draft: no tensor's name contains {DRAFT_PREFIX}",
            where=str(metadata_path),
            hint="Give an iteration folder of TorchSpec; its model/ holds the draft.",
        )
    headers = tuple(
        Header(
            path,
            tuple(entry for entry in entries.values() if entry.path == path),
            {},
            0,
            path.stat().st_size,
        )
        for path in sorted(paths)
    )
    return Checkpoint(folder, headers, entries)


def _read_small(path: Path, limit: int) -> bytes:
    with opened(path) as descriptor:
        size = os.fstat(descriptor).st_size
        if size > limit:
            raise InputError(f"is {size:,} bytes, more than any checkpoint's", where=str(path))
        return os.pread(descriptor, size, 0)


_Chunks = Mapping[tuple[str, tuple[int, ...]], Inert]


def _tables(metadata: Any, path: Path) -> tuple[dict[str, Inert], _Chunks]:
    """The draft's tensors by their full name, and the place of every chunk by (full name, offset)."""
    described = metadata.field("state_dict_metadata") if isinstance(metadata, Inert) else None
    stored = metadata.field("storage_data") if isinstance(metadata, Inert) else None
    if not isinstance(described, dict) or not isinstance(stored, dict):
        raise InputError("is not the metadata of a torch.distributed.checkpoint", where=str(path))
    tensors = {
        name: value
        for name, value in described.items()
        if isinstance(name, str)
        and DRAFT_PREFIX in name
        and isinstance(value, Inert)
        and value.kind == "TensorStorageMetadata"
    }
    chunks = {
        (index.field("fqn"), index.field("offset") or ()): info
        for index, info in stored.items()
        if isinstance(index, Inert)
        and isinstance(index.field("fqn"), str)
        and is_shape(index.field("offset") or ())
        and isinstance(info, Inert)
    }
    return tensors, chunks


@dataclass(frozen=True, slots=True)
class _Part:
    """The bytes of some rows of a tensor.

    Attributes:
        path: the file.
        start: offset of the first byte in it.
        nbytes: how many.
    """

    path: Path
    start: int
    nbytes: int


@dataclass
class _Assembly:
    """The last tensor that was put together of its parts: it is read in blocks, and one fits in memory."""

    name: str = ""
    data: memoryview = field(default_factory=lambda: memoryview(b""))

    def read(self, name: str, parts: tuple[_Part, ...]) -> memoryview:
        if name != self.name:
            self.name, self.data = "", memoryview(b"")  # let the one before go first
            data, position = memoryview(bytearray(sum(part.nbytes for part in parts))), 0
            for part in parts:
                _read_part(part, data[position : position + part.nbytes])
                position += part.nbytes
            self.name, self.data = name, data
        return self.data


def _read_part(part: _Part, buffer: memoryview) -> None:
    filled = 0
    with opened(part.path) as descriptor:
        while filled < part.nbytes:  # one call reads at most 2 GiB
            count = os.preadv(descriptor, [buffer[filled:]], part.start + filled)
            if count == 0:
                raise InputError("became shorter while it was read", where=str(part.path))
            filled += count


@dataclass(frozen=True, slots=True)
class _Located:
    """A tensor and where its rows are, in order."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    parts: tuple[_Part, ...]

    def entry(self, assembly: _Assembly) -> TensorEntry:
        nbytes = tensor_bytes(self.dtype, self.shape)
        first = self.parts[0]
        if len(self.parts) == 1:
            return TensorEntry(self.name, self.dtype, self.shape, first.path, first.start, nbytes)
        values = partial(assembly.read, self.name, self.parts)
        return TensorEntry(self.name, self.dtype, self.shape, first.path, 0, nbytes, values)


def _locate(full_name: str, described: Inert, chunks: _Chunks, folder: Path) -> _Located:
    """Find the bytes of a tensor.

    Raises:
        InputError: chunks are missing, or the tensor is cut otherwise than into runs of rows.
    """
    where = f"{folder / METADATA_FILE}: {describe(full_name)}"
    name = full_name.rsplit(DRAFT_PREFIX, 1)[-1]
    properties, shape = described.field("properties"), described.field("size")
    dtype = _dtype(properties)
    if not name or not is_tensor_name(name) or not is_shape(shape) or dtype not in DTYPE_BITS:
        raise InputError(f"is described as {describe(dtype)} of shape {describe(shape)}", where=where)
    boxes = list(_rows(described.field("chunks"), shape, where))
    filled = [(offset, sizes) for offset, sizes in boxes if 0 not in sizes] or boxes[:1]
    parts: list[_Part] = []
    for offset, sizes in filled:
        info = chunks.get((full_name, offset))
        if info is None:
            raise InputError(f"has no data for the chunk at {list(offset)}", where=where)
        parts.append(_stored(info, folder, dtype, sizes, where))
    return _Located(name, dtype, shape, tuple(parts))


def _dtype(properties: Any) -> str:
    state = properties.state if isinstance(properties, Inert) else None
    return state[0] if isinstance(state, tuple) and state and isinstance(state[0], str) else "unknown"


def _rows(
    chunks: Any, shape: tuple[int, ...], where: str
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """(offset, sizes) of the chunks of a tensor, by rows; they must follow each other without holes."""
    boxes = [
        (chunk.field("offsets"), chunk.field("sizes"))
        for chunk in (chunks if isinstance(chunks, list) else [])
        if isinstance(chunk, Inert)
    ]
    if not boxes or not all(is_shape(x) and len(x) == len(shape) for box in boxes for x in box):
        raise InputError("has no chunks, or some of another dimension", where=where)
    boxes.sort()
    end, follow = 0, bool(shape) or len(boxes) == 1
    for offset, sizes in boxes:
        follow = follow and offset[:1] == (end,)[: len(shape)] and not any(offset[1:])
        follow = follow and sizes[1:] == shape[1:]
        end += sizes[0] if shape else 0
    if not follow or (end,)[: len(shape)] != shape[:1]:
        raise InputError(
            "is not cut into runs of rows that follow each other",
            where=where,
            hint="Export it with the trainer's own tool, such as TorchSpec's tools/convert_to_hf.py.",
        )
    yield from boxes


def _stored(info: Inert, folder: Path, dtype: str, sizes: tuple[int, ...], where: str) -> _Part:
    """Where the bytes of a chunk lie in its file."""
    file, offset, length = (info.field(key) for key in ("relative_path", "offset", "length"))
    if not isinstance(file, str) or "/" in file or "\\" in file or file.startswith(".") or not file:
        raise InputError(f"is said to be in {describe(file)}, expected a file beside it", where=where)
    if info.field("transform_descriptors"):
        raise InputError("is stored compressed or encrypted", where=where)
    path = folder / file
    with opened(path) as descriptor:
        size = os.fstat(descriptor).st_size
        if type(offset) is not int or type(length) is not int or not 0 <= offset <= offset + length <= size:
            raise InputError(
                f"is truncated: its {size:,} bytes do not hold {describe(length)} at {describe(offset)}",
                where=str(path),
                hint="Copy the checkpoint again.",
            )
        start = offset + find_values(descriptor, offset, length, dtype, sizes, path)
    return _Part(path, start, tensor_bytes(dtype, sizes))
