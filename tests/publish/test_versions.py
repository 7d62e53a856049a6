"""The same flow with other versions of the clients, through Xet, and in parts.

EAGLE3PACK_HUB_CLIENT_PYTHONS lists interpreters, separated by colons, each with eagle3pack's dependencies
for publishing and another huggingface_hub or modelscope_hub.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.publish.conftest import HF, Place
from tests.publish.hubs.huggingface import HuggingFace
from tests.publish.hubs.modelscope import ModelScope
from tests.publish.hubs.server import Fault
from tests.publish.runner import Runner

PYTHONS = [path for path in os.environ.get("EAGLE3PACK_HUB_CLIENT_PYTHONS", "").split(":") if path]


@contextmanager
def a_place(tmp_path: Path, pristine: Path, runner: Runner, part_bytes: int | None = None) -> Iterator[Place]:
    shutil.copytree(pristine, tmp_path / "work")
    with (
        HuggingFace(tmp_path / "hub-hf", part_bytes=part_bytes) as hf,
        ModelScope(tmp_path / "hub-ms") as ms,
    ):
        yield Place(tmp_path / "work", runner, hf, ms)  # type: ignore[arg-type]


def test_in_parts(tmp_path: Path, pristine: Path, runner: Runner) -> None:
    with a_place(tmp_path, pristine, runner, part_bytes=50_000) as place:
        assert place.publish(to=(HF,)).code == 0
        assert place.hf.count("POST", "^/complete/") == 2
        for path in place.draft.glob("*.safetensors"):
            assert place.content(place.hf)[path.name] == path.read_bytes()


def test_through_xet(tmp_path: Path, pristine: Path) -> None:
    with Runner(tmp_path, xet=True) as runner, a_place(tmp_path, pristine, runner) as place:
        outcome = place.publish()
        assert outcome.code == 0, outcome.stderr
        assert place.hf.count("GET", "xet-write-token") and not place.hf.count("PUT", "^/storage/")
        assert len(place.hf_commits) == 2
        assert place.publish().code == 0
        assert len(place.hf_commits) == 2


def test_an_xet_storage_that_is_not_there(tmp_path: Path, pristine: Path) -> None:
    """huggingface_hub#4786: no fallback to LFS."""
    with Runner(tmp_path, xet=True) as runner, a_place(tmp_path, pristine, runner) as place:
        place.hf.faults.append(Fault("GET", "xet-write-token", status=404, times=-1))
        outcome = place.publish(to=(HF,))
        assert outcome.code == 7 and "HF_HUB_DISABLE_XET=1" in outcome.stderr
        assert len(place.hf_commits) == 1


@pytest.mark.slow
@pytest.mark.parametrize("python", PYTHONS or [pytest.param("", marks=pytest.mark.skip("none named"))])
@pytest.mark.parametrize("way", ["one PUT", "parts", "Xet"])
def test_with_another_version(tmp_path: Path, pristine: Path, python: str, way: str) -> None:
    with (
        Runner(tmp_path, python=python, xet=way == "Xet") as runner,
        a_place(tmp_path, pristine, runner, 50_000 if way == "parts" else None) as place,
    ):
        place.hf.faults.append(Fault("POST", "/commit/", drop="after"))
        outcome = place.publish("--tag", "v1", "--public")
        assert outcome.code == 0, outcome.stderr
        assert len(place.hf_commits) == 2 and len(place.ms_commits) == 2
        puts = place.puts()
        (place.draft / "LICENSE").write_text("MIT, again\n")
        place.hf.faults.append(Fault("POST", "/commit/", status=503))
        outcome = place.publish()
        assert outcome.code == 0, outcome.stderr
        assert len(place.hf_commits) == 3 and place.puts() == puts
        place.hf.faults.append(Fault("POST", "/commit/", status=412, body={"error": "moved"}, times=-1))
        (place.draft / "LICENSE").write_text("MIT, once more\n")
        assert place.publish(to=(HF,)).code == 5
