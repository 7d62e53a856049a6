"""SOURCE and TARGET on hubs, through the real clients, against protocol servers on this machine."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from eagle3pack.errors import UsageError
from eagle3pack.sources import Location, known_sha256, parse_location
from tests.publish.hubs import huggingface, modelscope
from tests.publish.hubs.huggingface import HuggingFace
from tests.publish.hubs.modelscope import ModelScope
from tests.publish.hubs.server import StoredFile
from tests.tiny import draft_tensors, native_config, target_config, write_draft, write_tensors

CLOSED_PORT = "http://localhost:9"  # discard: nothing listens there


def test_locations_are_read_as_users_write_them() -> None:
    assert parse_location("./draft") == Location("local", "./draft")
    assert parse_location("hf:org/name") == Location("hf", "org/name")
    assert parse_location("ms:org/name@v1.0") == Location("ms", "org/name", "v1.0")
    assert str(parse_location("hf:org/name@abc")) == "hf:org/name@abc"


@pytest.mark.parametrize(
    "text", ["hf:name", "hf:", "ms:a/b/c", "hf:../etc", "hf:a/..", "hf:org/na me", "hf:org/name@"]
)
def test_a_hub_without_org_and_name_says_what_is_expected(text: str) -> None:
    with pytest.raises(UsageError, match="must be ORG/NAME"):
        parse_location(text)


class Hubs:
    """Both hubs with a draft and a target on each, and the command line in a process of its own."""

    def __init__(self, root: Path, hf: HuggingFace, ms: ModelScope) -> None:
        self.root, self.hf, self.ms = root, hf, ms  # type: ignore[assignment]
        self.env = {
            "HF_ENDPOINT": hf.endpoint,
            "HF_HOME": str(root / "hf-home"),
            "HF_HUB_DISABLE_XET": "1",
            "HF_HUB_DISABLE_TELEMETRY": "1",
            "MODELSCOPE_ENDPOINT": ms.endpoint,
            "MODELSCOPE_CACHE": str(root / "ms-cache"),
            "MODELSCOPE_HOME": str(root / "ms-home"),
        }

    def put(self, repo_id: str, folder: Path, *, private: bool = False) -> None:
        """Make a repository with the files of a folder on both hubs."""
        files = {path.name: self._stored(self.hf, path) for path in folder.iterdir()}
        commit = huggingface.Commit("1" * 40, "upload", files)
        self.hf.repos[repo_id] = huggingface.Repo(private, {"main": [commit]}, tags={"v1": "1" * 40})
        files = {path.name: self._stored(self.ms, path) for path in folder.iterdir()}
        visibility = modelscope.PRIVATE if private else modelscope.PUBLIC
        self.ms.repos[repo_id] = modelscope.Repo(
            visibility, "MIT", [modelscope.Commit("2" * 40, "upload", files)]
        )

    @staticmethod
    def _stored(hub: Any, path: Path) -> StoredFile:
        stored = hub.store(path.read_bytes())
        return StoredFile(stored.sha256, stored.size, lfs=path.suffix == ".safetensors")

    def convert(self, *arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
        return self.run("convert", *arguments, **env)

    def run(self, *arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "eagle3pack", *arguments]
        environment = {**os.environ, **self.env, **env}
        for token in ("HF_TOKEN", "MODELSCOPE_API_TOKEN"):
            if token not in env:
                environment.pop(token, None)
        return subprocess.run(
            command, cwd=self.root, env=environment, capture_output=True, text=True, check=False, timeout=120
        )


@pytest.fixture
def hubs(tmp_path: Path) -> Iterator[Hubs]:
    with HuggingFace(tmp_path / "hf") as hf, ModelScope(tmp_path / "ms") as ms:
        found = Hubs(tmp_path, hf, ms)  # type: ignore[arg-type]
        draft = write_draft(tmp_path / "draft")
        (draft / "README.md").write_text("not part of the model")
        found.put("org/draft", draft)
        target = tmp_path / "target"
        target.mkdir()
        (target / "config.json").write_text(json.dumps(target_config()))
        embedding = draft_tensors(native_config())["embed_tokens.weight"]
        write_tensors(target / "model-00001-of-00002.safetensors", {"model.embed_tokens.weight": embedding})
        write_tensors(
            target / "model-00002-of-00002.safetensors", {"other": ("BF16", (500_000,), bytes(1_000_000))}
        )
        index = {
            "model.embed_tokens.weight": "model-00001-of-00002.safetensors",
            "other": "model-00002-of-00002.safetensors",
        }
        (target / "model.safetensors.index.json").write_text(
            json.dumps({"metadata": {}, "weight_map": index})
        )
        found.put("org/target", target)
        yield found


@pytest.mark.parametrize("place", ["hf", "ms"])
def test_a_draft_on_a_hub_is_converted_and_its_revision_recorded(hubs: Hubs, place: str) -> None:
    run = hubs.convert(f"{place}:org/draft", "gqa", "--target", f"{place}:org/target")
    assert run.returncode == 0, run.stderr
    record = json.loads((hubs.root / "gqa" / "eagle3pack.json").read_text())
    assert record["source"]["place"] == place
    assert record["source"]["id"] == "org/draft"
    local = hubs.convert("draft", "gqa-local", "--num-kv-heads", "2")
    assert local.returncode == 0, local.stderr
    ours, theirs = (hubs.root / name / "model.safetensors" for name in ("gqa", "gqa-local"))
    assert ours.read_bytes() == theirs.read_bytes()
    if place == "hf":
        assert record["source"]["revision"] == "1" * 40
        weights = (hubs.root / "draft" / "model.safetensors").read_bytes()
        assert (
            record["source"]["files"][0]["sha256"] == hashlib.sha256(weights).hexdigest()
        )  # from the cache's name


@pytest.mark.parametrize("target", ["hf:org/target", "org/target", "hf:org/target@v1"])
def test_a_report_names_the_commit_of_draft_and_target(hubs: Hubs, target: str) -> None:
    hubs.run("verify", "hf:org/draft", "--target", target, "--engine", "none", "--report", "report.json")
    report = json.loads((hubs.root / "report.json").read_text())
    assert [report[model]["revision"] for model in ("draft", "target")] == ["1" * 40, "1" * 40]


def test_of_a_target_only_what_is_needed_is_fetched(hubs: Hubs) -> None:
    run = hubs.convert("hf:org/draft", "gqa", "--target", "hf:org/target", "--strip-shared")
    assert run.returncode == 0, run.stderr
    assert "left out" in run.stderr
    assert hubs.hf.count("HEAD", "/org/target/.*model-00001") == 1
    assert hubs.hf.count("HEAD", "/org/target/.*model-00002") == 0


def test_a_bare_id_is_looked_up_on_hugging_face(hubs: Hubs) -> None:
    run = hubs.convert("draft", "gqa", "--target", "org/target")
    assert run.returncode == 0, run.stderr
    assert "8 -> 2" in " ".join(run.stderr.split())


@pytest.mark.parametrize("place", ["hf", "ms"])
def test_what_a_hub_refuses_is_one_error_with_its_code(hubs: Hubs, place: str) -> None:
    missing = hubs.convert(f"{place}:org/nothing", "gqa", "--num-kv-heads", "2")
    assert missing.returncode in (4, 6), missing.stderr
    assert "Traceback" not in missing.stderr
    assert f"error: {place}:org/nothing" in missing.stderr
    revision = hubs.convert(f"{place}:org/draft@nowhere", "gqa", "--num-kv-heads", "2")
    assert revision.returncode == 6, revision.stderr
    assert "no such repository or revision" in revision.stderr
    assert not (hubs.root / "gqa").exists()


@pytest.mark.parametrize("place", ["hf", "ms"])
def test_without_a_network_the_message_says_so(hubs: Hubs, place: str) -> None:
    run = hubs.convert(
        f"{place}:org/draft",
        "gqa",
        "--num-kv-heads",
        "2",
        HF_ENDPOINT=CLOSED_PORT,
        MODELSCOPE_ENDPOINT=CLOSED_PORT,
    )
    assert run.returncode == 7, run.stderr
    assert "no connection to the hub" in run.stderr
    assert "Traceback" not in run.stderr


def test_a_cached_draft_needs_no_network(hubs: Hubs) -> None:
    assert hubs.convert("hf:org/draft", "one", "--num-kv-heads", "2").returncode == 0
    run = hubs.convert("hf:org/draft", "two", "--num-kv-heads", "2", HF_HUB_OFFLINE="1")
    assert run.returncode == 0, run.stderr


def test_the_name_of_a_blob_in_the_cache_is_its_sha256(tmp_path: Path) -> None:
    blob = tmp_path / "blobs" / ("a" * 64)
    blob.parent.mkdir()
    blob.write_bytes(b"")
    (tmp_path / "model.safetensors").symlink_to(blob)
    assert known_sha256(tmp_path / "model.safetensors") == "a" * 64
    assert known_sha256(blob.with_name("other")) is None
