"""Reading tensors in blocks, and comparing them, in bounded memory."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eagle3pack.checkpoint.header import TensorEntry, read_header
from eagle3pack.checkpoint.reading import iter_blocks, read_part, read_tensor, same_bytes
from eagle3pack.errors import InputError
from tests.checkpoint.samples import random_tensor, write_weights


@pytest.fixture(scope="module")
def entries(tmp_path_factory: pytest.TempPathFactory) -> dict[str, TensorEntry]:
    path = tmp_path_factory.mktemp("reading") / "model.safetensors"
    write_weights(
        path,
        {"odd": random_tensor("U8", (3,)), "a": random_tensor("F32", (7, 11)), "none": ("F32", (0, 4), b"")},
    )
    return {entry.name: entry for entry in read_header(path).tensors}


def in_memory(entry: TensorEntry) -> TensorEntry:
    """The same tensor as a pickle gives it."""
    values = memoryview(bytes(read_tensor(entry)))
    return TensorEntry(entry.name, entry.dtype, entry.shape, entry.path, 0, entry.nbytes, lambda: values)


@given(block_bytes=st.integers(1, 400), from_memory=st.booleans())
def test_blocks_put_together_are_the_tensor(
    entries: dict[str, TensorEntry], block_bytes: int, from_memory: bool
) -> None:
    _, _, expected = random_tensor("F32", (7, 11))
    entry = in_memory(entries["a"]) if from_memory else entries["a"]
    blocks = [bytes(block) for block in iter_blocks(entry, block_bytes)]
    assert b"".join(blocks) == expected == bytes(read_tensor(entry))
    assert all(len(block) == block_bytes for block in blocks[:-1])


@given(st.data())
def test_a_part_is_that_part(entries: dict[str, TensorEntry], data: st.DataObject) -> None:
    entry = entries["a"]
    whole = bytes(read_tensor(entry))
    offset = data.draw(st.integers(0, entry.nbytes))
    nbytes = data.draw(st.integers(0, entry.nbytes - offset))
    assert bytes(read_part(entry, offset, nbytes)) == whole[offset : offset + nbytes]
    assert bytes(read_part(in_memory(entry), offset, nbytes)) == whole[offset : offset + nbytes]


def test_an_empty_tensor_has_no_blocks(entries: dict[str, TensorEntry]) -> None:
    assert list(iter_blocks(entries["none"])) == []
    assert bytes(read_tensor(entries["none"])) == b""


def test_blocks_share_one_buffer(entries: dict[str, TensorEntry]) -> None:
    assert len({id(block.obj) for block in iter_blocks(entries["a"], 16)}) == 1


def test_short_reads_are_made_up_for(
    entries: dict[str, TensorEntry], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, preadv = bytes(read_tensor(entries["a"])), os.preadv
    monkeypatch.setattr(os, "preadv", lambda fd, buffers, offset: preadv(fd, [buffers[0][:5]], offset))
    assert bytes(read_tensor(entries["a"])) == whole


def test_a_file_that_becomes_shorter_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    write_weights(path, {"a": random_tensor("U8", (100,))})
    (entry,) = read_header(path).tensors
    os.truncate(path, entry.end - 1)
    with pytest.raises(InputError, match="ends within tensor a"):
        read_tensor(entry)


def test_bytes_are_compared_whole(tmp_path: Path) -> None:
    dtype, _shape, data = random_tensor("U8", (3_000_000,))
    paths = [tmp_path / name for name in ("one", "same", "middle", "shorter")]
    changed = bytearray(data)
    changed[1_500_000] ^= 1
    for path, content in zip(paths, (data, data, bytes(changed), data[:-1]), strict=True):
        write_weights(path, {"a": (dtype, (len(content),), content)})
    one, same, middle, shorter = (read_header(path).tensors[0] for path in paths)
    assert same_bytes(one, same)
    assert not same_bytes(one, middle)
    assert not same_bytes(one, shorter)
