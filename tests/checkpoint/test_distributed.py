"""What torch.distributed.checkpoint wrote: read to the bit, without torch, and nothing in it is run."""

from __future__ import annotations

import os
import pickle
import random
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch

from eagle3pack.checkpoint.files import open_checkpoint
from eagle3pack.checkpoint.reading import read_part, read_tensor
from eagle3pack.errors import InputError
from tests.checkpoint.distributed_samples import save_model
from tests.tiny import DTYPES


def draft() -> dict[str, torch.Tensor]:
    """Tensors of every dtype and rank that a draft may have."""
    torch.manual_seed(0)
    big = torch.randn(7, 6)
    return {
        "fc.weight": big.bfloat16(),
        "midlayer.mlp.up_proj.weight": big.half(),
        "lm_head.weight": big,
        "norm.weight": big[0].bfloat16().clone(),
        "d2t": torch.arange(7),
        "t2d": torch.tensor([True, False, True]),
        "scalar": torch.tensor(3.0),
        "empty": torch.empty(0, 4),
    }


def as_tensors(folder: Path) -> dict[str, torch.Tensor]:
    """What we read, as torch sees it."""
    return {
        name: torch.frombuffer(bytearray(read_tensor(entry)) or bytearray(8), dtype=DTYPES[entry.dtype])[
            : entry.nbytes // DTYPES[entry.dtype].itemsize
        ].reshape(entry.shape)
        for name, entry in open_checkpoint(folder, pickles=True).tensors.items()
    }


@pytest.mark.parametrize(("pieces", "files"), [(1, 1), (1, 2), (2, 1), (3, 2), (9, 1)])
def test_a_model_is_read_to_the_bit(tmp_path: Path, pieces: int, files: int) -> None:
    save_model(tmp_path, draft(), pieces=pieces, files=files)
    found = as_tensors(tmp_path)
    assert list(found) == list(draft())
    for name, tensor in draft().items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor), name


def test_the_model_folder_itself_may_be_given(tmp_path: Path) -> None:
    save_model(tmp_path, draft())
    assert list(as_tensors(tmp_path / "model")) == list(draft())


def test_a_tensor_in_one_piece_is_a_run_of_bytes_and_one_in_several_is_put_together(tmp_path: Path) -> None:
    save_model(tmp_path / "one", draft())
    save_model(tmp_path / "two", draft(), pieces=2)
    one = open_checkpoint(tmp_path / "one", pickles=True).tensors["lm_head.weight"]
    two = open_checkpoint(tmp_path / "two", pickles=True).tensors["lm_head.weight"]
    assert one.values is None
    assert two.values is not None
    assert bytes(read_part(one, 50, 70)) == bytes(read_part(two, 50, 70))


def test_state_of_the_optimizer_and_of_the_run_is_left_alone(tmp_path: Path) -> None:
    save_model(tmp_path, draft())
    (tmp_path / "optimizer").mkdir()
    (tmp_path / "optimizer" / ".metadata").write_bytes(b"no metadata")
    (tmp_path / "rng.pt").write_bytes(b"no weights")
    assert list(as_tensors(tmp_path)) == list(draft())


