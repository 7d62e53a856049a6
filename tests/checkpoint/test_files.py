"""Folders of weights: one file, shards and their index, and everything that may be wrong with them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eagle3pack.checkpoint.files import INDEX_FILE, SINGLE_FILE, open_checkpoint
from eagle3pack.checkpoint.reading import read_tensor
from eagle3pack.errors import InputError, PermissionDenied
from tests.checkpoint.samples import Sample, random_tensor, tensors, write_shards, write_weights

A, B, C = (random_tensor("BF16", (2, 3), seed) for seed in range(3))
FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


def two_shards(folder: Path, **index: Any) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    write_shards(folder, {FIRST: {"b": B, "a": A}, SECOND: {"c": C}}, **index)


def test_a_single_file_is_opened(tmp_path: Path) -> None:
    write_weights(tmp_path / SINGLE_FILE, {"b": B, "a": A})
    checkpoint = open_checkpoint(tmp_path)
    assert list(checkpoint.tensors) == ["b", "a"]
    assert checkpoint.index_path is None and checkpoint.index_total_size is None
    assert checkpoint.total_bytes == 24


@pytest.mark.parametrize(
    "name", ["draft.safetensors", "best-of-5.safetensors", "model-00001-of-00001.safetensors"]
)
def test_a_single_file_of_another_name_is_opened(tmp_path: Path, name: str) -> None:
    write_weights(tmp_path / name, {"a": A})
    assert list(open_checkpoint(tmp_path).tensors) == ["a"]


def test_shards_are_opened_in_order(tmp_path: Path) -> None:
    two_shards(tmp_path)
    checkpoint = open_checkpoint(tmp_path)
    assert list(checkpoint.tensors) == ["b", "a", "c"]
    assert [header.path.name for header in checkpoint.headers] == [FIRST, SECOND]
    assert checkpoint.index_path == tmp_path / INDEX_FILE
    assert checkpoint.index_total_size == checkpoint.total_bytes == 36


def test_one_file_may_have_an_index(tmp_path: Path) -> None:
    write_shards(tmp_path, {SINGLE_FILE: {"a": A}})
    assert list(open_checkpoint(tmp_path).tensors) == ["a"]


@pytest.mark.parametrize("metadata", [None, {}, [], {"total_size": "36"}, {"total_size": 3.6}])
def test_an_index_need_not_state_a_total(tmp_path: Path, metadata: Any) -> None:
    two_shards(tmp_path, metadata=metadata)
    assert open_checkpoint(tmp_path).index_total_size is None


def test_a_snapshot_in_a_hub_cache_is_opened_through_its_symlinks(tmp_path: Path) -> None:
    two_shards(tmp_path / "real")
    snapshot, blobs = tmp_path / "snapshots" / "0123", tmp_path / "blobs"
    snapshot.mkdir(parents=True)
    (tmp_path / "real").rename(blobs)
    for path in blobs.iterdir():
        (snapshot / path.name).symlink_to(Path("../../blobs") / path.name)
    assert list(open_checkpoint(snapshot).tensors) == ["b", "a", "c"]


def test_hidden_files_are_no_weights(tmp_path: Path) -> None:
    write_weights(tmp_path / SINGLE_FILE, {"a": A})
    (tmp_path / "._model.safetensors").write_bytes(b"what macOS leaves on a foreign disk")
    assert list(open_checkpoint(tmp_path).tensors) == ["a"]


@pytest.mark.parametrize("present", [FIRST, SECOND])
def test_a_partial_target_gives_the_tensors_that_are_there(tmp_path: Path, present: str) -> None:
    two_shards(tmp_path)
    (tmp_path / (SECOND if present == FIRST else FIRST)).unlink()
    expected = ["b", "a"] if present == FIRST else ["c"]
    assert list(open_checkpoint(tmp_path, partial=True).tensors) == expected
    with pytest.raises(InputError, match="lists 1 of 2 files that are not there"):
        open_checkpoint(tmp_path)


def rewrite(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    document = json.loads((folder / INDEX_FILE).read_text())
    change(document["weight_map"])
    (folder / INDEX_FILE).write_text(json.dumps(document))


BROKEN: dict[str, tuple[Callable[[Path], object], str]] = {
    "no weights": (lambda folder: [path.unlink() for path in folder.iterdir()], "holds no weights"),
    "a missing shard": (
        lambda folder: (folder / FIRST).unlink(),
        f"1 of 2 files that are not there \\({FIRST}",
    ),
    "all shards missing": (
        lambda folder: [(folder / file).unlink() for file in (FIRST, SECOND)],
        "lists 2 of 2 files",
    ),
    "a lone shard": (
        lambda folder: [(folder / file).unlink() for file in (FIRST, INDEX_FILE)],
        f"holds the shard {SECOND} and no",
    ),
    "shards without an index": (lambda folder: (folder / INDEX_FILE).unlink(), "2 weight files .* and no"),
    "an orphan shard": (
        lambda folder: write_weights(folder / "old.safetensors", {"d": A}),
        "does not list \\(old",
    ),
    "an orphan single file": (lambda folder: write_weights(folder / SINGLE_FILE, {"d": A}), "does not list"),
    "a tensor in two shards": (
        lambda folder: write_weights(folder / SECOND, {"a": A, "c": C}),
        f'tensor "a" is in {FIRST} too',
    ),
    "a tensor in another shard than listed": (
        lambda folder: rewrite(folder, lambda names: names.update(a=SECOND)),
        f'says that "a" is in {SECOND}, but it is in {FIRST}',
    ),
    "a tensor listed but nowhere": (
        lambda folder: rewrite(folder, lambda names: names.update(d=SECOND)),
        'says that "d" is in .* but it is in no file',
    ),
    "a tensor not listed": (lambda folder: rewrite(folder, lambda names: names.pop("a")), "does not list a$"),
    "a broken shard": (lambda folder: (folder / SECOND).write_bytes(b""), "is empty"),
    "an index that is no JSON": (lambda folder: (folder / INDEX_FILE).write_text("{"), "not valid JSON"),
    "an index without a map": (lambda folder: two_shards(folder, weight_map=None), "weight_map is null"),
    "an index with an empty map": (lambda folder: two_shards(folder, weight_map={}), "weight_map is {}"),
    "an index whose map is a list": (lambda folder: two_shards(folder, weight_map=[FIRST]), "weight_map is"),
    "a shard that is a symlink loop": (
        lambda folder: ((folder / SECOND).unlink(), (folder / SECOND).symlink_to(SECOND)),
        "leads back to itself",
    ),
    "a shard that is a folder": (
        lambda folder: ((folder / SECOND).unlink(), (folder / SECOND).mkdir()),
        "is no regular file",
    ),
}


@pytest.mark.parametrize("what", BROKEN)
def test_a_broken_folder_is_refused_by_name_and_reason(tmp_path: Path, what: str) -> None:
    two_shards(tmp_path)
    damage, reason = BROKEN[what]
    damage(tmp_path)
    with pytest.raises(InputError, match=reason) as caught:
        open_checkpoint(tmp_path)
    assert str(tmp_path) in str(caught.value)


@pytest.mark.parametrize(
    "file", ["../x.safetensors", "/etc/passwd", "a/b.safetensors", "..", ".", "", "a\\b", 3, None]
)
def test_an_index_cannot_lead_out_of_the_folder(tmp_path: Path, file: Any) -> None:
    two_shards(tmp_path / "draft")
    write_weights(tmp_path / "x.safetensors", {"a": A})
    rewrite(tmp_path / "draft", lambda names: names.update(a=file))
    with pytest.raises(InputError, match="expected the name of a file beside it"):
        open_checkpoint(tmp_path / "draft")


def test_what_is_no_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    loop = tmp_path / "loop"
    loop.symlink_to(loop)
    for path, reason in {"none": "does not exist", "file": "is no folder", "loop": "cannot be read"}.items():
        with pytest.raises(InputError, match=reason):
            open_checkpoint(tmp_path / path)


def test_a_folder_that_may_not_be_read_is_a_matter_of_permission(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def denied(_: Path) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "iterdir", denied)
    with pytest.raises(PermissionDenied):
        open_checkpoint(tmp_path)


@given(tensors(min_size=1), st.data())
def test_however_tensors_are_sharded_each_is_found_with_its_bytes(
    tmp_path_factory: pytest.TempPathFactory, given_tensors: dict[str, Sample], data: st.DataObject
) -> None:
    folder = tmp_path_factory.mktemp("draft")
    count = data.draw(st.integers(1, 3))
    shards: dict[str, dict[str, Sample]] = {}
    for name, tensor in given_tensors.items():
        file = f"model-{data.draw(st.integers(1, count)):05d}-of-{count:05d}.safetensors"
        shards.setdefault(file, {})[name] = tensor
    write_shards(folder, shards)
    checkpoint = open_checkpoint(folder)
    found = {
        name: (entry.dtype, entry.shape, bytes(read_tensor(entry)))
        for name, entry in checkpoint.tensors.items()
    }
    assert found == given_tensors
