"""Copying ranges: whichever way the system offers, the same bytes arrive."""

from __future__ import annotations

import errno
import os
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eagle3pack.checkpoint import copying, kernel
from eagle3pack.checkpoint.copying import copy_range, shareable
from eagle3pack.checkpoint.kernel import begin_writeback, clone_range, reserve
from eagle3pack.errors import ConflictError

DATA = bytes(range(256)) * 40
WAYS = ("copy_file_range", "sendfile")


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[tuple[int, int]]:
    """Descriptors of a source that holds DATA and of an empty target."""
    (tmp_path / "source").write_bytes(DATA)
    source = os.open(tmp_path / "source", os.O_RDONLY)
    target = os.open(tmp_path / "target", os.O_RDWR | os.O_CREAT)
    yield source, target
    os.close(source)
    os.close(target)


def copied(pair: tuple[int, int], source_start: int, target_start: int, nbytes: int) -> bytes:
    source, target = pair
    counts = list(copy_range(source, source_start, target, target_start, nbytes))
    assert sum(counts) == nbytes and all(counts)
    assert os.fstat(target).st_size in (0, target_start + nbytes)
    return os.pread(target, nbytes + 1, target_start)


def fail_with(code: int) -> Callable[..., int]:
    def fail(*_: Any) -> int:
        raise OSError(code, os.strerror(code))

    return fail


def forbid(monkeypatch: pytest.MonkeyPatch, ways: tuple[str, ...]) -> None:
    for way in ways:
        monkeypatch.setattr(os, way, fail_with(errno.ENOSYS))


@pytest.mark.parametrize(
    "forbidden", [(), ("copy_file_range",), WAYS], ids=lambda ways: "+".join(ways) or "none"
)
def test_every_way_copies_the_same_bytes(
    pair: tuple[int, int], monkeypatch: pytest.MonkeyPatch, forbidden: tuple[str, ...]
) -> None:
    forbid(monkeypatch, forbidden)
    assert copied(pair, 13, 7, 9_000) == DATA[13:9_013]


@pytest.mark.parametrize("code", copying._UNSUPPORTED, ids=errno.errorcode.get)
@pytest.mark.parametrize("way", WAYS)
def test_a_way_that_cannot_gives_place_to_the_next(
    pair: tuple[int, int], monkeypatch: pytest.MonkeyPatch, way: str, code: int
) -> None:
    forbid(monkeypatch, WAYS[: WAYS.index(way)])
    monkeypatch.setattr(os, way, fail_with(code))
    assert copied(pair, 1, 0, len(DATA) - 1) == DATA[1:]


@pytest.mark.parametrize("forbidden", [(), ("copy_file_range",), WAYS], ids=len)
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO])
def test_an_error_of_the_disk_is_not_tried_around(
    pair: tuple[int, int], monkeypatch: pytest.MonkeyPatch, forbidden: tuple[str, ...], code: int
) -> None:
    forbid(monkeypatch, forbidden)
    monkeypatch.setattr(os, (*WAYS, "pwrite")[len(forbidden)], fail_with(code))
    with pytest.raises(OSError) as caught:
        copied(pair, 0, 0, len(DATA))
    assert caught.value.errno == code


def test_a_way_that_fails_half_way_leaves_the_rest_to_the_next(
    pair: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    really, calls = os.copy_file_range, []

    def twice(source: int, target: int, count: int, offset: int, target_offset: int) -> int:
        calls.append(count)
        if len(calls) > 2:
            raise OSError(errno.EXDEV, "")
        return really(source, target, min(count, 1000), offset, target_offset)

    monkeypatch.setattr(os, "copy_file_range", twice)
    assert copied(pair, 0, 0, len(DATA)) == DATA
    assert calls == [len(DATA), len(DATA) - 1000, len(DATA) - 2000]


@pytest.mark.parametrize("forbidden", [(), ("copy_file_range",), WAYS], ids=len)
def test_short_copies_are_made_up_for(
    pair: tuple[int, int], monkeypatch: pytest.MonkeyPatch, forbidden: tuple[str, ...]
) -> None:
    forbid(monkeypatch, forbidden)
    monkeypatch.setattr(copying, "CHUNK_BYTES", 999)
    monkeypatch.setattr(copying, "_BUFFER_BYTES", 77)
    assert copied(pair, 5, 0, 10_000) == DATA[5:10_005]


def test_a_file_system_that_answers_zero_is_tried_in_another_way(
    pair: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "copy_file_range", lambda *_: 0)
    monkeypatch.setattr(os, "sendfile", lambda *_: 0)
    assert copied(pair, 0, 0, len(DATA)) == DATA


@pytest.mark.parametrize("forbidden", [(), ("copy_file_range",), WAYS], ids=len)
def test_a_source_that_ends_early_is_an_error(
    pair: tuple[int, int], monkeypatch: pytest.MonkeyPatch, forbidden: tuple[str, ...]
) -> None:
    forbid(monkeypatch, forbidden)
    with pytest.raises(ConflictError, match="1 bytes shorter"):
        copied(pair, 0, 0, len(DATA) + 1)


@given(st.integers(0, 20_000), st.integers(0, 20_000), st.integers(0, 50_000))
def test_the_shared_middle_is_whole_blocks_and_as_large_as_can_be(
    source_start: int, target_start: int, nbytes: int
) -> None:
    offset, shared = shareable(source_start, target_start, nbytes)
    possible = {
        (start, end)
        for start in range(-source_start % 4096, nbytes + 1, 4096)
        for end in range(start + 4096, nbytes + 1, 4096)
        if (target_start + start) % 4096 == 0
    }
    if not possible:
        assert (offset, shared) == (0, 0)
    else:
        assert (offset, offset + shared) == max(possible, key=lambda range_: range_[1] - range_[0])


def test_sharing_asks_the_kernel_for_just_that_range(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[int, int, tuple[int, ...]]] = []
    monkeypatch.setattr(
        kernel.fcntl, "ioctl", lambda fd, code, data: calls.append((fd, code, struct.unpack("=qQQQ", data)))
    )
    assert clone_range(3, 4096, 4, 8192, 12_288)
    # struct file_clone_range of linux/fs.h: source descriptor, source offset, length, target offset.
    assert calls == [(4, 0x4020940D, (3, 4096, 12_288, 8192))]


def test_sharing_that_is_refused_is_not_an_error(
    pair: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernel.fcntl, "ioctl", fail_with(errno.EOPNOTSUPP))
    assert not clone_range(pair[0], 0, pair[1], 0, 4096)


def test_space_is_reserved_where_the_system_can(pair: tuple[int, int]) -> None:
    if reserve(pair[1], 0, 1_000_000):
        assert os.fstat(pair[1]).st_blocks * 512 >= 1_000_000
    assert not reserve(-1, 0, 1)
    assert reserve(pair[1], 0, 0)


@pytest.mark.parametrize("code", kernel.DISK_FULL)
def test_space_that_is_not_there_is_an_error(monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    monkeypatch.setattr(kernel, "_call", lambda *_: code)
    with pytest.raises(OSError) as caught:
        reserve(3, 0, 1)
    assert caught.value.errno == code


def test_a_c_library_without_these_calls_can_do_without(
    pair: tuple[int, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernel, "_function", lambda *_: None)
    assert not reserve(pair[1], 0, 1)
    assert not begin_writeback(pair[1], 0, 1)
    assert not kernel.exchange(tmp_path / "source", tmp_path / "target")
