"""No hub in reach, by a closed port or one that never answers: one error, soon, with what to do."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.tiny import write_draft

CLOSED_PORT = "http://localhost:1"
IMPATIENT = """
from eagle3pack import sources
sources.SILENCE_S = 0.5
from eagle3pack.cli import main
main()
"""


def run(endpoint: str, folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {
        "HF_ENDPOINT": endpoint,
        "HF_HOME": str(folder / "hf"),
        "MODELSCOPE_ENDPOINT": endpoint,
        "MODELSCOPE_CACHE": str(folder / "ms"),
    }
    return subprocess.run(
        [sys.executable, "-c", IMPATIENT, *arguments],
        cwd=folder,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,  # what a person waits
    )


def assert_one_error_says_what_to_do(run: subprocess.CompletedProcess[str]) -> None:
    assert run.returncode == 7, run.stderr
    problem, hint = run.stderr.splitlines()
    assert problem.endswith("no connection to the hub, and the files are not in its cache")
    assert hint == "hint: Run it again with a network, or give a local folder."


@pytest.mark.parametrize("target", ["hf:org/target", "ms:org/target", "org/target"])
def test_a_target_that_cannot_be_fetched(target: str, tmp_path: Path) -> None:
    write_draft(tmp_path / "draft")
    assert_one_error_says_what_to_do(
        run(CLOSED_PORT, tmp_path, "verify", "draft", "--target", target, "--quick")
    )


def test_a_hub_that_never_answers(tmp_path: Path) -> None:
    with socket.create_server(("localhost", 0)) as server:  # takes connections, as a firewall swallows them
        endpoint = f"http://localhost:{server.getsockname()[1]}"
        convert = ("convert", "hf:org/draft", "gqa", "--num-kv-heads", "2")
        assert_one_error_says_what_to_do(run(endpoint, tmp_path, *convert))
