"""Writing weight files: any plan makes the file that the plan says, byte for byte, every time."""

from __future__ import annotations

import hashlib
import json
import os
import stat
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import safetensors
from hypothesis import given, settings
from hypothesis import strategies as st

from eagle3pack.checkpoint import writer
from eagle3pack.checkpoint.files import Checkpoint, open_checkpoint
from eagle3pack.checkpoint.header import TensorEntry, read_header
from eagle3pack.checkpoint.writer import (
    Piece,
    PlannedFile,
    PlannedTensor,
    copy_file,
    index_json,
    plan_files,
    plan_pieces,
    verify_written,
    write_file,
)
from eagle3pack.errors import ConflictError, MismatchError
from tests.checkpoint.samples import BYTES, Sample, random_tensor, tensors, write_shards, write_weights

SIZES = {"a": 5_000, "b": 7_000, "c": 3_000, "d": 20_000}


def nothing(_: PlannedTensor) -> Iterator[bytes]:
    raise AssertionError("nothing is computed here")


def unchanged(entry: TensorEntry) -> PlannedTensor:
    return PlannedTensor(entry.name, entry.dtype, entry.shape, entry)


def plan_copy(checkpoint: Checkpoint, shard_bytes: int = 10**9) -> tuple[PlannedFile, ...]:
    return plan_files([unchanged(entry) for entry in checkpoint.tensors.values()], shard_bytes)


@pytest.fixture
def source(tmp_path: Path) -> Checkpoint:
    """One file with four tensors of U8."""
    folder = tmp_path / "source"
    write_weights(
        folder / "model.safetensors",
        {name: random_tensor("U8", (size,), i) for i, (name, size) in enumerate(SIZES.items())},
        {"format": "pt", "volatile": "2026-01-01"},
    )
    return open_checkpoint(folder)


@pytest.fixture
def out(tmp_path: Path) -> Path:
    (tmp_path / "out").mkdir()
    return tmp_path / "out"


# The plan


def test_tensors_that_fit_make_one_file(source: Checkpoint) -> None:
    (file,) = plan_copy(source)
    assert file.name == "model.safetensors"
    assert [tensor.name for tensor in file.tensors] == list(SIZES)
    assert file.data_bytes == sum(SIZES.values())
    assert file.nbytes == len(file.header) + file.data_bytes


@pytest.mark.parametrize(
    ("shard_bytes", "expected"),
    [
        (35_000, [["a", "b", "c", "d"]]),
        (34_999, [["a", "b", "c"], ["d"]]),
        (15_000, [["a", "b", "c"], ["d"]]),
        (14_999, [["a", "b"], ["c"], ["d"]]),
        (1, [["a"], ["b"], ["c"], ["d"]]),
    ],
)
def test_a_shard_ends_before_it_grows_too_large(
    source: Checkpoint, shard_bytes: int, expected: list[list[str]]
) -> None:
    files = plan_copy(source, shard_bytes)
    assert [[tensor.name for tensor in file.tensors] for file in files] == expected
    if len(files) > 1:
        assert [file.name for file in files] == [
            f"model-{i + 1:05d}-of-{len(files):05d}.safetensors" for i in range(len(files))
        ]


def test_no_tensors_make_one_empty_file(out: Path) -> None:
    (file,) = plan_files([])
    write_file(file, out, nothing)
    assert open_checkpoint(out).tensors == {}


def test_the_index_lists_every_tensor_and_the_total(source: Checkpoint) -> None:
    files = plan_copy(source, 15_000)
    first, second = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
    assert json.loads(index_json(files)) == {
        "metadata": {"total_size": 35_000},
        "weight_map": {"a": first, "b": first, "c": first, "d": second},
    }


def test_neighbours_are_copied_as_one_range(source: Checkpoint) -> None:
    (file,) = plan_copy(source)
    path, start = source.tensors["a"].path, source.tensors["a"].start
    assert plan_pieces(file) == (Piece(len(file.header), 35_000, path, start),)


def test_a_computed_tensor_parts_the_ranges_around_it(source: Checkpoint) -> None:
    a, b, c, d = (unchanged(entry) for entry in source.tensors.values())
    file = PlannedFile("model.safetensors", (a, replace(b, shape=(10,), source=None), c, d))
    at, path = len(file.header), source.tensors["a"].path
    assert plan_pieces(file) == (
        Piece(at, 5_000, path, source.tensors["a"].start),
        Piece(at + 5_000, 10, tensor=file.tensors[1]),
        Piece(at + 5_010, 23_000, path, source.tensors["c"].start),
    )


