"""Weights that torch.save wrote: read like any other, and nothing in them is run."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch

from eagle3pack.checkpoint.files import PICKLE_INDEX_FILE, open_checkpoint
from eagle3pack.checkpoint.reading import iter_blocks, read_tensor
from eagle3pack.checkpoint.writer import PlannedTensor, plan_files, verify_written, write_file
from eagle3pack.errors import InputError
from tests.tiny import DTYPES

BIN = "pytorch_model.bin"


def state() -> dict[str, torch.Tensor]:
    """Every kind of storage that a trainer may have saved."""
    torch.manual_seed(0)
    big = torch.randn(8, 6)
    return {
        "bf16": big.bfloat16(),
        "fp16": big.half(),
        "transposed": big.t(),
        "a view of a larger storage": big[2:5, 1:4],
        "every other row": big[::2],
        "tied": big,
        "parameter": torch.nn.Parameter(big.clone()),
        "scalar": torch.tensor(3.0),
        "empty": torch.empty(0, 4),
        "expanded": torch.ones(1).expand(5),
        "d2t": torch.arange(7),
        "t2d": torch.tensor([True, False, True]),
        "fp8": big.to(torch.float8_e4m3fn),
    }


def as_tensors(folder: Path) -> dict[str, torch.Tensor]:
    """What we read, as torch sees it."""
    dtypes = DTYPES | {"F8_E4M3": torch.float8_e4m3fn}
    return {
        name: torch.frombuffer(bytearray(read_tensor(entry)) or bytearray(8), dtype=dtypes[entry.dtype])[
            : entry.nbytes // dtypes[entry.dtype].itemsize
        ].reshape(entry.shape)
        for name, entry in open_checkpoint(folder, pickles=True).tensors.items()
    }


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert list(found) == list(expected)
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name].float(), tensor.detach().float())


@pytest.mark.parametrize("name", [BIN, "draft.pt", "model.pth"])
def test_tensors_of_any_storage_are_read(tmp_path: Path, name: str) -> None:
    torch.save(OrderedDict(state()), tmp_path / name)
    (tmp_path / "training_args.bin").write_bytes(b"trainer state is left alone")
    (tmp_path / "optimizer.pt").write_bytes(b"trainer state is left alone")
    assert_same(as_tensors(tmp_path), state())


def test_shards_are_read(tmp_path: Path) -> None:
    first, second = {"a": torch.ones(2)}, {"b": torch.zeros(3, dtype=torch.bfloat16)}
    torch.save(first, tmp_path / "pytorch_model-00001-of-00002.bin")
    torch.save(second, tmp_path / "pytorch_model-00002-of-00002.bin")
    (tmp_path / PICKLE_INDEX_FILE).write_text(
        '{"metadata": {"total_size": 14}, "weight_map": '
        '{"a": "pytorch_model-00001-of-00002.bin", "b": "pytorch_model-00002-of-00002.bin"}}'
    )
    assert_same(as_tensors(tmp_path), first | second)
    assert open_checkpoint(tmp_path, pickles=True).index_total_size == 14


def test_safetensors_come_before_pickles(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    save_file({"new": torch.ones(2)}, tmp_path / "model.safetensors")
    torch.save({"old": torch.ones(2)}, tmp_path / BIN)
    assert list(open_checkpoint(tmp_path, pickles=True).tensors) == ["new"]


def test_pickles_are_written_as_safetensors(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    torch.save(state(), tmp_path / BIN)
    entries = open_checkpoint(tmp_path, pickles=True).tensors.values()
    out = tmp_path / "out"
    out.mkdir()
    files = plan_files([PlannedTensor(entry.name, entry.dtype, entry.shape, entry) for entry in entries])
    for planned in files:
        write_file(planned, out, lambda _: ())
    verify_written(files, out, every_byte=True)
    loaded = load_file(out / "model.safetensors")
    assert_same({name: loaded[name] for name in state()}, state())


class Evil:
    def __reduce__(self) -> Any:
        return os.system, ("touch was-run",)


BROKEN: dict[str, tuple[Any, str]] = {
    "code": ({"a": Evil()}, "holds more than tensors"),
    "a training checkpoint": ({"model": {"a": torch.ones(2)}, "epoch": 3}, "is a dict, expected a tensor"),
    "a number": ({"a": torch.ones(2), "step": 3}, '"step": is a int, expected a tensor'),
    "a key that is no name": ({3: torch.ones(2)}, "expected a tensor under a name"),
    "a name that no header can hold": ({"__metadata__": torch.ones(2)}, "expected a tensor under a name"),
    "a list": ([torch.ones(2)], "holds a list, expected tensors by name"),
    "a sparse tensor": ({"a": torch.eye(3).to_sparse()}, "sparse"),
    "a complex tensor": ({"a": torch.ones(2, dtype=torch.complex128)}, "complex128"),
}


@pytest.mark.parametrize("what", BROKEN)
@pytest.mark.filterwarnings("ignore:Sparse")
def test_what_is_no_state_dict_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    monkeypatch.chdir(tmp_path)
    value, reason = BROKEN[what]
    torch.save(value, tmp_path / BIN)
    with pytest.raises(InputError, match=reason) as caught:
        open_checkpoint(tmp_path, pickles=True)
    assert str(tmp_path / BIN) in str(caught.value)
    assert not (tmp_path / "was-run").exists()


@pytest.mark.parametrize(
    ("data", "reason"),
    {
        b"": "is empty",
        b"version https://git-lfs.github.com/spec/v1\n": "Git LFS pointer",
        b"<!DOCTYPE html>": "web page",
        b"PK\x03\x04 and nothing else": "cannot be read as weights that torch.save wrote",
    }.items(),
)
def test_what_is_no_pickle_is_refused(tmp_path: Path, data: bytes, reason: str) -> None:
    (tmp_path / BIN).write_bytes(data)
    with pytest.raises(InputError, match=reason):
        open_checkpoint(tmp_path, pickles=True)


def test_the_format_of_before_pytorch_1_6_is_refused_with_a_hint(tmp_path: Path) -> None:
    torch.save({"a": torch.ones(2)}, tmp_path / BIN, _use_new_zipfile_serialization=False)
    with pytest.raises(InputError) as caught:
        open_checkpoint(tmp_path, pickles=True)
    assert "1.6" in caught.value.hint


def test_several_pickles_without_an_index_are_refused(tmp_path: Path) -> None:
    for name in ("a.bin", "b.bin"):
        torch.save({}, tmp_path / name)
    with pytest.raises(InputError, match="2 pickles"):
        open_checkpoint(tmp_path, pickles=True)


def test_pickles_are_refused_unless_they_are_asked_for(tmp_path: Path) -> None:
    torch.save(state(), tmp_path / BIN)
    with pytest.raises(InputError, match="as pickles") as caught:
        open_checkpoint(tmp_path)
    assert "convert" in caught.value.hint


def test_a_damaged_pickle_is_read_or_refused(tmp_path: Path) -> None:
    torch.save({"a": torch.ones(2, 3), "b": torch.zeros(2, 2).t()}, tmp_path / BIN)
    sound, rng = (tmp_path / BIN).read_bytes(), random.Random(0)
    for _ in range(300):
        data = bytearray(sound)
        start = rng.randrange(len(data))
        data[start : start + rng.randrange(5)] = rng.randbytes(rng.randrange(4))
        (tmp_path / BIN).write_bytes(data)
        try:
            for entry in open_checkpoint(tmp_path, pickles=True).tensors.values():
                assert len(read_tensor(entry)) == entry.nbytes
        except InputError as error:
            assert str(tmp_path) in str(error)


@pytest.mark.slow
def test_a_large_pickle_is_streamed(tmp_path: Path) -> None:
    torch.save({f"{i}": torch.zeros(25_000_000) for i in range(5)}, tmp_path / BIN)  # 500 MB
    code = (
        "import pathlib, re, sys\n"
        "import torch\n"
        "from eagle3pack.checkpoint.files import open_checkpoint\n"
        "from eagle3pack.checkpoint.reading import iter_blocks\n"
        "anonymous = lambda: int(re.search(r'RssAnon:\\s+(\\d+)', open('/proc/self/status').read())[1])\n"
        "before = anonymous()\n"
        "entries = open_checkpoint(pathlib.Path(sys.argv[1]), pickles=True).tensors.values()\n"
        "assert sum(len(block) for entry in entries for block in iter_blocks(entry)) == 500_000_000\n"
        "assert anonymous() - before < 32_000, anonymous() - before\n"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True)


def test_a_pickle_is_read_in_blocks(tmp_path: Path) -> None:
    torch.save({"a": torch.arange(100)}, tmp_path / BIN)
    (entry,) = open_checkpoint(tmp_path, pickles=True).tensors.values()
    assert [len(block) for block in iter_blocks(entry, 300)] == [300, 300, 200]