def test_reading_needs_no_torch(tmp_path: Path) -> None:
    save_model(tmp_path, draft(), pieces=2)
    code = (
        "import pathlib, sys\n"
        "from eagle3pack.checkpoint.files import open_checkpoint\n"
        "from eagle3pack.checkpoint.reading import read_tensor\n"
        "for entry in open_checkpoint(pathlib.Path(sys.argv[1]), pickles=True).tensors.values():\n"
        "    assert len(read_tensor(entry)) == entry.nbytes\n"
        "assert 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True)


def test_only_who_asks_for_it_gets_a_training_checkpoint(tmp_path: Path) -> None:
    save_model(tmp_path, draft())
    with pytest.raises(InputError, match="is a training checkpoint") as caught:
        open_checkpoint(tmp_path)
    assert "convert" in caught.value.hint


def test_the_folder_of_a_run_is_refused_with_the_iteration_to_give(tmp_path: Path) -> None:
    save_model(tmp_path / "iter_0000200", draft())
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("200")
    with pytest.raises(InputError, match="holds the checkpoints of a training run") as caught:
        open_checkpoint(tmp_path, pickles=True)
    assert str(tmp_path / "iter_0000200") in caught.value.hint


def test_a_tensor_cut_along_its_columns_is_refused(tmp_path: Path) -> None:
    save_model(tmp_path, {"fc.weight": torch.ones(2, 4)}, pieces=2, dim=1)
    with pytest.raises(InputError, match="not cut into runs of rows") as caught:
        open_checkpoint(tmp_path, pickles=True)
    assert "convert_to_hf" in caught.value.hint


def test_a_checkpoint_without_a_draft_is_refused(tmp_path: Path) -> None:
    save_model(tmp_path, {})
    with pytest.raises(InputError, match="holds no draft"):
        open_checkpoint(tmp_path, pickles=True)


class Evil:
    """Runs a command when it is unpickled in the usual way."""

    def __reduce__(self) -> Any:
        return os.system, ("touch was-run",)


def test_code_in_the_metadata_is_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    save_model(tmp_path, draft())
    (tmp_path / "model" / ".metadata").write_bytes(pickle.dumps({"state_dict_metadata": Evil()}))
    with pytest.raises(InputError, match=r"asks for posix\.system") as caught:
        open_checkpoint(tmp_path, pickles=True)
    assert "nothing in it was run" in str(caught.value)
    assert not (tmp_path / "was-run").exists()


def test_code_in_a_chunk_is_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    save_model(tmp_path, {"fc.weight": torch.ones(2, 4)})
    (path,) = (tmp_path / "model").glob("*.distcp")
    with path.open("r+b") as file:
        file.truncate(0)
        with zipfile.ZipFile(file, "w") as archive:
            archive.writestr("archive/data.pkl", pickle.dumps(Evil()))
            archive.writestr("archive/data/0", bytes(32))
        size = file.seek(0, os.SEEK_END)
    metadata = tmp_path / "model" / ".metadata"
    loaded = pickle.loads(metadata.read_bytes())
    for info in loaded.storage_data.values():
        info.length = size
        info.offset = 0
    metadata.write_bytes(pickle.dumps(loaded))
    with pytest.raises(InputError, match=r"asks for posix\.system"):
        open_checkpoint(tmp_path, pickles=True)
    assert not (tmp_path / "was-run").exists()


CHANGES: dict[str, tuple[dict[str, Any], str]] = {
    "a file elsewhere": ({"relative_path": "../__0_0.distcp"}, "expected a file beside it"),
    "an absolute file": ({"relative_path": "/etc/passwd"}, "expected a file beside it"),
    "a missing file": ({"relative_path": "__1_0.distcp"}, "does not exist"),
    "a chunk beyond the end": ({"offset": 10**9}, "is truncated"),
    "a negative offset": ({"offset": -1}, "is truncated"),
    "half a chunk": ({"length": 100}, "damaged chunk"),
    "a transform": ({"transform_descriptors": ["zstd"]}, "compressed or encrypted"),
}


@pytest.mark.parametrize("what", CHANGES)
def test_metadata_that_does_not_fit_is_refused(tmp_path: Path, what: str) -> None:
    save_model(tmp_path, {"fc.weight": torch.ones(2, 4)})
    change, reason = CHANGES[what]
    path = tmp_path / "model" / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    for info in metadata.storage_data.values():
        for key, value in change.items():
            setattr(info, key, value)
    path.write_bytes(pickle.dumps(metadata))
    with pytest.raises(InputError, match=reason):
        open_checkpoint(tmp_path, pickles=True)


def test_metadata_of_another_tensor_is_refused(tmp_path: Path) -> None:
    save_model(tmp_path, {"fc.weight": torch.ones(2, 4)})
    path = tmp_path / "model" / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    for described in metadata.state_dict_metadata.values():
        described.properties.dtype = torch.float16
    path.write_bytes(pickle.dumps(metadata))
    with pytest.raises(InputError, match="holds another tensor"):
        open_checkpoint(tmp_path, pickles=True)


@pytest.mark.parametrize("file", [".metadata", "__0_0.distcp"])
def test_a_damaged_checkpoint_is_read_or_refused(tmp_path: Path, file: str) -> None:
    save_model(tmp_path, {"fc.weight": torch.ones(2, 3), "t2d": torch.tensor([True])}, pieces=2)
    path, rng = tmp_path / "model" / file, random.Random(0)
    sound = path.read_bytes()
    for _ in range(300):
        data = bytearray(sound)
        start = rng.randrange(len(data))
        data[start : start + rng.randrange(5)] = rng.randbytes(rng.randrange(4))
        path.write_bytes(data)
        try:
            for entry in open_checkpoint(tmp_path, pickles=True).tensors.values():
                assert len(read_tensor(entry)) == entry.nbytes
        except InputError as error:
            assert str(tmp_path) in str(error)