def test_neighbours_in_another_order_are_not_joined(source: Checkpoint) -> None:
    a, b, _, _ = (unchanged(entry) for entry in source.tensors.values())
    assert len(plan_pieces(PlannedFile("x", (b, a)))) == 2


def test_the_header_lets_most_unchanged_bytes_lie_as_in_the_source(source: Checkpoint) -> None:
    a, b, c, d = (unchanged(entry) for entry in source.tensors.values())
    file = PlannedFile("model.safetensors", (replace(a, shape=(8,), source=None), b, c, d))
    last = plan_pieces(file)[-1]
    assert last.nbytes == 30_000 and last.source_start % 4096
    assert (last.start - last.source_start) % 4096 == 0
    assert len(file.header) % 8 == 0 and len(file.header) < 8192


def test_an_order_that_would_misalign_wide_elements_is_mended() -> None:
    mask, ids, weight = (
        PlannedTensor("t2d", "BOOL", (3,), None),
        PlannedTensor("d2t", "I64", (2,), None),
        PlannedTensor("fc.weight", "BF16", (2, 2), None),
    )
    (file,) = plan_files([mask, weight, ids])
    assert [tensor.name for tensor in file.tensors] == ["d2t", "fc.weight", "t2d"]
    packed = PlannedTensor("packed", "F6_E2M3", (4,), None)  # three bytes, which need no alignment
    (kept,) = plan_files([packed, mask, packed])
    assert [tensor.name for tensor in kept.tensors] == ["packed", "t2d", "packed"]
    (kept,) = plan_files([weight, ids, mask])
    assert [tensor.name for tensor in kept.tensors] == ["fc.weight", "d2t", "t2d"]


# The file


@given(
    given_tensors=tensors(min_size=1),
    shards=st.integers(1, 3),
    shard_bytes=st.integers(1, 2_000),
    hashing=st.booleans(),
    data=st.data(),
)
@settings(max_examples=60)
def test_any_plan_makes_the_file_that_it_says(
    tmp_path_factory: pytest.TempPathFactory,
    given_tensors: dict[str, Sample],
    shards: int,
    shard_bytes: int,
    hashing: bool,
    data: st.DataObject,
) -> None:
    """Any sharding in and out, any order, some computed: each has its bytes, for the reference too."""
    folder = tmp_path_factory.mktemp("writer")
    names = list(given_tensors)
    (folder / "source").mkdir()
    write_shards(
        folder / "source",
        {f"model-{i}.safetensors": {n: given_tensors[n] for n in names[i::shards]} for i in range(shards)},
    ) if shards < len(names) else write_weights(folder / "source" / "model.safetensors", given_tensors)
    checkpoint = open_checkpoint(folder / "source")
    computed = set(data.draw(st.lists(st.sampled_from(names), unique=True)))
    planned = [
        PlannedTensor(name, given_tensors[name][0], given_tensors[name][1], None)
        if name in computed
        else unchanged(checkpoint.tensors[name])
        for name in data.draw(st.permutations(names))
    ]

    def compute(tensor: PlannedTensor) -> Iterator[bytes]:
        content = given_tensors[tensor.name][2]
        half = len(content) // 3
        yield from (content[:half], content[half:])

    files = plan_files(planned, shard_bytes)
    (folder / "out").mkdir()
    counts: list[int] = []
    written = [write_file(f, folder / "out", compute, on_bytes=counts.append, hashing=hashing) for f in files]
    verify_written(files, folder / "out", every_byte=True)
    verify_written(files, folder / "out")
    found: dict[str, Sample] = {}
    for file in written:
        content = (folder / "out" / file.name).read_bytes()
        assert file.nbytes == len(content)
        assert file.sha256 == (hashlib.sha256(content).hexdigest() if hashing else None)
        for name, tensor in safetensors.deserialize(content):
            found[name] = (tensor["dtype"], tuple(tensor["shape"]), bytes(tensor["data"]))
    assert found == given_tensors
    assert sum(counts) == sum(file.nbytes for file in written)
    for file in written:
        for entry in read_header(folder / "out" / file.name).tensors:
            assert entry.start % BYTES[entry.dtype] == 0


