"""A disk that fills while something is written: exit code 7, nothing half-written, and what to do.

RLIMIT_FSIZE stands for the disk: the kernel refuses to let any file grow beyond it.
"""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.journeys.test_whole_way import PUBLISH_YAML
from tests.verify import drafts

PUBLISH = "publish draft --report report.json --to hf:org/x --dry-run --offline --allow-unverified test"
COMMANDS = {
    "convert draft gqa --num-kv-heads 4": 50_000,
    "convert draft gqa --num-kv-heads 4 --method als": 50_000,
    "convert draft gqa --num-kv-heads 4 --retrain-with torchspec retrain": 50_000,
    "verify draft --target target --engine none --report new.json": 2_000,
    "verify draft --target target --engine none --fix mended": 50_000,
    PUBLISH: 2_000,
    f"{PUBLISH} --render-to cards": 2_000,
    PUBLISH.replace("--dry-run --offline", "--yes"): 2_000,
}


def run(arguments: str, folder: Path, limit: int | None = None) -> subprocess.CompletedProcess[str]:
    def fill() -> None:
        if limit is not None:
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))

    (folder / "tmp").mkdir(exist_ok=True)
    return subprocess.run(
        [sys.executable, "-m", "eagle3pack", *arguments.split()],
        cwd=folder,
        env={**os.environ, "TMPDIR": str(folder / "tmp")},
        preexec_fn=fill,
        capture_output=True,
        text=True,
        check=False,
    )


def files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A draft of eight key/value heads, its target, a report and publish.yaml."""
    root = tmp_path_factory.mktemp("disk")
    drafts.torchspec().write(root / "draft")
    drafts.write_target(root / "target")
    (root / "publish.yaml").write_text(PUBLISH_YAML)
    verified = run("verify draft --target target --engine none --report report.json", root)
    assert verified.returncode == 0, verified.stderr
    return root


@pytest.mark.parametrize("arguments", COMMANDS)
def test_a_disk_that_fills_leaves_nothing_behind(arguments: str, place: Path) -> None:
    before = files(place)
    full = run(arguments, place, COMMANDS[arguments])
    assert full.returncode == 7, full
    assert "Traceback" not in full.stderr
    assert "hint: " in full.stderr
    assert files(place) == before
