"""Real vLLM, through the command that users run, against the engine in this process.

Both run in float32, where greedy text does not depend on the shape of a batch, so that what is left
between them are differences of the algorithm.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from eagle3pack.documents import schema_problems
from tests.integration.real_models import CACHE, DRAFT, padded_target, smollm2_target, vllm_command

pytestmark = pytest.mark.vllm

PROMPTS = ["--limit", "24", "--max-tokens", "64", "--max-concurrency", "16"]
EAGER_FLOAT32 = ["--enforce-eager", "--dtype", "float32", "--max-model-len", "2048"]
IN_PROCESS = ["--engine", "reference", "--dtype", "float32", "--device", "cpu", "--no-probes"]
K = 3
TIME_LIMIT_S = 1800


def verify(
    out: Path, target: Path, *arguments: str, draft: Path = DRAFT, fails: bool = False
) -> dict[str, Any]:
    """Run `eagle3pack verify` and return its report."""
    report = out / "report.json"
    command = [sys.executable, "-m", "eagle3pack", "verify", str(draft), "--target", str(target)]
    result = subprocess.run(
        [*command, "--report", str(report), *arguments],
        capture_output=True,
        text=True,
        timeout=TIME_LIMIT_S,
        env={**os.environ, "TMPDIR": str(out)},
        check=False,
    )
    assert result.returncode == (3 if fails else 0), result.stdout[-3000:] + result.stderr[-3000:]
    document: dict[str, Any] = json.loads(report.read_text())
    assert schema_problems(document, "report") == []
    return document


def only_run(report: dict[str, Any]) -> dict[str, Any]:
    [run] = report["smoke"]["runs"]
    assert isinstance(run, dict)
    return run


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    CACHE.mkdir(exist_ok=True)
    return tmp_path_factory.mktemp("vllm")


@pytest.fixture(scope="module")
def reference(out: Path) -> dict[str, Any]:
    """The engine in this process."""
    (out / "reference").mkdir()
    return only_run(verify(out / "reference", smollm2_target(), *IN_PROCESS, *PROMPTS))


@pytest.fixture(scope="module")
def vllm_tp1(out: Path) -> dict[str, Any]:
    """vLLM on one rank, with and without the draft."""
    (out / "tp1").mkdir()
    arguments = ["--engine", "vllm", "--vllm-command", vllm_command(), "--baseline", *EAGER_FLOAT32, *PROMPTS]
    return only_run(verify(out / "tp1", smollm2_target(), *arguments))


@pytest.fixture(scope="module")
def vllm_tp4(out: Path) -> dict[str, Any]:
    """What a user with four GPUs runs, on four ranks of the CPU build."""
    (out / "tp4").mkdir()
    arguments = ["--engine", "vllm", "--vllm-command", vllm_command(), "--tensor-parallel-size", "4"]
    return only_run(verify(out / "tp4", padded_target(), *arguments, *EAGER_FLOAT32, *PROMPTS))


def assert_same_acceptance(ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    """Within 2 % in length, and at each position within 0.02 or three standard errors of the difference."""
    assert min(ours["drafts"], theirs["drafts"]) > 500
    assert ours["mean_accepted_length"] == pytest.approx(theirs["mean_accepted_length"], rel=0.02)
    rates = zip(ours["per_position_accept_rate"], theirs["per_position_accept_rate"], strict=True)
    for a, b in rates:
        error = math.sqrt(a * (1 - a) / ours["drafts"] + b * (1 - b) / theirs["drafts"])
        assert abs(a - b) <= max(0.02, 3 * error)


def test_the_reference_engine_says_what_the_target_says(tmp_path: Path) -> None:
    few = ["--baseline", "--limit", "8", "--max-tokens", "48"]
    run = only_run(verify(tmp_path, smollm2_target(), *IN_PROCESS, *few))
    assert run["agreement"]["share"] == 1.0
    assert run["accepted_tokens"] > 0


def test_vllm_and_the_reference_engine_agree(vllm_tp1: dict[str, Any], reference: dict[str, Any]) -> None:
    assert_same_acceptance(reference, vllm_tp1)


def test_four_ranks_reach_the_acceptance_of_one(vllm_tp4: dict[str, Any], vllm_tp1: dict[str, Any]) -> None:
    assert vllm_tp4["tensor_parallel_size"] == 4
    assert vllm_tp4["tp_source"] == "measured"
    assert any("VLLM_CPU_OMP_THREADS_BIND=" in note for note in vllm_tp4["notes"])
    assert_same_acceptance(vllm_tp4, vllm_tp1)


def test_what_the_report_says_of_the_engine(vllm_tp1: dict[str, Any]) -> None:
    assert vllm_tp1["engine"]["name"] == "vllm"
    assert vllm_tp1["engine"]["device"] == "cpu"
    assert vllm_tp1["engine"]["runner"] == "V1"
    assert vllm_tp1["tensor_parallel_size"] == 1
    assert vllm_tp1["target"]["dtype"] == "float32"
    assert vllm_tp1["draft_tokens"] == K * vllm_tp1["drafts"]
    assert vllm_tp1["mean_accepted_length_interval"]["over"] == "prompts"
    assert vllm_tp1["mean_accepted_length_interval"]["n"] == 24


def test_vllm_with_the_draft_says_what_it_says_without(vllm_tp1: dict[str, Any]) -> None:
    """Mostly: its kernels round differently for other batch shapes, and a tie may fall the other way."""
    assert vllm_tp1["baseline"]["num_speculative_tokens"] == 0
    assert vllm_tp1["agreement"]["share"] >= 0.9


def test_the_probes_pass(vllm_tp1: dict[str, Any]) -> None:
    outcome = {probe["name"]: probe["status"] for probe in vllm_tp1["probes"]}
    assert outcome.pop("long_prompt") == "not_applicable"  # served with 2048 tokens, the draft has 8192
    assert set(outcome.values()) == {"passed"}, vllm_tp1["probes"]


def test_a_draft_that_vllm_refuses_is_explained(out: Path) -> None:
    """The config promises wider layers than the file has; no static check stands before vLLM here."""
    from eagle3pack.draft.config import parse_draft_config
    from eagle3pack.draft.target import read_target
    from eagle3pack.verify.smoke.launch import EngineOptions
    from eagle3pack.verify.smoke.options import SmokeOptions, Subject
    from eagle3pack.verify.smoke.run import run_smoke

    draft = out / "refused"
    shutil.copytree(DRAFT, draft)
    config = json.loads((draft / "config.json").read_text()) | {"intermediate_size": 2048}
    (draft / "config.json").write_text(json.dumps(config))
    target = smollm2_target()
    subject = Subject(
        draft,
        str(draft),
        None,
        parse_draft_config(config, where="config.json"),
        str(target),
        read_target(target),
    )
    options = SmokeOptions(
        engine="vllm",
        vllm_command=vllm_command(),
        engine_options=EngineOptions(enforce_eager=True, max_model_len=1024),
        log_path=out / "refused.log",
    )
    result = run_smoke(options, subject)
    assert result.status == "failed"
    assert "C12" in result.reason
    assert "exceeds dimension size" in result.reason
    assert str(out / "refused.log") in result.hint
    assert left_processes("refused") == []


def test_an_interrupted_verify_leaves_no_process(out: Path) -> None:
    (out / "interrupted").mkdir()
    log = out / "interrupted" / "vllm.log"
    command = [sys.executable, "-m", "eagle3pack", "verify", str(DRAFT), "--target", str(smollm2_target())]
    arguments = [
        "--engine",
        "vllm",
        "--vllm-command",
        vllm_command(),
        *EAGER_FLOAT32,
        "--engine-log",
        str(log),
    ]
    ours = subprocess.Popen([*command, *arguments], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 120
    while not (log.exists() and "EngineCore pid=" in log.read_text()):  # a worker process is there
        assert time.monotonic() < deadline
        assert ours.poll() is None
        time.sleep(0.2)
    ours.send_signal(signal.SIGINT)
    assert ours.wait(timeout=60) == 130
    pids = {int(word.split(")")[0]) for word in log.read_text().split("pid=")[1:]}
    assert len(pids) >= 2
    assert not [pid for pid in pids if Path(f"/proc/{pid}").exists()]


def left_processes(word: str) -> list[str]:
    """Command lines of running vLLM servers that hold a word."""
    lines = []
    for folder in Path("/proc").iterdir():
        try:
            line = (folder / "cmdline").read_bytes().decode(errors="replace")
        except (OSError, UnicodeDecodeError):
            continue
        if "vllm" in line and word in line and "pytest" not in line:
            lines.append(line)
    return lines
