"""The header of a safetensors file: byte literals, and the reference reader as the oracle."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import safetensors
from hypothesis import example, given, settings
from hypothesis import strategies as st

from eagle3pack.checkpoint.header import (
    DTYPE_BITS,
    MAX_HEADER_BYTES,
    TensorEntry,
    parse_header,
    read_header,
    render_header,
    tensor_bytes,
)
from eagle3pack.errors import InputError, PermissionDenied
from tests.checkpoint.samples import BYTES, NAMES, SHAPES, Sample, assemble, describe, file_bytes, tensors
from tests.tiny import write_tensors

PATH = Path("model.safetensors")
# 8 bytes of length (64), JSON padded with spaces, data: a file as safetensors itself writes it.
LITERAL = (
    b"@\x00\x00\x00\x00\x00\x00\x00"
    b'{"test":{"dtype":"I32","shape":[2,2],"data_offsets":[0,16]}}    '
    b"\x00\x00\x00\x00\x01\x00\x00\x00\x02\x00\x00\x00\x03\x00\x00\x00"
)
U8 = {"dtype": "U8", "shape": [2], "data_offsets": [0, 2]}


def write(tmp_path: Path, data: bytes) -> Path:
    path = tmp_path / "model.safetensors"
    path.write_bytes(data)
    return path


def with_length(data: bytes, length: int) -> bytes:
    return length.to_bytes(8, "little") + data[8:]


def test_a_literal_file_is_read(tmp_path: Path) -> None:
    path = write(tmp_path, LITERAL)
    header = read_header(path)
    assert header.tensors == (TensorEntry("test", "I32", (2, 2), path, 72, 16),)
    assert (header.data_start, header.file_bytes, header.metadata) == (72, 88, {})
    assert header.tensors[0].end == len(LITERAL)


def test_a_literal_header_is_rendered() -> None:
    assert render_header([("test", "I32", (2, 2))], {}) == LITERAL[:72]


def test_tensors_come_in_the_order_of_their_bytes_not_of_the_json(tmp_path: Path) -> None:
    late = U8 | {"data_offsets": [2, 4]}
    header = read_header(write(tmp_path, assemble({"late": late, "early": U8}, b"abcd")))
    assert [entry.name for entry in header.tensors] == ["early", "late"]


def test_metadata_is_kept(tmp_path: Path) -> None:
    data = assemble({"__metadata__": {"format": "pt"}, "a": U8}, b"ab")
    assert read_header(write(tmp_path, data)).metadata == {"format": "pt"}


@pytest.mark.parametrize("header", [{}, {"__metadata__": {}}, {"__metadata__": None}])
def test_a_file_without_tensors_is_sound(tmp_path: Path, header: dict[str, Any]) -> None:
    assert read_header(write(tmp_path, assemble(header))).tensors == ()


@pytest.mark.parametrize("dtype", DTYPE_BITS)
def test_every_dtype_has_the_width_that_the_reference_gives_it(tmp_path: Path, dtype: str) -> None:
    data = b"\0" * tensor_bytes(dtype, (8,))
    file = assemble({"a": {"dtype": dtype, "shape": [8], "data_offsets": [0, len(data)]}}, data)
    assert read_header(write(tmp_path, file)).tensors[0].nbytes == DTYPE_BITS[dtype]
    safetensors.deserialize(file)


BROKEN: dict[str, tuple[bytes, str]] = {
    "an empty file": (b"", "is empty"),
    "fewer than eight bytes": (b"@\0\0", "too short"),
    "an LFS pointer": (
        b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 9\n",
        "Git LFS pointer",
    ),
    "a torch archive": (b"PK\x03\x04" + b"\0" * 60, "zip archive"),
    "a GGUF file": (b"GGUF" + b"\x03\0\0\0" * 20, "GGUF"),
    "a web page": (b"<!DOCTYPE html><html></html>", "web page"),
    "a header beyond the limit": (with_length(LITERAL, MAX_HEADER_BYTES + 1), "no safetensors file"),
    "a header beyond the file": (with_length(LITERAL, 4096), "truncated: its header alone"),
    "a header cut short by its length": (with_length(LITERAL, 40), "not valid JSON"),
    "data cut off": (LITERAL[:-3], "truncated: 3 of 88 bytes are missing"),
    "bytes after the data": (LITERAL + b"\0\0", "2 bytes after its last tensor"),
    "no object": (assemble(b"[]"), "does not begin with `{`"),
    "no JSON": (assemble(b"{]"), "not valid JSON"),
    "JSON of the wrong encoding": (assemble(b'{"\xff":{}}'), "not UTF-8"),
    "JSON nested beyond reason": (assemble(b'{"a":' * 100_000 + b"1" + b"}" * 100_000), "nested too deeply"),
    "a number beyond reason": (assemble(b'{"a":' + b"9" * 10_000 + b"}"), "not valid JSON"),
    "an infinity": (assemble(b'{"a":Infinity}'), "Infinity is no number"),
    "a number that is infinite": (assemble(b'{"a":1e999}'), "1e999 is no number"),
    "half a surrogate pair in a name": (assemble({"\ud800": U8}, b"ab"), "no valid Unicode"),
    "a name twice": (
        assemble(b'{"a":%s,"a":%s}' % ((json.dumps(U8).encode(),) * 2), b"ab"),
        "'a' stands twice",
    ),
    "a key twice": (assemble(b'{"a":{"dtype":"U8","dtype":"I8"}}'), "'dtype' stands twice"),
    "metadata that is no object": (assemble({"__metadata__": "pt"}), "__metadata__"),
    "metadata that is no text": (assemble({"__metadata__": {"format": 1}}), "__metadata__"),
    "a tensor that is no object": (assemble({"a": [1]}), "expected an object"),
    "no dtype": (assemble({"a": {"shape": [2], "data_offsets": [0, 2]}}, b"ab"), "dtype null"),
    "an unknown dtype": (assemble({"a": U8 | {"dtype": "I4"}}, b"ab"), 'dtype "I4"'),
    "a dtype that is no text": (assemble({"a": U8 | {"dtype": ["U8"]}}, b"ab"), "dtype"),
    "no shape": (assemble({"a": {"dtype": "U8", "data_offsets": [0, 2]}}, b"ab"), "shape null"),
    "a negative size": (assemble({"a": U8 | {"shape": [-2]}}, b"ab"), "shape [-2]"),
    "a size with a fraction": (assemble({"a": U8 | {"shape": [2.0]}}, b"ab"), "shape [2.0]"),
    "a size that is true": (assemble({"a": U8 | {"shape": [True, 2]}}, b"ab"), "shape [true, 2]"),
    "no offsets": (assemble({"a": {"dtype": "U8", "shape": [2]}}, b"ab"), "data_offsets null"),
    "three offsets": (assemble({"a": U8 | {"data_offsets": [0, 1, 2]}}, b"ab"), "data_offsets"),
    "offsets that go backwards": (assemble({"a": U8 | {"data_offsets": [2, 0]}}, b"ab"), "data_offsets"),
    "a shape larger than its bytes": (assemble({"a": U8 | {"shape": [3]}}, b"ab"), "has 2 bytes"),
    "a shape smaller than its bytes": (assemble({"a": U8 | {"shape": [1]}}, b"ab"), "has 2 bytes"),
    "a shape beyond any memory": (assemble({"a": U8 | {"shape": [2**62] * 5000}}, b"ab"), "has 2 bytes"),
    "packed elements that leave half a byte": (
        assemble({"a": {"dtype": "F4", "shape": [3], "data_offsets": [0, 2]}}, b"ab"),
        "has 2 bytes",
    ),
    "a hole before the first tensor": (assemble({"a": U8 | {"data_offsets": [1, 3]}}, b"abc"), "holes"),
    "a hole between tensors": (assemble({"a": U8, "b": U8 | {"data_offsets": [3, 5]}}, b"abcde"), "holes"),
    "tensors that overlap": (assemble({"a": U8, "b": U8 | {"data_offsets": [1, 3]}}, b"abc"), "holes"),
    "tensors at the same place": (assemble({"a": U8, "b": U8}, b"ab"), "holes"),
}


@pytest.mark.parametrize("what", BROKEN)
def test_a_broken_file_is_refused_by_name_and_reason(tmp_path: Path, what: str) -> None:
    data, reason = BROKEN[what]
    path = write(tmp_path, data)
    with pytest.raises(InputError) as caught:
        read_header(path)
    assert str(path) in str(caught.value)
    assert reason in caught.value.problem


def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    loop, dangling, pipe = tmp_path / "loop", tmp_path / "dangling", tmp_path / "pipe"
    loop.symlink_to(loop)
    dangling.symlink_to("../../blobs/0123")
    os.mkfifo(pipe)
    for path, reason in {
        tmp_path / "none": "does not exist",
        tmp_path: "is no regular file",
        pipe: "is no regular file",
        loop: "leads back to itself",
        dangling: "is a symlink to ../../blobs/0123, which does not exist",
        tmp_path / ("n" * 300): "cannot be read",
        tmp_path / "zero\0byte": "cannot be read",
    }.items():
        with pytest.raises(InputError, match=reason):
            read_header(path)


def test_a_file_that_may_not_be_read_is_a_matter_of_permission(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def denied(*_: object) -> int:  # the tests may run as root, who may read anything
        raise PermissionError(13, "Permission denied")

    path = write(tmp_path, LITERAL)
    monkeypatch.setattr(os, "open", denied)
    with pytest.raises(PermissionDenied, match="may not be read"):
        read_header(path)


def test_a_file_that_shrinks_meanwhile_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, pread = write(tmp_path, LITERAL), os.pread
    monkeypatch.setattr(os, "pread", lambda fd, count, offset: pread(fd, min(count, 40), offset))
    with pytest.raises(InputError, match="became shorter"):
        read_header(path)


def test_a_hub_cache_is_read_through_its_symlinks(tmp_path: Path) -> None:
    write(tmp_path, LITERAL).rename(tmp_path / "blob")
    path = tmp_path / "model.safetensors"
    path.symlink_to("blob")
    assert read_header(path).tensors[0].path == path


def test_the_size_of_the_file_costs_nothing(tmp_path: Path) -> None:
    rows = 3_300_000_000 // 6144
    path = tmp_path / "model.safetensors"
    header = render_header([("lm_head.weight", "BF16", (rows, 6144))], {})
    path.write_bytes(header)
    os.truncate(path, len(header) + rows * 6144 * 2)  # 6.6 GB of nothing
    code = (
        "import sys, pathlib, resource\n"
        "from eagle3pack.checkpoint.header import read_header\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_utime\n"
        "read_header(pathlib.Path(sys.argv[1]))\n"
        "assert resource.getrusage(resource.RUSAGE_SELF).ru_utime - before < 0.5\n"
        "assert not {'numpy', 'torch', 'safetensors', 'ctypes'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code, str(path)], check=True)


def test_a_header_of_many_tensors_stays_cheap() -> None:
    many = {f"layers.{i}.weight": ("U8", (1,), b"x") for i in range(20_000)}
    text = json.dumps(describe(many)).encode()
    assert len(parse_header(text, 8 + len(text) + len(many), PATH).tensors) == len(many)


@given(tensors(), st.dictionaries(NAMES, NAMES, max_size=3))
def test_what_is_rendered_is_what_is_read(given_tensors: dict[str, Sample], metadata: dict[str, str]) -> None:
    listed = [(name, dtype, shape) for name, (dtype, shape, _) in given_tensors.items()]
    head = render_header(listed, metadata)
    total = len(head) + sum(len(data) for _, _, data in given_tensors.values())
    header = parse_header(head[8:], total, PATH)
    # Empty tensors may change places with each other: nothing tells their order.
    assert sorted((e.name, e.dtype, e.shape) for e in header.tensors) == sorted(listed)
    assert header.metadata == metadata
    assert header.data_start == len(head) and len(head) % 8 == 0
    safetensors.deserialize(head + b"\0" * (total - len(head)))


@given(
    st.lists(st.tuples(NAMES, st.sampled_from(list(BYTES)), SHAPES), unique_by=lambda t: t[0]),
    st.integers(0, 4095),
)
def test_a_residue_is_met_unless_it_would_misalign_the_data(
    listed: list[tuple[str, str, tuple[int, ...]]], residue: int
) -> None:
    head, plain = render_header(listed, {}, residue), render_header(listed, {})
    assert len(head) % 8 == 0
    assert head.rstrip(b" ")[8:] == plain.rstrip(b" ")[8:]
    assert len(head) % 4096 == residue if residue % 8 == 0 else head == plain
    assert len(head) - len(plain) < 4096


@given(st.lists(st.tuples(NAMES, SHAPES), min_size=1, max_size=5, unique_by=lambda t: t[0]))
@settings(max_examples=30)
def test_the_rendered_header_is_the_reference_writers(
    tmp_path_factory: pytest.TempPathFactory, listed: list[tuple[str, tuple[int, ...]]]
) -> None:
    listed = sorted(listed)  # the order that the reference writer gives tensors of one dtype
    path = tmp_path_factory.mktemp("reference") / "model.safetensors"
    write_tensors(
        path,
        {
            name: ("BF16", shape, b"\0" * tensor_bytes("BF16", shape))
            for name, shape in listed
            if 0 not in shape
        },
    )
    head = render_header(
        [(name, "BF16", shape) for name, shape in listed if 0 not in shape], {"format": "pt"}
    )
    assert path.read_bytes().startswith(head)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 2**70) | st.floats() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)
KEYS = st.sampled_from(["dtype", "shape", "data_offsets", "other"])


def assert_read_or_refused(data: bytes) -> None:
    """One of two things happens; and what we take, the reference takes too."""
    text = data[8:]
    try:
        header = parse_header(text[: int.from_bytes(data[:8], "little")], len(data), PATH)
    except InputError:
        return
    assert sum(entry.nbytes for entry in header.tensors) == len(data) - header.data_start
    if b"-0" not in data:  # which is the integer 0 to Python and a float to Rust
        assert len(safetensors.deserialize(data)) == len(header.tensors)


@given(tensors(min_size=1), st.data())
@settings(max_examples=200)
def test_a_header_with_any_value_changed_is_read_or_refused(
    given_tensors: dict[str, Sample], data: st.DataObject
) -> None:
    header = describe(given_tensors)
    name = data.draw(st.sampled_from(list(header)))
    if data.draw(st.booleans()):
        header[name] = data.draw(JSON)
    else:
        header[name][data.draw(KEYS)] = data.draw(JSON)
    assert_read_or_refused(assemble(header, b"".join(t[2] for t in given_tensors.values())))


@given(tensors(), st.data())
@settings(max_examples=200)
def test_a_file_with_any_bytes_changed_is_read_or_refused(
    tmp_path_factory: pytest.TempPathFactory, given_tensors: dict[str, Sample], data: st.DataObject
) -> None:
    file = bytearray(file_bytes(given_tensors, {"format": "pt"}))
    start = data.draw(st.integers(0, len(file)))
    end = data.draw(st.integers(start, min(len(file), start + 9)))
    file[start:end] = data.draw(st.binary(max_size=9))
    path = tmp_path_factory.mktemp("changed") / "model.safetensors"
    path.write_bytes(file)
    try:
        read_header(path)
    except InputError:
        return
    assert_read_or_refused(bytes(file))


@given(st.binary(max_size=200))
@example(b"")
@example(b"\x02\0\0\0\0\0\0\0{}")
def test_any_bytes_are_read_or_refused(tmp_path_factory: pytest.TempPathFactory, data: bytes) -> None:
    path = tmp_path_factory.mktemp("any") / "model.safetensors"
    path.write_bytes(data)
    try:
        read_header(path)
    except InputError as error:
        assert str(path) in str(error)
