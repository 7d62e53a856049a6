"""One read of the weights: digests and facts, against torch and hashlib."""

from __future__ import annotations

import hashlib
import json
import os
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from eagle3pack.checkpoint.digest import draft_digest
from eagle3pack.checkpoint.header import TensorEntry, read_header
from eagle3pack.draft.target import parse_target_config
from eagle3pack.verify import scan as scanning
from eagle3pack.verify.context import Context, Options
from eagle3pack.verify.scan import Scan
from eagle3pack.verify.values import FLOATS, cosine, to_float32
from tests import tiny
from tests.verify import drafts

TORCH = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32, "F64": torch.float64}


def scanned(folder: Path, **options: Any) -> Scan:
    return Context(folder, Options(**options)).scan


@pytest.mark.parametrize("shards", [1, 3])
def test_digests_are_those_of_the_files(shards: int, tmp_path: Path) -> None:
    folder = drafts.make(shards=shards).write(tmp_path / "draft")
    scan = scanned(folder)

    expected = [
        (path.name, path.stat().st_size, hashlib.sha256(path.read_bytes()).hexdigest())
        for path in sorted(folder.iterdir())
    ]
    assert sorted(scan.files) == expected
    assert scan.digest == draft_digest(expected)


def test_every_byte_is_read_once_and_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = drafts.make(shards=2).write(tmp_path / "draft")
    told: list[int] = []
    opened: list[str] = []
    original = scanning.iter_blocks

    def counting(entry: TensorEntry, block_bytes: int) -> Any:
        opened.append(entry.name)
        return original(entry, block_bytes)

    monkeypatch.setattr(scanning, "iter_blocks", counting)
    scanned(folder, on_bytes=told.append)

    assert sum(told) == sum(path.stat().st_size for path in folder.iterdir())
    assert len(opened) == len(set(opened))


@given(
    dtype=st.sampled_from(sorted(TORCH)),
    bits=st.lists(st.integers(0, 2**64 - 1), min_size=1, max_size=40),
)
@settings(deadline=None, max_examples=150)
def test_values_agree_with_torch(dtype: str, bits: list[int]) -> None:
    kind = FLOATS[dtype]
    width = np.dtype(kind.bits).itemsize
    data = np.array(bits, np.uint64).astype(kind.bits).tobytes()
    tensor = torch.frombuffer(bytearray(data), dtype=TORCH[dtype])
    look = scanning._Values(TensorEntry("x", dtype, (len(bits),), Path("x"), 0, len(data)))
    for start in range(0, len(data), 3 * width):
        look.add(memoryview(data[start : start + 3 * width]))
    facts = look.facts("x", "x", Path("x"), dtype, (len(bits),), len(bits))

    assert facts.nonfinite == int((~torch.isfinite(tensor)).sum())
    assert facts.is_constant == (
        len(bits) > 1 and len({data[i : i + width] for i in range(0, len(data), width)}) == 1
    )
    if not facts.nonfinite:
        with np.errstate(over="ignore"):
            assert facts.max_abs == pytest.approx(float(tensor.float().abs().max()), nan_ok=True)
    ours = torch.from_numpy(to_float32(data, dtype).copy())
    assert torch.equal(torch.nan_to_num(ours), torch.nan_to_num(tensor.float()))


@given(
    rows=st.lists(st.integers(0, 5), min_size=1, max_size=30),
    columns=st.sampled_from([1, 2, 3, 64, 300]),
    block_rows=st.integers(1, 7),
)
@settings(deadline=None, max_examples=60)
def test_equal_rows_are_counted(
    rows: list[int], columns: int, block_rows: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    values = np.random.default_rng(0).standard_normal((6, columns)).astype(np.float32)[rows]
    path = tmp_path_factory.mktemp("rows") / "model.safetensors"
    tiny.write_tensors(path, {"lm_head.weight": drafts.float_tensor(values, "F32")})
    (entry,) = read_header(path).tensors
    look = scanning._Rows(entry)
    data = memoryview(values.tobytes())
    step = block_rows * columns * 4
    for start in range(0, len(data), step):
        look.add(data[start : start + step])
    facts = look.facts()

    assert (facts.rows, facts.distinct) == (len(rows), len(set(rows)))
    if facts.example:
        one, other = facts.example
        assert one != other and rows[one] == rows[other]


def test_rows_that_differ_only_between_the_sampled_words_are_no_copies(tmp_path: Path) -> None:
    values = np.zeros((50, 5000), np.float32)
    values[:, 7] = np.arange(50)  # 128 words of 10,000 are looked at first, and this is none of them
    path = tmp_path / "model.safetensors"
    tiny.write_tensors(path, {"lm_head.weight": drafts.float_tensor(values, "F32")})
    (entry,) = read_header(path).tensors
    look = scanning._Rows(entry)
    look.add(memoryview(values.tobytes()))
    assert look.facts().copies == 0


def test_the_embedding_is_held_against_the_targets(tmp_path: Path) -> None:
    draft = drafts.make()
    changed = drafts.EMBEDDING.copy()
    changed[[3, 200]] += 0.5
    draft.tensors["embed_tokens.weight"] = drafts.float_tensor(changed)
    folder = draft.write(tmp_path / "draft")
    target = drafts.write_target(tmp_path / "target")
    context = Context(
        folder,
        target=parse_target_config(drafts.target_config(), where="target", name="target"),
        target_text=str(target),
    )
    facts = context.scan.embedding
    assert facts is not None
    assert facts.differing_rows == 2
    assert facts.max_difference == pytest.approx(0.5, rel=0.02)


def test_cosines() -> None:
    one = np.array([[1.0, 0.0], [1.0, 1.0], [0.0, 0.0], [np.nan, 1.0]], np.float32)
    other = np.array([[2.0, 0.0], [1.0, -1.0], [1.0, 1.0], [1.0, 1.0]], np.float32)
    assert cosine(one, other) == pytest.approx([1.0, 0.0, 0.0, 2**-0.5])


@pytest.mark.slow
def test_memory_does_not_grow_with_the_draft(tmp_path: Path) -> None:
    """A draft of 160 MB in less than 128 MB, of which the interpreter and numpy are 40."""
    raw = drafts.native(vocab_size=200_000, draft_vocab_size=200_000, hidden_size=192, num_attention_heads=6)
    raw["num_key_value_heads"] = 3
    folder = tmp_path / "draft"
    code = (
        "import sys, json; from pathlib import Path; from tests import tiny;"
        "tiny.write_draft(Path(sys.argv[1]), json.loads(sys.argv[2]))"
    )
    subprocess.run(
        [sys.executable, "-c", code, str(folder), json.dumps(raw)], check=True, cwd=Path(__file__).parents[2]
    )
    assert (folder / "model.safetensors").stat().st_size > 150e6
    command = [sys.executable, "-m", "eagle3pack", "verify", str(folder), "--engine", "none", "--json"]
    child = os.posix_spawn(
        sys.executable,
        command,
        os.environ,
        file_actions=[(os.POSIX_SPAWN_OPEN, 1, os.devnull, os.O_WRONLY, 0)],
    )
    _, status, usage = os.wait4(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    assert isinstance(usage, resource.struct_rusage)
    own = resource.getrusage(
        resource.RUSAGE_SELF
    ).ru_maxrss  # a child's figure includes its parent's at the fork
    assert usage.ru_maxrss < max(128_000, own + 16_000)
