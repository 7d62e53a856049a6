"""`eagle3pack verify` as its users run it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from eagle3pack import console
from eagle3pack.cli.verify import verify
from eagle3pack.documents import schema_problems
from eagle3pack.errors import ConflictError, UsageError
from tests.verify import drafts, faults

HEAVY = {
    "torch",
    "numpy",
    "transformers",
    "huggingface_hub",
    "modelscope",
    "modelscope_hub",
    "jsonschema",
    "safetensors",
}


@pytest.fixture
def target(tmp_path: Path) -> str:
    return str(drafts.write_target(tmp_path / "target"))


def run(*arguments: str | Path) -> Result:
    console.set_verbosity(0)  # as the group of commands does
    return CliRunner().invoke(verify, [str(argument) for argument in arguments], catch_exceptions=False)


def run_json(*arguments: str | Path) -> tuple[int, dict[str, Any]]:
    result = run(*arguments, "--json")
    return result.exit_code, json.loads(result.stdout)


def failed(report: dict[str, Any], severity: str = "error") -> set[str]:
    return {c["id"] for c in report["checks"] if c["status"] == "failed" and c["severity"] == severity}


def test_a_good_draft_exits_0_and_says_how_to_serve_it(tmp_path: Path, target: str) -> None:
    folder = drafts.canonical().write(tmp_path / "draft")
    result = run(folder, "--target", target, "--engine", "none", "--tensor-parallel-size", "4")

    assert result.exit_code == 0
    assert "0 errors" in result.stdout
    assert '--speculative-config \'{"method": "eagle3"' in result.stdout
    assert "[2, 4, 5] in vLLM, [1, 3, 4] in SGLang" in result.stdout
    assert "smoke test not run: --engine none" in result.stdout.splitlines()[-1]


def test_a_fault_exits_3_and_stands_first_with_its_fix(tmp_path: Path, target: str) -> None:
    folder = faults.mha_weights().write(tmp_path / "draft")
    result = run(folder, "--target", target)

    assert result.exit_code == 3
    lines = [line for line in result.stdout.splitlines() if line.startswith("  ")]
    assert "ERROR C10" in lines[0]
    assert "fix: Write 8" in lines[1]
    assert "an engine would only repeat" in result.stdout


def test_json_is_one_object_that_follows_the_schema(tmp_path: Path, target: str) -> None:
    folder = drafts.make().write(tmp_path / "draft")
    code, report = run_json(folder, "--target", target, "--engine", "none")

    assert code == 0
    assert not schema_problems(report, "report")
    assert report["complete"] and report["passed"]
    assert len(report["draft"]["digest"]) == 64
    assert len(report["target"]["config_sha256"]) == 64


def test_the_report_file_is_the_same_document(tmp_path: Path, target: str) -> None:
    folder = drafts.make().write(tmp_path / "draft")
    path = tmp_path / "report.json"
    _, printed = run_json(folder, "--target", target, "--engine", "none", "--report", path)

    written = json.loads(path.read_text())
    assert {k: v for k, v in written.items() if k != "created"} == {
        k: v for k, v in printed.items() if k != "created"
    }
    assert [p.name for p in tmp_path.iterdir() if p.name.startswith(".")] == []


def test_quick_reads_no_values_and_has_no_digest(tmp_path: Path, target: str) -> None:
    folder = faults.not_a_number().write(tmp_path / "draft")
    code, report = run_json(folder, "--target", target, "--quick")

    assert code == 0  # the NaN is in the values
    assert report["draft"]["digest"] is None and not report["complete"]
    by_id = {check["id"]: check for check in report["checks"]}
    assert by_id["F11"]["status"] == "not_run"
    assert by_id["C10"]["status"] == "passed"
    assert report["smoke"] == {
        "status": "not_run",
        "reason": "--quick runs no engine unless --engine names one",
        "runs": [],
    }


def test_strict_counts_warnings(tmp_path: Path, target: str) -> None:
    folder = faults.no_format().write(tmp_path / "draft")

    assert run(folder, "--target", target, "--quick").exit_code == 0
    code, report = run_json(folder, "--target", target, "--quick", "--strict")
    assert (code, report["passed"], report["strict"]) == (3, False, True)


def test_the_counts_are_those_of_the_lines(tmp_path: Path, target: str) -> None:
    folder = faults.model_prefix().write(tmp_path / "draft")
    result = run(folder, "--target", target, "--engine", "none", "-v")
    verdict = next(line for line in result.stdout.splitlines() if " passed, " in line)
    counts = [int(number) for number in re.findall(r"\d+", verdict)]
    errors, warnings, notes, failed, checks, *others = counts

    more = sum(map(int, re.findall(r"and (\d+) more of the same", result.stdout)))
    shown = len(re.findall(r"^  (?:ERROR|WARN |note ) [A-Z]\d\d", result.stdout, re.MULTILINE))
    assert errors + warnings + notes == shown + more
    assert failed + sum(others) == checks


@pytest.mark.parametrize(
    "options",
    [
        ("--min-acceptance-length", "nan"),
        ("--min-retention", "nan", "--against", "x"),
        ("--min-agreement", "NaN", "--baseline"),
        ("--request-timeout", "inf"),
    ],
)
def test_a_bound_is_a_finite_number(options: tuple[str, ...], tmp_path: Path) -> None:
    result = run(tmp_path, *options)

    assert result.exit_code == 2 and "is no finite number" in result.stderr


def test_quiet_leaves_only_what_fails(tmp_path: Path, target: str) -> None:
    draft = faults.mha_weights()
    draft.metadata = {}  # a warning
    folder = draft.write(tmp_path / "draft")
    loud, quiet = (run(folder, "--target", target, *option) for option in ((), ("-q",)))

    assert "WARN  F06" in loud.stdout and "to serve it" in loud.stdout
    assert re.findall("ERROR|WARN|to serve it|smoke test|not applicable", quiet.stdout) == ["ERROR"] * 2
    assert (loud.exit_code, quiet.exit_code) == (3, 3)


def test_quiet_says_nothing_of_a_draft_that_passes(tmp_path: Path, target: str) -> None:
    folder = faults.no_format().write(tmp_path / "draft")  # a warning
    passed = run(folder, "--target", target, "--quick", "-q")
    strict = run(folder, "--target", target, "--quick", "-q", "--strict")

    assert (passed.exit_code, passed.output) == (0, "")
    assert strict.exit_code == 3 and "WARN  F06" in strict.stdout


def test_of_quiet_and_verbose_the_last_counts(tmp_path: Path) -> None:
    folder = faults.no_format().write(tmp_path / "draft")
    verbose, quiet = (run(folder, "--quick", *options) for options in (("-q", "-v"), ("-v", "-q")))

    assert "without an answer\n" in verbose.stdout
    assert "WARN" not in quiet.stdout


def test_engines_decide_what_is_an_error(tmp_path: Path, target: str) -> None:
    folder = faults.tied().write(tmp_path / "draft")

    assert failed(run_json(folder, "--target", target, "--quick")[1]) == {"C16"}
    only_vllm = run_json(folder, "--target", target, "--quick", "--for", "vllm")[1]
    assert failed(only_vllm) == set()
    assert "C16" in failed(only_vllm, "note")


def test_an_engine_that_nobody_knows_is_a_usage_error(tmp_path: Path) -> None:
    folder = drafts.make().write(tmp_path / "draft")
    with pytest.raises(UsageError, match="none of vllm"):
        run(folder, "--for", "vllm,tgi", "--quick")


def test_for_given_twice_is_both(tmp_path: Path) -> None:
    folder = drafts.make().write(tmp_path / "draft")
    assert run_json(folder, "--quick", "--for", "sglang", "--for", "vllm")[1]["engines"] == ["vllm", "sglang"]
    assert "--speculative-config" in run(folder, "--quick").stdout
    assert "--speculative-config" not in run(folder, "--quick", "--for", "llama.cpp").stdout


def unnamed() -> drafts.Draft:
    """A draft that only its keys give away."""
    draft = drafts.make()
    draft.raw["architectures"] = ["LlamaForCausalLM"]
    return draft


@pytest.mark.parametrize("build", [drafts.make, drafts.speculators_draft, unnamed])
def test_a_draft_is_no_target(build: Callable[[], drafts.Draft], tmp_path: Path) -> None:
    folder = build().write(tmp_path / "draft")
    with pytest.raises(UsageError, match="is an EAGLE3 draft"):
        run(folder, "--target", folder, "--quick")


@pytest.mark.parametrize("bad", ["pointer", "mode", "pickle", "missing"])
def test_a_fix_fits_its_fault(bad: str, tmp_path: Path, target: str) -> None:
    folder = (faults.no_hidden_norm() if bad == "missing" else drafts.make()).write(tmp_path / "draft")
    weights = folder / "model.safetensors"
    if bad == "pointer":
        weights.write_text("version https://git-lfs.github.com/spec/v1\n")
    elif bad == "mode":
        weights.chmod(0)
        if os.access(weights, os.R_OK):
            pytest.skip("this user may read everything")
    elif bad == "pickle":
        weights.rename(folder / "pytorch_model.bin")
    said = {
        "pointer": "fix: Run `git lfs pull`",
        "mode": "fix: Check the modes",
        "pickle": "fix: Run `eagle3pack convert SOURCE OUT --num-kv-heads 4`",
        "missing": "ERROR T01  midlayer.",
    }
    assert said[bad] in run(folder, "--target", target, "--quick").stdout


def test_fix_says_what_is_left(tmp_path: Path, target: str) -> None:
    folder, out = faults.null_switch().write(tmp_path / "draft"), tmp_path / "out"
    assert "no error is left" in run(folder, "--target", target, "--quick", "--fix", out).stderr
    with pytest.raises(ConflictError, match="exists"):
        run(folder, "--target", target, "--quick", "--fix", out)


def test_ranks_are_errors_only_where_they_were_given(tmp_path: Path) -> None:
    folder = drafts.make(drafts.native(num_attention_heads=6, num_key_value_heads=3, hidden_size=48)).write(
        tmp_path / "draft"
    )
    without = run_json(folder, "--quick")[1]
    assert {"K01", "K02"} <= failed(without, "note")
    assert "Sizes that fit: 1" in next(c["findings"][0]["fix"] for c in without["checks"] if c["id"] == "K01")
    assert {"K01"} <= failed(run_json(folder, "--quick", "--tensor-parallel-size", "4")[1])


def test_a_bundled_target_is_used_and_said(tmp_path: Path) -> None:
    folder = drafts.make().write(tmp_path / "draft")
    result = run(folder, "--target", "MiniMaxAI/MiniMax-M3", "--quick")
    assert "using the shape that came with this package (vLLM 0.32.0" in result.stderr
    assert "bundled shape" in result.stdout
    code, report = run_json(folder, "--target", "MiniMaxAI/MiniMax-M3", "--quick")
    assert (code, report["target"]["config_sha256"]) == (3, None)
    assert {"C18", "K11"} <= failed(report)


def test_without_a_target_its_checks_are_not_decided(tmp_path: Path) -> None:
    folder = drafts.make().write(tmp_path / "draft")
    result = run(folder, "--quick")
    assert "not held against its target" in result.stdout
    report = run_json(folder, "--quick")[1]
    assert report["target"] is None
    assert next(c for c in report["checks"] if c["id"] == "C18")["message"] == "no target was given"


def test_quick_imports_nothing_heavy(tmp_path: Path, target: str) -> None:
    folder = drafts.make().write(tmp_path / "draft")
    code = (
        "import sys; sys.argv = ['eagle3pack', 'verify', *sys.argv[1:]]\n"
        "from eagle3pack.cli import main\n"
        "try: main()\n"
        "finally: print(*sorted({name.partition('.')[0] for name in sys.modules}), file=sys.stderr)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(folder), "--target", target, "--quick"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert HEAVY.isdisjoint(done.stderr.splitlines()[-1].split())


def test_known_faults_of_producers_are_named(tmp_path: Path, target: str) -> None:
    folder = faults.pruned_with_offsets().write(tmp_path / "draft")
    result = run(folder, "--target", target, "--engine", "none")
    assert "known: TorchSpec: lm_head pruned with offsets" in result.stdout


def test_weights_and_a_device_of_nowhere_are_named(tmp_path: Path, target: str) -> None:
    folder = drafts.make().write(tmp_path / "draft")
    with pytest.raises(UsageError, match="is a file of weights"):
        run(folder, "--target", Path(target) / "model.safetensors")
    with pytest.raises(UsageError, match="--device: PyTorch knows no device 'potato'"):
        run(folder, "--target", target, "--device", "potato")
