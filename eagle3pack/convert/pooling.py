"""Head pooling: the published way to start a GQA draft from an MHA one.

The key/value heads of each contiguous group are averaged (`mean`), or the first is kept (`first`); queries
and the output projection stay. Everything streams: a few rows of every head of a group at a time.

Source: Ainslie et al. 2023, arXiv:2305.13245 (mean pooling); engines map query head h to key/value head
h // (heads / key/value heads), so groups are contiguous.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

PoolMethod = Literal["mean", "first"]
Floats = npt.NDArray[np.floating[Any]]

CHUNK_BYTES = 4 << 20  # of source rows held at a time; keeps a conversion under 96 MB whatever its size


@dataclass(frozen=True, slots=True)
class GroupError:
    """How far the pooled head of one group is from the heads it stands for.

    Attributes:
        heads: ||W_h - W_g|| / ||W_h|| for every source head of the group (Frobenius norms); None where a
            head of zeros became another, or where the squares overflow.
    """

    heads: tuple[float | None, ...]


def decode(data: bytes | bytearray | memoryview, dtype: str) -> Floats:
    """Bytes of a float tensor as numbers wide enough to average.

    Args:
        data: little-endian values.
        dtype: "BF16", "F16" or "F32".

    Returns:
        float32 for the 16-bit types, float64 for F32: one step wider than the values, so that the mean is
        rounded once.
    """
    if dtype == "BF16":  # numpy has no bfloat16: its 16 bits are the upper half of a float32
        return (np.frombuffer(data, "<u2").astype("<u4") << 16).view("<f4")
    with np.errstate(invalid="ignore"):  # a signalling NaN: the caller looks for NaN itself
        return (
            np.frombuffer(data, "<f2").astype("<f4")
            if dtype == "F16"
            else np.frombuffer(data, "<f4").astype("<f8")
        )


def encode(values: Floats, dtype: str) -> bytes:
    """Finite numbers as bytes of a dtype, rounded once to the nearest, ties to even."""
    if dtype == "BF16":
        bits = np.ascontiguousarray(values, "<f4").view("<u4")
        return bytes(((bits + (0x7FFF + ((bits >> 16) & 1))) >> 16).astype("<u2"))
    return bytes(values.astype("<f2" if dtype == "F16" else "<f4"))


class GroupPooler:
    """Pool one group of heads, chunk by chunk, and measure what it loses.

    Args:
        method: "mean" or "first".
        group_size: heads in the group.
        dtype: of the weights.
    """

    def __init__(self, method: PoolMethod, group_size: int, dtype: str) -> None:
        self._method = method
        self._dtype = dtype
        self._lost = np.zeros(group_size)
        self._total = np.zeros(group_size)

    def pool(self, heads: Floats) -> bytes:
        """Pool the same rows of every head.

        Args:
            heads: (group_size, values).

        Returns:
            The pooled rows in the source dtype.

        Raises:
            FloatingPointError: NaN or infinity among the values.
        """
        if not np.isfinite(heads).all():
            raise FloatingPointError("NaN or infinity")
        pooled = heads[0] if self._method == "first" else _mean(heads)
        with np.errstate(over="ignore"):  # absurd but finite weights; their error is then not known
            for i, head in enumerate(heads):
                difference = head - pooled
                self._lost[i] += np.dot(difference, difference)
                self._total[i] += np.dot(head, head)
        return encode(pooled, self._dtype)

    def error(self) -> GroupError:
        """What was lost over all chunks so far."""
        return GroupError(tuple(_relative(*norms) for norms in zip(self._lost, self._total, strict=True)))


def _relative(lost: float, total: float) -> float | None:
    if lost == 0:
        return 0.0
    return round(float(np.sqrt(lost / total)), 6) if total > 0 and np.isfinite(lost + total) else None


def _mean(heads: Floats) -> Floats:
    """The mean over the first axis, added in head order: the same bits on every machine."""
    total: Floats = heads[0].copy()
    for head in heads[1:]:
        total += head
    total /= heads.dtype.type(len(heads))
    return total


def pool_heads(
    read: Callable[[int, int], bytes | bytearray | memoryview],
    *,
    method: PoolMethod,
    dtype: str,
    num_heads: int,
    num_groups: int,
    head_bytes: int,
    row_bytes: int,
) -> Iterator[bytes | GroupError]:
    """Pool a k_proj or v_proj (or its bias) in bounded memory.

    Args:
        read: (offset, nbytes) within the tensor -> its bytes.
        method: "mean" or "first".
        dtype: of the tensor.
        num_heads: source key/value heads, a multiple of num_groups.
        num_groups: key/value heads to make.
        head_bytes: bytes of one head: head_dim * in_features * itemsize, or head_dim * itemsize of a bias.
        row_bytes: bytes of one row: in_features * itemsize, or itemsize.

    Yields:
        The pooled bytes in order, and after each group its GroupError.

    Raises:
        FloatingPointError: NaN or infinity among the values.
    """
    group = num_heads // num_groups
    rows = max(CHUNK_BYTES // (group * row_bytes), 1)
    for first_head in range(0, num_heads, group):
        pooler = GroupPooler(method, group, dtype)
        for offset in range(0, head_bytes, rows * row_bytes):
            nbytes = min(rows * row_bytes, head_bytes - offset)
            chunks = [
                decode(read((first_head + i) * head_bytes + offset, nbytes), dtype) for i in range(group)
            ]
            yield pooler.pool(np.stack(chunks))
        yield pooler.error()
