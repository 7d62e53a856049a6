from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from eagle3pack.convert import pooling
from eagle3pack.convert.pooling import GroupError, PoolMethod, decode, encode, pool_heads

TORCH = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}
ITEMSIZE = {"BF16": 2, "F16": 2, "F32": 4}
dtypes = st.sampled_from(sorted(TORCH))


def tensor(data: bytes, dtype: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=TORCH[dtype])


def pool(
    weight: torch.Tensor, dtype: str, heads: int, groups: int, method: PoolMethod = "mean"
) -> tuple[torch.Tensor, list[GroupError]]:
    """Pool a (heads * head_dim, inputs) weight or a (heads * head_dim,) bias."""
    data = weight.contiguous().view(torch.uint8).numpy().tobytes()
    row = ITEMSIZE[dtype] * (weight.shape[1] if weight.dim() == 2 else 1)
    parts = list(
        pool_heads(
            lambda offset, nbytes: data[offset : offset + nbytes],
            method=method,
            dtype=dtype,
            num_heads=heads,
            num_groups=groups,
            head_bytes=len(data) // heads,
            row_bytes=row,
        )
    )
    pooled = tensor(b"".join(part for part in parts if isinstance(part, bytes)), dtype)
    errors = [part for part in parts if isinstance(part, GroupError)]
    return pooled.reshape(-1, *weight.shape[1:]), errors


@given(st.binary(min_size=8, max_size=256).filter(lambda data: len(data) % 4 == 0), dtypes)
def test_decoding_and_encoding_are_exact_on_every_finite_value(data: bytes, dtype: str) -> None:
    values = decode(data, dtype)
    finite = np.isfinite(values)
    again = np.frombuffer(encode(np.where(finite, values, 0), dtype), np.uint8).reshape(len(values), -1)
    assert (again[finite] == np.frombuffer(data, np.uint8).reshape(len(values), -1)[finite]).all()
    expected = tensor(data, dtype).to(torch.float64).numpy()
    assert np.array_equal(np.where(finite, values, 0), np.where(finite, expected, 0))
    assert np.array_equal(finite, np.isfinite(expected))


@given(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1, max_size=50))
def test_rounding_to_bfloat16_is_torchs(values: list[float]) -> None:
    wide = np.array(values, dtype="<f4")
    assert encode(wide, "BF16") == torch.from_numpy(wide).bfloat16().view(torch.uint8).numpy().tobytes()


shapes = st.tuples(
    st.integers(1, 4), st.integers(1, 5), st.sampled_from([2, 4, 6]), st.integers(0, 9)
)  # groups, heads a group, head_dim, inputs (0: a bias)


def random_weight(shape: tuple[int, int, int, int], dtype: str, seed: int) -> torch.Tensor:
    groups, size, depth, inputs = shape
    rows = groups * size * depth
    weight = torch.randn((rows, inputs) if inputs else (rows,), generator=torch.Generator().manual_seed(seed))
    return weight.to(TORCH[dtype])


@given(shapes, dtypes, st.integers(0, 1000))
def test_the_mean_is_the_one_users_know(shape: tuple[int, int, int, int], dtype: str, seed: int) -> None:
    weight = random_weight(shape, dtype, seed)
    groups, size, depth, _ = shape
    pooled, _ = pool(weight, dtype, groups * size, groups)
    wide = torch.float64 if dtype == "F32" else torch.float32
    heads = weight.to(wide).reshape(groups, size, depth, -1)
    total = heads[:, 0].clone()
    for i in range(1, size):
        total += heads[:, i]
    assert torch.equal(pooled.reshape(groups, depth, -1), (total / size).to(TORCH[dtype]))


@given(shapes, dtypes, st.integers(0, 1000))
def test_equal_heads_are_pooled_exactly(shape: tuple[int, int, int, int], dtype: str, seed: int) -> None:
    groups, size, depth, inputs = shape
    kept = random_weight((groups, 1, depth, inputs), dtype, seed)
    repeated = kept.reshape(groups, 1, depth, -1).repeat(1, size, 1, 1).reshape(-1, *kept.shape[1:])
    pooled, errors = pool(repeated, dtype, groups * size, groups)
    assert torch.equal(pooled, kept)
    assert all(error == 0 for group in errors for error in group.heads)


@given(shapes, st.integers(0, 1000))
def test_pooling_commutes_with_rope(shape: tuple[int, int, int, int], seed: int) -> None:
    """Every key head turns by the same angles, so that pooled keys turn as their mean does.

    Tolerance: float32 weights, pooled in float64 and rounded once to float32 (2**-24 relative).
    """
    groups, size, depth, inputs = shape
    weight = random_weight((groups, size, depth, max(inputs, 1)), "F32", seed)

    def rotated(rows: torch.Tensor, position: float) -> torch.Tensor:
        pairs = rows.double().reshape(-1, 2, depth // 2, rows.shape[1])  # half-split pairing
        angles = position * 10000.0 ** (-torch.arange(depth // 2, dtype=torch.float64) * 2 / depth)
        cos, sin = angles.cos()[:, None], angles.sin()[:, None]
        return torch.stack(
            [pairs[:, 0] * cos - pairs[:, 1] * sin, pairs[:, 1] * cos + pairs[:, 0] * sin], 1
        ).reshape(rows.shape)

    pooled, _ = pool(weight, "F32", groups * size, groups)
    rotated_then_pooled = rotated(weight, 7.0).reshape(groups, size, depth, -1).mean(1).reshape(pooled.shape)
    torch.testing.assert_close(rotated(pooled, 7.0), rotated_then_pooled, rtol=1e-6, atol=1e-6)


@given(shapes, dtypes, st.integers(0, 1000))
def test_relative_errors_are_what_they_say(shape: tuple[int, int, int, int], dtype: str, seed: int) -> None:
    """Tolerance: sums of up to 54 squares in float32."""
    groups, size, _, _ = shape
    weight = random_weight(shape, dtype, seed)
    pooled, errors = pool(weight, dtype, groups * size, groups, "first")
    heads = weight.double().reshape(groups, size, -1)
    for g, group in enumerate(errors):
        kept = pooled.double().reshape(groups, -1)[g]
        for i, error in enumerate(group.heads):
            expected = (heads[g, i] - kept).norm() / heads[g, i].norm()
            assert error is None or error == pytest.approx(float(expected), rel=1e-4)
        assert group.heads[0] == 0


def test_chunks_do_not_change_a_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = random_weight((2, 4, 6, 9), "BF16", 0)
    whole, errors = pool(weight, "BF16", 8, 2)
    monkeypatch.setattr(pooling, "CHUNK_BYTES", 1)
    parts, again = pool(weight, "BF16", 8, 2)
    assert torch.equal(whole, parts)
    for a, b in zip(errors, again, strict=True):
        assert a.heads == pytest.approx(b.heads)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_nan_and_infinity_are_an_error(value: float) -> None:
    weight = random_weight((2, 2, 2, 3), "BF16", 0)
    weight[5, 1] = value
    with pytest.raises(FloatingPointError):
        pool(weight, "BF16", 4, 2)


def test_a_head_of_zeros_that_became_another_has_no_relative_error() -> None:
    weight = torch.ones(4, 3)
    weight[:2] = 0
    _, errors = pool(weight, "F32", 2, 1)
    assert errors == [GroupError((None, 0.5))]
