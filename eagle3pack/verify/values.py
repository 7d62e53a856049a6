"""The float types of safetensors as numpy reads them; bfloat16, which numpy lacks, by its bits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

Array = np.ndarray[Any, np.dtype[Any]]


@dataclass(frozen=True, slots=True)
class FloatKind:
    """How a float type lies in its bits.

    Attributes:
        bits: the unsigned integer of its width.
        magnitude: mask of all bits but the sign.
        infinity: the bits of +infinity.
    """

    bits: type[np.unsignedinteger[Any]]
    magnitude: int
    infinity: int


FLOATS: Mapping[str, FloatKind] = {
    "BF16": FloatKind(np.uint16, 0x7FFF, 0x7F80),
    "F16": FloatKind(np.uint16, 0x7FFF, 0x7C00),
    "F32": FloatKind(np.uint32, 0x7FFFFFFF, 0x7F800000),
    "F64": FloatKind(np.uint64, 0x7FFFFFFFFFFFFFFF, 0x7FF0000000000000),
}

# Types in which producers store d2t and t2d.
MAP_DTYPES: Mapping[str, str] = {
    "I64": "<i8",
    "I32": "<i4",
    "I16": "<i2",
    "I8": "i1",
    "U8": "u1",
    "U16": "<u2",
    "U32": "<u4",
    "U64": "<u8",
    "BOOL": "?",
}


def to_float32(data: bytes | memoryview, dtype: str) -> Array:
    """Values as float32, one axis; F64 is rounded, and overflows to infinity.

    Args:
        data: the bytes of a tensor or of some of its rows.
        dtype: one of `FLOATS`.
    """
    if dtype == "BF16":
        return (np.frombuffer(data, "<u2").astype(np.uint32) << 16).view(np.float32)
    with np.errstate(over="ignore"):
        return np.frombuffer(data, {"F16": "<f2", "F32": "<f4", "F64": "<f8"}[dtype]).astype(np.float32)


def cosine(one: Array, other: Array) -> Array:
    """Cosine of each row with the row of the same index; 0 where one of them is zero or not finite."""
    one, other = np.nan_to_num(one), np.nan_to_num(other)
    norms = np.linalg.norm(one, axis=-1) * np.linalg.norm(other, axis=-1)
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        return np.nan_to_num(np.where(norms > 0, (one * other).sum(axis=-1) / norms, 0.0))
