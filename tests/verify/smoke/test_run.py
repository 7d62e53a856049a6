"""The whole smoke test on a fake vLLM, through the function that `verify` calls."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from eagle3pack.documents import schema_problems
from eagle3pack.draft.config import parse_draft_config
from eagle3pack.draft.target import read_target
from eagle3pack.errors import UsageError
from eagle3pack.verify.smoke import vllm
from eagle3pack.verify.smoke.options import SmokeOptions, Subject
from eagle3pack.verify.smoke.process import GuardedProcess
from eagle3pack.verify.smoke.run import SmokeResult, run_smoke
from eagle3pack.verify.smoke.vllm import Limits
from tests.tiny import native_config, target_config, write_draft
from tests.verify.smoke.support import fake_command, processes


@pytest.fixture
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the fake vLLM leaves its traces."""
    folder = tmp_path / "state"
    folder.mkdir()
    monkeypatch.setenv("FAKE_VLLM_STATE", str(folder))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3")

    class Impatient(GuardedProcess):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments, grace_s=0.1)

    monkeypatch.setattr(vllm, "GuardedProcess", Impatient)
    monkeypatch.setattr(vllm, "_POLL_S", 0.05)
    return folder


@pytest.fixture
def subject(tmp_path: Path) -> Subject:
    """A tiny draft and the folder of a target."""
    draft = write_draft(tmp_path / "draft")
    target = tmp_path / "target"
    target.mkdir()
    (target / "config.json").write_text(json.dumps(target_config(num_key_value_heads=4)))
    (target / "model.safetensors").write_bytes(b"")
    return Subject(
        draft,
        "./draft",
        "0" * 64,
        parse_draft_config(native_config(), where="config.json"),
        str(target),
        read_target(target),
        command="eagle3pack verify ./draft",
    )


@pytest.fixture
def options(tmp_path: Path) -> SmokeOptions:
    """Few prompts on the fake vLLM."""
    (tmp_path / "questions.jsonl").write_text(
        '{"category": "a", "turns": ["one", "two"]}\n{"category": "b", "turns": ["three"]}\n'
        '{"category": "a", "turns": ["four"]}\n'
    )
    return SmokeOptions(
        engine="vllm",
        vllm_command=str(fake_command(tmp_path)),
        prompts=tmp_path / "questions.jsonl",
        max_tokens=16,
        max_concurrency=2,
        probes=False,
        limits=Limits(20, 20),
        log_path=tmp_path / "report.vllm.log",
    )


def valid(result: SmokeResult) -> dict[str, Any]:
    """The run, held against the schema."""
    assert result.run is not None
    assert schema_problems(result.run, "report", "smoke_run") == []
    return result.run


def test_a_run_with_all_comparisons(
    tmp_path: Path, state: Path, subject: Subject, options: SmokeOptions
) -> None:
    asked = replace(
        options,
        baseline=True,
        against=subject.draft,
        against_source="hf:org/mha",
        probes=True,
        min_acceptance_length=2.9,
        min_retention=0.95,
        min_agreement=1.0,
    )
    said: list[str] = []
    result = run_smoke(asked, subject, say=said.append)
    run = valid(result)
    assert (result.status, result.reason) == ("passed", "")
    assert result.section == {"status": "passed", "reason": "", "runs": [run]}
    assert run["dataset"]["name"] == "questions"
    assert (run["dataset"]["n_prompts"], run["dataset"]["n_requests"]) == (3, 4)
    assert run["dataset"]["categories"] == ["a", "b"]
    assert run["tensor_parallel_size"] == 4
    assert (run["drafts"], run["draft_tokens"], run["accepted_tokens"]) == (20, 60, 40)
    assert run["accepted_per_position"] == [20, 20, 0]
    assert run["mean_accepted_length"] == 3.0
    assert run["output_tokens"] == 64
    assert run["command"] == "eagle3pack verify ./draft"
    assert "--speculative-config" in run["engine_command"]
    assert run["draft"] == {"source": "./draft", "digest": "0" * 64}
    assert run["baseline"]["draft"] is None
    assert run["baseline"]["drafts"] == 0
    assert run["agreement"]["share"] == 1.0
    assert run["against"]["draft"] == {"source": "hf:org/mha", "digest": None}
    assert run["retention"] == 1.0
    assert {probe["status"] for probe in run["probes"]} == {"passed"}
    assert processes(state) == []
    for name in ("report.vllm.log", "report.vllm.baseline.log", "report.vllm.against.log"):
        assert (tmp_path / name).exists()
    for words in ("mean accepted length         3.000", "speed-up", "retention", "position 3", "probe burst"):
        assert words in result.text


