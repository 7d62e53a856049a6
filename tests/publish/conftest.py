"""A draft, its report, both hubs, and the command that publishes from one to the others."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.publish import inputs
from tests.publish.hubs import huggingface, modelscope
from tests.publish.hubs.huggingface import HuggingFace
from tests.publish.hubs.modelscope import ModelScope
from tests.publish.runner import Outcome, Runner
from tests.tiny import write_draft

HF, MS = "hf:org/tiny", "ms:org/tiny"


@pytest.fixture(scope="session")
def runner(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runner]:
    with Runner(tmp_path_factory.mktemp("runner")) as running:
        yield running


@pytest.fixture(scope="session")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a draft, publish.yaml and report.json."""
    root = tmp_path_factory.mktemp("pristine")
    folder = write_draft(root / "draft", shards=2)
    (folder / "LICENSE").write_text("MIT\n")
    (folder / "training_state.pt").write_bytes(b"not to be published")
    (root / "publish.yaml").write_text(inputs.SETTINGS)
    inputs.write_report(root / "report.json", inputs.report(folder))
    return root


class Place:
    """A working folder beside two hubs.

    Attributes:
        root: holds `draft/`, publish.yaml and report.json.
        hf, ms: the servers.
    """

    def __init__(self, root: Path, runner: Runner, hf: HuggingFace, ms: ModelScope) -> None:
        self.root, self.runner, self.hf, self.ms = root, runner, hf, ms
        self.draft = root / "draft"
        self.env = {
            "HF_ENDPOINT": hf.endpoint,
            "HF_TOKEN": huggingface.TOKEN,
            "MODELSCOPE_ENDPOINT": ms.endpoint,
            "MODELSCOPE_API_TOKEN": modelscope.TOKEN,
        }

    def publish(self, *options: str, to: tuple[str, ...] = (HF, MS), yes: bool = True) -> Outcome:
        """Run the command."""
        argv = ["publish", "draft", *options]
        if "--report" not in options and "--no-report" not in options:
            argv += ["--report", "report.json"]
        argv = [word for word in argv if word != "--no-report"]
        for destination in to:
            argv += ["--to", destination]
        if yes and not {"--dry-run", "--check-card"} & set(options):
            argv.append("--yes")
        return self.runner.run(argv, cwd=self.root, env=self.env)

    @property
    def hf_commits(self) -> list[huggingface.Commit]:
        return self.hf.repos["org/tiny"].branches["main"] if "org/tiny" in self.hf.repos else []

    @property
    def ms_commits(self) -> list[modelscope.Commit]:
        return self.ms.repos["org/tiny"].commits if "org/tiny" in self.ms.repos else []

    def puts(self) -> int:
        """Blobs sent to either hub."""
        return self.hf.count("PUT", "^/storage/") + self.ms.count("PUT", "^/storage/")

    def content(self, hub: HuggingFace | ModelScope) -> dict[str, bytes]:
        """What stands on a hub now."""
        files = self.hf_commits[0].files if hub is self.hf else self.ms_commits[0].files
        return {path: hub.blobs.path(file.sha256).read_bytes() for path, file in files.items()}

    def rewrite_report(self, **changes: object) -> None:
        """Write another report on the draft."""
        inputs.write_report(self.root / "report.json", inputs.report(self.draft) | changes)


@pytest.fixture
def place(tmp_path: Path, runner: Runner, pristine: Path) -> Iterator[Place]:
    root = tmp_path / "work"
    shutil.copytree(pristine, root)
    with HuggingFace(tmp_path / "hf") as hf, ModelScope(tmp_path / "ms") as ms:
        yield Place(root, runner, hf, ms)  # type: ignore[arg-type]