def test_the_same_plan_makes_the_same_bytes_whichever_way_they_are_copied(
    source: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (file,) = plan_copy(source)
    contents = set()
    for forbidden in ((), ("copy_file_range",), ("copy_file_range", "sendfile")):
        for way in forbidden:
            monkeypatch.setattr(os, way, lambda *_: 0)
        folder = tmp_path / f"out{len(forbidden)}"
        folder.mkdir()
        write_file(file, folder, nothing)
        contents.add((folder / file.name).read_bytes())
    assert len(contents) == 1
    assert b"volatile" not in contents.pop()


def test_a_copy_of_what_the_reference_wrote_is_the_same_file(tmp_path: Path, out: Path) -> None:
    from tests.tiny import write_draft

    checkpoint = open_checkpoint(write_draft(tmp_path / "draft"))
    write_file(plan_copy(checkpoint)[0], out, nothing)
    assert (out / "model.safetensors").read_bytes() == (tmp_path / "draft/model.safetensors").read_bytes()


def test_a_copy_of_our_own_output_is_the_same_file(source: Checkpoint, tmp_path: Path, out: Path) -> None:
    a, b, c, d = (unchanged(entry) for entry in source.tensors.values())
    file = PlannedFile("model.safetensors", (replace(a, shape=(9,), source=None), b, c, d))
    write_file(file, out, lambda _: [b"123456789"])
    (tmp_path / "again").mkdir()
    write_file(plan_copy(open_checkpoint(out))[0], tmp_path / "again", nothing)
    assert (out / file.name).read_bytes() == (tmp_path / "again" / file.name).read_bytes()


def test_a_whole_file_is_copied_with_its_header(source: Checkpoint, out: Path) -> None:
    path = source.headers[0].path
    written = copy_file(path, out)
    assert (out / path.name).read_bytes() == path.read_bytes()
    assert written.sha256 == hashlib.sha256(path.read_bytes()).hexdigest()
    assert copy_file(path, out.parent, hashing=False).sha256 is None


@pytest.mark.parametrize("umask", [0o022, 0o077, 0o002])
def test_the_mode_of_a_file_follows_the_umask(source: Checkpoint, out: Path, umask: int) -> None:
    before = os.umask(umask)
    try:
        write_file(plan_copy(source)[0], out, nothing)
    finally:
        os.umask(before)
    assert stat.S_IMODE((out / "model.safetensors").stat().st_mode) == 0o666 & ~umask


def test_what_a_file_system_shares_is_not_copied(
    source: Checkpoint, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file system that shares blocks, played by a copy: what is shared is asked for once, aligned."""
    calls: list[tuple[int, int, int]] = []

    def clone(descriptor: int, start: int, target: int, target_start: int, nbytes: int) -> bool:
        calls.append((start, target_start, nbytes))
        os.pwrite(target, os.pread(descriptor, nbytes, start), target_start)
        return True

    copied: list[int] = []

    def count(*arguments: Any) -> Iterator[int]:
        copied.append(arguments[-1])
        yield from really(*arguments)

    really = writer.copy_range
    monkeypatch.setattr(writer, "clone_range", clone)
    monkeypatch.setattr(writer, "copy_range", count)
    (file,) = plan_copy(source)
    counts: list[int] = []
    written = write_file(file, out, nothing, on_bytes=counts.append)
    verify_written([file], out, every_byte=True)
    assert len(calls) == 1 and all(number % 4096 == 0 for number in calls[0])
    assert sum(copied) == 35_000 - calls[0][2] < 8192
    assert written.sha256 == hashlib.sha256((out / file.name).read_bytes()).hexdigest()
    assert sum(counts) == written.nbytes


# What can go wrong


def assert_nothing_left(out: Path) -> None:
    assert list(out.iterdir()) == []
    assert threading.active_count() == 1, "the hashing thread is still there"


@pytest.mark.parametrize("hashing", [True, False])
@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError(28, "No space left on device")])
def test_an_error_while_computing_leaves_no_file(
    source: Checkpoint, out: Path, hashing: bool, error: BaseException
) -> None:
    def compute(_: PlannedTensor) -> Iterator[bytes]:
        yield b"1"
        raise error

    a, b, _, _ = (unchanged(entry) for entry in source.tensors.values())
    with pytest.raises(type(error) if isinstance(error, OSError) else KeyboardInterrupt):
        write_file(PlannedFile("x", (b, replace(a, source=None))), out, compute, hashing=hashing)
    assert_nothing_left(out)


@pytest.mark.parametrize("blocks", [[b""], [b"12"], [b"1" * 4_999], [b"1" * 5_001]])
def test_computing_too_little_or_too_much_is_a_fault_of_the_program(
    source: Checkpoint, out: Path, blocks: list[bytes]
) -> None:
    file = PlannedFile("x", (replace(unchanged(source.tensors["a"]), source=None),))
    with pytest.raises(ValueError, match="were made of 5000"):
        write_file(file, out, lambda _: blocks)
    assert_nothing_left(out)


def test_a_source_that_became_shorter_is_a_conflict(source: Checkpoint, out: Path) -> None:
    os.truncate(source.headers[0].path, 20_000)
    with pytest.raises(ConflictError, match="shorter"):
        write_file(plan_copy(source)[0], out, nothing)
    assert_nothing_left(out)


def test_a_source_that_is_written_to_meanwhile_is_a_conflict(source: Checkpoint, out: Path) -> None:
    def compute(_: PlannedTensor) -> Iterator[bytes]:
        with source.headers[0].path.open("r+b") as file:
            file.write(b"1")
        os.utime(source.headers[0].path, ns=(1, 1))  # a coarse clock may not have moved on
        yield bytes(5_000)

    a, b, _, _ = (unchanged(entry) for entry in source.tensors.values())
    with pytest.raises(ConflictError, match="changed while it was copied"):
        write_file(PlannedFile("x", (replace(a, source=None), b)), out, compute)
    assert_nothing_left(out)


def test_an_existing_file_is_not_written_over(source: Checkpoint, out: Path) -> None:
    (out / "model.safetensors").write_text("mine")
    with pytest.raises(FileExistsError):
        write_file(plan_copy(source)[0], out, nothing)
    assert (out / "model.safetensors").read_text() == "mine"


def flip(path: Path, offset: int) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= 1
    path.write_bytes(data)


def rename(path: Path) -> None:
    path.write_bytes(path.read_bytes().replace(b'"c"', b'"x"'))


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda path: flip(path, -1), "tensor d is not the one in"),
        (lambda path: flip(path, -20_000), "tensor d is not the one in"),
        (rename, "its header is not the one"),
        (
            lambda path: path.write_bytes(path.read_bytes().replace(b'"pt"', b'"tf"')),
            "its header is not the one",
        ),
    ],
)
def test_a_file_that_is_not_as_planned_is_found_out(
    source: Checkpoint, out: Path, damage: Callable[[Path], object], reason: str
) -> None:
    files = plan_copy(source)
    write_file(files[0], out, nothing)
    verify_written(files, out)
    damage(out / "model.safetensors")
    with pytest.raises(MismatchError, match=reason):
        verify_written(files, out)


def test_every_byte_is_compared_where_that_is_asked_for(source: Checkpoint, out: Path) -> None:
    files = plan_copy(source)
    write_file(files[0], out, nothing)
    flip(out / "model.safetensors", -10_000)
    verify_written(files, out)
    with pytest.raises(MismatchError, match="tensor d"):
        verify_written(files, out, every_byte=True)


@pytest.mark.slow
def test_memory_stays_flat_whatever_the_size(tmp_path: Path) -> None:
    from eagle3pack.checkpoint.header import render_header

    head = render_header([("a", "U8", (300_000_000,)), ("b", "U8", (300_000_000,))], {"format": "pt"})
    (tmp_path / "source").mkdir()
    path = tmp_path / "source" / "model.safetensors"
    path.write_bytes(head)
    os.truncate(path, len(head) + 600_000_000)
    (tmp_path / "out").mkdir()
    code = (
        "import pathlib, re, sys\n"
        "import numpy\n"
        "from eagle3pack.checkpoint.files import open_checkpoint\n"
        "from eagle3pack.checkpoint.writer import *\n"
        "root = pathlib.Path(sys.argv[1])\n"
        "entries = open_checkpoint(root / 'source').tensors.values()\n"
        "files = plan_files([PlannedTensor(e.name, e.dtype, e.shape, e) for e in entries])\n"
        "write_file(files[0], root / 'out', None)\n"
        "peak = int(re.search(r'VmHWM:\\s+(\\d+)', open('/proc/self/status').read())[1])\n"
        "assert peak < 64_000, peak\n"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True)