@pytest.mark.parametrize(
    ("fault", "changes", "reason"),
    [
        ("nothing_accepted", {}, "no draft token was accepted in 60 drafts (mean accepted length 1.0)"),
        ("", {"min_acceptance_length": 3.5}, "mean accepted length 3.000 is below 3.5"),
        ("no_speculation", {}, "no speculative counters"),
        ("dies", {}, "died while serving"),
        ("out_of_memory", {}, "ran out of memory while loading"),
        ("wrong_target", {}, "check K11"),
        (
            "diverges",
            {"baseline": True, "min_agreement": 0.5},
            "0 of 3 greedy answers are those without a draft",
        ),
        ("short_draft", {"probes": True}, "probe long_prompt: no draft in 32 tokens"),
    ],
)
def test_what_fails_a_run(
    fault: str,
    changes: dict[str, Any],
    reason: str,
    state: Path,
    subject: Subject,
    options: SmokeOptions,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("FAKE_VLLM", fault)
    result = run_smoke(replace(options, **changes), subject)
    assert result.status == "failed"
    assert reason in result.reason
    assert processes(state) == []
    if result.run is not None:
        valid(result)
    if fault == "nothing_accepted":
        causes = [line.split(":")[0].strip() for line in result.reason.splitlines()[1:]]
        assert causes[:4] == ["1. auxiliary layers", "2. d2t", "3. fc or the norms around it", "4. RoPE"]
        assert "another target" in causes[4]


def test_divergent_answers_alone_do_not_fail(
    state: Path, subject: Subject, options: SmokeOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_VLLM", "diverges")
    result = run_smoke(replace(options, baseline=True), subject)
    run = valid(result)
    assert result.status == "passed"
    assert run["agreement"]["divergences"][0]["position"] == 5
    assert "after 5 tokens" in result.text


def test_the_default_size_is_lowered_and_a_given_one_is_not(
    state: Path, subject: Subject, options: SmokeOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    said: list[str] = []
    run = valid(run_smoke(options, subject, say=said.append))
    assert run["tensor_parallel_size"] == 2
    assert said[0].startswith("tensor-parallel size 2 instead of 4")
    with pytest.raises(UsageError, match="4 ranks need as many GPUs"):
        run_smoke(replace(options, tensor_parallel_size=4), subject)


@pytest.mark.parametrize("changes", [{"baseline": True}, {"against": Path("other")}])
def test_an_endpoint_has_no_second_server(
    changes: dict[str, Any], subject: Subject, options: SmokeOptions
) -> None:
    asked = replace(options, vllm_command=None, endpoint="http://127.0.0.1:9", **changes)
    with pytest.raises(UsageError, match="needs a second server"):
        run_smoke(asked, subject)


def test_no_engine(subject: Subject, options: SmokeOptions) -> None:
    result = run_smoke(replace(options, engine="none"), subject)
    assert (result.status, result.run) == ("not_run", None)
    unknown = replace(subject, target_source="org/not-here")
    result = run_smoke(replace(options, engine="auto", vllm_command=None), unknown)
    assert result.status == "not_run"
    assert "weights are not on this machine" in result.reason


def test_a_target_without_weights_cannot_be_run(subject: Subject, options: SmokeOptions) -> None:
    config_only = replace(subject, target_source=str(Path(subject.target_source) / "config.json"))
    with pytest.raises(UsageError, match="needs the target's weights"):
        run_smoke(options, config_only)


def test_a_target_that_transformers_cannot_load_fails_the_test(
    subject: Subject, options: SmokeOptions
) -> None:
    result = run_smoke(replace(options, engine="reference", vllm_command=None, device="cpu"), subject)
    assert result.status == "failed"
    assert "transformers cannot load" in result.reason


@pytest.mark.parametrize("changes", [{"dtype": "float7"}])
def test_a_dtype_that_is_none(changes: dict[str, Any], subject: Subject, options: SmokeOptions) -> None:
    asked = replace(
        options,
        engine="reference",
        vllm_command=None,
        engine_options=replace(options.engine_options, **changes),
    )
    with pytest.raises(UsageError, match="--dtype"):
        run_smoke(asked, subject)


def test_a_run_with_vllm_costs_neither_torch_nor_transformers() -> None:
    code = (
        "import sys, eagle3pack.verify.smoke.run, eagle3pack.verify.smoke.engines; "
        "print(sorted({'torch', 'transformers', 'httpx', 'prometheus_client'} & set(sys.modules)))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout == "[]\n"


def test_a_failed_comparison_keeps_what_was_measured(
    state: Path, subject: Subject, options: SmokeOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_VLLM", "no_baseline")
    result = run_smoke(replace(options, baseline=True), subject)
    run = valid(result)
    assert result.status == "failed"
    assert result.reason.startswith("the run without a draft failed: vllm: ended with exit code 1")
    assert run["drafts"] == 20
    assert run.get("baseline") is None
