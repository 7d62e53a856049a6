"""Weight files for the tests of the format, put together without the code under test or torch."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import strategies as st

Sample = tuple[str, tuple[int, ...], bytes]  # dtype, shape, bytes

BYTES = {
    "BOOL": 1,
    "U8": 1,
    "I8": 1,
    "F8_E4M3": 1,
    "F16": 2,
    "BF16": 2,
    "F32": 4,
    "I32": 4,
    "I64": 8,
    "F64": 8,
}


def assemble(header: Any, data: bytes = b"") -> bytes:
    """A file with any header, sound or not: JSON text as it is, anything else as JSON."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def describe(tensors: Mapping[str, Sample]) -> dict[str, Any]:
    """The header of some tensors, in their order."""
    header: dict[str, Any] = {}
    offset = 0
    for name, (dtype, shape, data) in tensors.items():
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [offset, offset + len(data)]}
        offset += len(data)
    return header


def file_bytes(tensors: Mapping[str, Sample], metadata: Mapping[str, str] | None = None) -> bytes:
    """A sound file, its data aligned to 8 bytes as usual."""
    header = {"__metadata__": dict(metadata)} if metadata else {}
    text = json.dumps(header | describe(tensors)).encode()
    return assemble(text + b" " * (-len(text) % 8), b"".join(data for _, _, data in tensors.values()))


def write_weights(
    path: Path, tensors: Mapping[str, Sample], metadata: Mapping[str, str] | None = None
) -> None:
    """Write a sound file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(file_bytes(tensors, metadata))


def write_shards(folder: Path, shards: Mapping[str, Mapping[str, Sample]], **index: Any) -> None:
    """Write several files and their index; keywords replace the index's keys."""
    for file, tensors in shards.items():
        write_weights(folder / file, tensors)
    document = {
        "metadata": {"total_size": sum(len(t[2]) for shard in shards.values() for t in shard.values())},
        "weight_map": {name: file for file, tensors in shards.items() for name in tensors},
    } | index
    (folder / "model.safetensors.index.json").write_text(json.dumps(document))


def random_tensor(dtype: str, shape: tuple[int, ...], seed: int = 0) -> Sample:
    """A tensor of random bytes (zeros and ones for BOOL)."""
    rng = np.random.default_rng(seed)
    size = math.prod(shape) * BYTES[dtype]
    high = 2 if dtype == "BOOL" else 256
    return dtype, shape, rng.integers(0, high, size, dtype=np.uint8).tobytes()


NAMES = st.text(st.characters(exclude_categories=["Cs"]), max_size=12).filter(
    lambda name: name != "__metadata__"
)
SHAPES = st.lists(st.integers(0, 5), max_size=3).map(tuple)


@st.composite
def tensors(draw: st.DrawFn, min_size: int = 0, max_size: int = 6) -> dict[str, Sample]:
    """Tensors of any name, dtype and shape."""
    names = draw(st.lists(NAMES, min_size=min_size, max_size=max_size, unique=True))
    return {
        name: random_tensor(draw(st.sampled_from(list(BYTES))), draw(SHAPES), draw(st.integers(0, 99)))
        for name in names
    }
