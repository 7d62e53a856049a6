"""What cannot be done is told before anything is read; what was asked for and not done has failed."""

from __future__ import annotations

import json
import shlex
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from eagle3pack.verify import command
from eagle3pack.verify.smoke import vllm
from eagle3pack.verify.smoke.process import GuardedProcess
from tests.cli import Cli
from tests.verify import drafts, faults
from tests.verify.smoke.support import fake_command


@pytest.fixture
def models(tmp_path: Path) -> tuple[Path, Path]:
    """A sound draft and the config of its target, without weights."""
    target = drafts.write_target(tmp_path / "target")
    for weights in target.glob("*.safetensors"):
        weights.unlink()
    return drafts.make().write(tmp_path / "draft"), target


@pytest.fixture
def unread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail where a draft is examined."""

    def examined(*arguments: Any, **options: Any) -> None:
        raise AssertionError("the draft was read first")

    monkeypatch.setattr(command, "run_verify", examined)


IMPOSSIBLE = {
    "--engine none --min-acceptance-length 2": "--min-acceptance-length: needs an engine",
    "--engine none --baseline --min-agreement 1": "--engine none",
    "--engine none --endpoint http://h:1": "--endpoint: needs an engine",
    "--quick --min-acceptance-length 2": "--quick runs none",
    "--quick --baseline": "--quick runs none",
    "--min-retention 0.9": "--min-retention: needs --against",
    "--min-agreement 0.9": "--min-agreement: needs --baseline",
    "--endpoint http://h:1 --vllm-command vllm": "starts a server",
    "--endpoint h:1": "is no URL",
    "--endpoint http://h:port": "is no URL",
    "--endpoint http://h:1 --baseline": "needs a second server",
    "--endpoint http://h:1 --block-size 16": "no effect on a server",
    "--engine reference": "holds no safetensors weights",
    "--engine reference --endpoint http://h:1": "is for --engine vllm",
    "--engine reference --vllm-command vllm": "is for --engine vllm",
    "--engine reference --enforce-eager": "is for --engine vllm",
    "--engine reference --engine-arg a=1": "is for --engine vllm",
    "--engine vllm --vllm-command /no/such/vllm": "no executable",
    "--engine vllm --vllm-command '\"'": "cannot be read",
    "--engine-arg port=1": "eagle3pack itself",
    "--engine-arg flag": "KEY=VALUE",
    "--dtype int8": "--dtype",
    "--device warp": "--device",
    "--category cooking": "has no category",
    "--prompts {draft}/model.safetensors": "model.safetensors",
    "--against {draft}-none": "no such folder",
    "--against {draft}/..": "config.json: does not exist",
}


@pytest.mark.usefixtures("unread")
@pytest.mark.parametrize("arguments", IMPOSSIBLE)
def test_a_mistake_is_told_first(arguments: str, models: tuple[Path, Path], cli: Cli) -> None:
    draft, target = models
    result = cli("verify", draft, "--target", target, *shlex.split(arguments.format(draft=draft)))
    assert result.code == (3 if "--prompts" in arguments or "--against" in arguments else 2), result.err
    assert IMPOSSIBLE[arguments] in result.err


@pytest.mark.usefixtures("unread")
@pytest.mark.parametrize("arguments", ["--engine reference", "--endpoint http://h:1", "--baseline"])
def test_an_engine_needs_a_target(arguments: str, models: tuple[Path, Path], cli: Cli) -> None:
    result = cli("verify", models[0], *arguments.split())
    assert (result.code, "needs --target" in result.err) == (2, True)


@pytest.mark.parametrize("name", ["nowhere", "./nowhere", "x" * 5000])
def test_a_target_that_is_not_there_is_called_so(name: str, models: tuple[Path, Path], cli: Cli) -> None:
    result = cli("verify", models[0], "--target", name, "--engine", "reference", "--report", "report.json")
    assert result.code == 3
    assert "no such folder" in result.err or "cannot be opened" in result.err


def test_a_gate_without_weights_fails(models: tuple[Path, Path], tmp_path: Path, cli: Cli) -> None:
    draft, target = models
    report = tmp_path / "report.json"
    result = cli(
        *("verify", draft, "--target", target, "--min-acceptance-length", "2", "--json", "--report", report)
    )
    assert result.code == 3
    assert "asked for and not done: --min-acceptance-length 2.0" in result.err
    assert json.loads(result.out)["passed"] is False
    assert json.loads(report.read_text())["smoke"]["status"] == "not_run"
    assert cli("verify", draft, "--target", target).code == 0


def test_a_gate_behind_errors_is_named(models: tuple[Path, Path], tmp_path: Path, cli: Cli) -> None:
    draft = faults.mha_weights().write(tmp_path / "faulty")
    result = cli("verify", draft, "--target", models[1], "--baseline", "--min-agreement", "1")
    assert result.code == 3
    assert "asked for and not done: --min-agreement 1.0, --baseline" in result.out


def test_a_gate_that_is_not_reached_is_said_beside_json(
    models: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cli: Cli
) -> None:
    (tmp_path / "state").mkdir()
    monkeypatch.setenv("FAKE_VLLM_STATE", str(tmp_path / "state"))
    monkeypatch.setattr(vllm, "GuardedProcess", partial(GuardedProcess, grace_s=0.1))
    monkeypatch.setattr(vllm, "_POLL_S", 0.05)
    prompts = tmp_path / "one.txt"
    prompts.write_text("one\n")
    shared = [
        *("verify", models[0], "--target", models[1], "--vllm-command", fake_command(tmp_path)),
        *("--prompts", prompts, "--no-probes", "--max-tokens", "64", "--tensor-parallel-size", "1"),
    ]
    result = cli(*shared, "--min-acceptance-length", "3.5", "--json")
    assert (result.code, json.loads(result.out)["smoke"]["status"]) == (3, "failed")
    assert "error: smoke test failed: mean accepted length 3.000 is below 3.5" in result.err
    result = cli(*shared, "--quick")
    assert (result.code, "one: 1 prompt, 1 answer" in result.out) == (0, True)


def test_what_only_vllm_reads_is_said_to_be_ignored(models: tuple[Path, Path], cli: Cli) -> None:
    result = cli("verify", models[0], "--target", models[1], "--block-size", "16", "--enforce-eager")
    assert result.code == 0
    assert "ignored: --enforce-eager, --block-size (only vLLM reads that, and it does not run)" in result.err
