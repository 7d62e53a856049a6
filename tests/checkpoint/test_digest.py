"""Digests of files, hashed afterwards or behind their writer, and the digest that names a draft."""

from __future__ import annotations

import hashlib
import os
import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eagle3pack.checkpoint.digest import (
    FollowingSha256,
    draft_digest,
    draft_files,
    hash_files,
    header_sha256,
    sha256_file,
)
from eagle3pack.checkpoint.header import read_header
from eagle3pack.errors import ConflictError, InputError
from tests.checkpoint.samples import random_tensor, write_weights


def test_a_file_is_hashed_and_its_bytes_counted(tmp_path: Path) -> None:
    data = os.urandom(2_500_000)
    (tmp_path / "file").write_bytes(data)
    counts: list[int] = []
    assert sha256_file(tmp_path / "file", counts.append) == hashlib.sha256(data).hexdigest()
    assert sum(counts) == len(data) and len(counts) == 3


def test_several_files_are_hashed_side_by_side(tmp_path: Path) -> None:
    contents = {tmp_path / str(i): os.urandom(1_200_000 * i) for i in range(4)}
    for path, data in contents.items():
        path.write_bytes(data)
    counts: list[int] = []
    digests = hash_files(list(contents), counts.append)
    assert digests == {path: hashlib.sha256(data).hexdigest() for path, data in contents.items()}
    assert sum(counts) == sum(map(len, contents.values()))
    assert hash_files([]) == {}


def test_an_unreadable_file_among_several_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"a")
    with pytest.raises(InputError, match="does not exist"):
        hash_files([tmp_path / "a", tmp_path / "none"])


def test_an_interrupt_ends_the_hashing_threads(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(bytes(5_000_000))

    def interrupt(_: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        hash_files([tmp_path / "a"], interrupt)
    assert not [thread for thread in threading.enumerate() if thread is not threading.main_thread()]


def test_the_header_has_a_digest_of_its_own(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    write_weights(path, {"a": random_tensor("U8", (100,))})
    data = path.read_bytes()
    assert header_sha256(path) == hashlib.sha256(data[: read_header(path).data_start]).hexdigest()


@given(st.lists(st.binary(max_size=40), max_size=6))
def test_a_follower_hashes_what_is_written(
    tmp_path_factory: pytest.TempPathFactory, parts: list[bytes]
) -> None:
    path = tmp_path_factory.mktemp("following") / "file"
    counts: list[int] = []
    with path.open("w+b", buffering=0) as file, FollowingSha256(file.fileno(), counts.append) as follower:
        for part in parts:
            file.write(part)
            follower.advance(file.tell())
        digest = follower.finish()
    assert digest == hashlib.sha256(b"".join(parts)).hexdigest()
    assert sum(counts) == len(b"".join(parts))


def test_an_error_in_the_writer_ends_the_follower(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(50_000_000))
    counts: list[int] = []
    with (
        path.open("rb") as file,
        pytest.raises(ZeroDivisionError),
        FollowingSha256(file.fileno(), counts.append) as f,
    ):
        f.advance(50_000_000)
        raise ZeroDivisionError
    assert sum(counts) < 50_000_000
    assert threading.active_count() == 1


def test_an_error_in_the_follower_reaches_the_writer(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"short")
    with (
        path.open("rb") as file,
        pytest.raises(ConflictError, match="became shorter"),
        FollowingSha256(file.fileno()) as follower,
    ):
        follower.advance(100)
        follower.finish()


def test_the_files_of_a_draft_are_its_config_weights_and_index(tmp_path: Path) -> None:
    for name in ("config.json", "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"):
        (tmp_path / name).write_text("x")
    (tmp_path / "model.safetensors.index.json").write_text("x")
    ours = draft_files(tmp_path)
    for name in (
        *("README.md", "eagle3pack.json", "report.json", "tokenizer.json", "configuration.json", "LICENSE"),
        *("pytorch_model.bin", ".hidden.safetensors", "optimizer.pt", "generation_config.json"),
    ):
        (tmp_path / name).write_text("x")
    assert draft_files(tmp_path) == ours
    assert [path.name for path in ours] == [
        "config.json",
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
        "model.safetensors.index.json",
    ]


def test_a_draft_of_pickles_has_files_too(tmp_path: Path) -> None:
    for name in ("config.json", "pytorch_model.bin", "training_args.bin", "pytorch_model.bin.index.json"):
        (tmp_path / name).write_text("x")
    names = [path.name for path in draft_files(tmp_path)]
    assert names == ["config.json", "pytorch_model.bin", "pytorch_model.bin.index.json"]


def test_the_digest_of_a_draft_is_pinned() -> None:
    """Published reports hold it: what it is made of must never change."""
    files = [("model.safetensors", 7, "b" * 64), ("config.json", 3, "a" * 64)]
    text = '[["config.json",3,"' + "a" * 64 + '"],["model.safetensors",7,"' + "b" * 64 + '"]]'
    assert draft_digest(files) == hashlib.sha256(text.encode()).hexdigest()
    assert draft_digest(reversed(files)) == draft_digest(files)
    assert draft_digest(files) == "9a752214498dfe3de16e42050ae13efa3cf43253f9210fa7a532fa2e042f0bfe"
