"""The cache of rows with different lengths."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from eagle3pack.engine.kv_cache import GROWTH, KeyValueCache, attention_mask

CPU = torch.device("cpu")


def token(row: int, position: int, stamp: int = 0) -> float:
    return 1 + row * 1000 + position + stamp / 16


def write(cache: KeyValueCache, first_row: int, starts: list[int], width: int, stamp: int) -> torch.Tensor:
    """Write tokens that know who they are; returns what the forward would read."""
    positions = cache.at(first_row, starts, width)
    values = [
        [token(first_row + row, int(position), stamp) for position in positions[row]]
        for row in range(len(starts))
    ]
    keys = torch.tensor(values)[:, None, :, None].expand(-1, 2, -1, 3)  # two heads of three
    read, same = cache.update(keys, keys + 0.5, layer=0)
    assert torch.equal(same, torch.where(read == 0, read, read + 0.5))
    return read


@given(st.data())
@settings(deadline=None, max_examples=50)
def test_every_query_sees_the_last_thing_written_at_each_position(data: st.DataObject) -> None:
    rows = data.draw(st.integers(1, 4))
    cache = KeyValueCache(rows, CPU)
    cache.reserve(10)
    expected: dict[tuple[int, int], float] = {}
    lengths = [0] * rows
    for stamp in range(data.draw(st.integers(1, 6))):
        first = data.draw(st.integers(0, rows - 1))
        count = data.draw(st.integers(1, rows - first))
        width = data.draw(st.integers(1, 4))
        starts = [data.draw(st.integers(0, lengths[row])) for row in range(first, first + count)]
        cache.reserve(max(starts) + width)
        read = write(cache, first, starts, width, stamp)
        assert read.shape == (count, 2, cache.length, 3)
        for row, start in zip(range(first, first + count), starts, strict=True):
            expected |= {(row, p): token(row, p, stamp) for p in range(start, start + width)}
            lengths[row] = max(lengths[row], start + width)
            for position in range(start + width):
                assert read[row - first, 0, position, 0] == pytest.approx(expected[row, position])


def test_growing_keeps_what_is_there() -> None:
    cache = KeyValueCache(2, CPU)
    cache.reserve(3)
    assert cache.num_slots == GROWTH
    before = write(cache, 0, [0, 0], 3, 1).clone()
    cache.reserve(GROWTH + 1)

    assert cache.num_slots == 2 * GROWTH
    after = write(cache, 0, [3, 3], 1, 1)
    assert torch.equal(after[:, :, :3], before)


def test_a_row_can_be_moved_into_a_gap() -> None:
    cache = KeyValueCache(3, CPU)
    cache.reserve(4)
    write(cache, 0, [0, 0, 0], 4, 0)
    cache.move_row(2, 0)

    read = write(cache, 0, [4], 1, 0)
    assert read[0, 0, :4, 0].tolist() == [token(2, p) for p in range(4)]


def test_masks_hide_the_future_and_what_a_window_leaves_behind() -> None:
    positions = torch.tensor([[2, 3], [0, 1]])

    full = attention_mask(positions, 5, torch.float32) == 0
    window = attention_mask(positions, 5, torch.float32, window=2) == 0

    assert full.int().tolist() == [[[[1, 1, 1, 0, 0], [1, 1, 1, 1, 0]]], [[[1, 0, 0, 0, 0], [1, 1, 0, 0, 0]]]]
    assert window.int().tolist() == [
        [[[0, 1, 1, 0, 0], [0, 0, 1, 1, 0]]],
        [[[1, 0, 0, 0, 0], [1, 1, 0, 0, 0]]],
    ]
