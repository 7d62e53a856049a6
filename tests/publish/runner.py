"""Runs `eagle3pack` commands with the real hub clients in processes of their own.

Environment that the clients read at import is set when the server process starts; it imports everything
once and forks for each command, so that a command costs no import and can be killed at any moment.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
PRELOADED = (
    "eagle3pack.cli.publish",
    "eagle3pack.publish.command",
    "huggingface_hub.hf_api",
    "jinja2",
    "jsonschema",
    "matplotlib.backends.backend_svg",
    "modelscope_hub",
    "yaml",
)


@dataclass(frozen=True)
class Outcome:
    """How a command ended; negative codes are signals.

    Attributes:
        read_bytes: by read() of files, in all; 0 for a command that was killed.
    """

    code: int
    stdout: str
    stderr: str
    read_bytes: int

    @property
    def document(self) -> Any:
        return json.loads(self.stdout)


class Runner:
    """A process that forks for each command.

    Args:
        scratch: for homes, caches and outputs.
        python: interpreter whose hub clients are used.
        xet: let huggingface_hub upload through Xet.
    """

    def __init__(self, scratch: Path, *, python: str = sys.executable, xet: bool = False) -> None:
        self.scratch = scratch
        self.pid = 0  # of the command that runs now
        environment = {
            "PATH": os.environ["PATH"],
            "PYTHONPATH": str(ROOT),
            "HOME": str(scratch),
            "TMPDIR": str(scratch),
            "HF_HOME": str(scratch / "hf"),
            "MODELSCOPE_HOME": str(scratch / "ms"),
            "MODELSCOPE_CACHE": str(scratch / "ms-cache"),
            "MPLCONFIGDIR": str(scratch / "mpl"),
            "HF_HUB_DISABLE_XET": "0" if xet else "1",
            "HF_HUB_DISABLE_TELEMETRY": "1",
            "NO_PROXY": "*",
            "MODELSCOPE_API_MAX_RETRIES": "1",
            "OMP_NUM_THREADS": "1",
        }
        self._server = subprocess.Popen(
            [python, "-m", "tests.publish.runner"],
            cwd=ROOT,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def __enter__(self) -> Runner:
        return self

    def __exit__(self, *error: object) -> None:
        assert self._server.stdin and self._server.stdout
        self._server.stdin.close()
        self._server.wait()
        self._server.stdout.close()

    def run(self, argv: list[str], *, cwd: Path, env: dict[str, str]) -> Outcome:
        """Run one command to its end."""
        out, err, usage = (self.scratch / name for name in ("stdout", "stderr", "usage"))
        usage.write_text("0")
        order = {"argv": argv, "cwd": str(cwd), "env": env}
        order |= {"stdout": str(out), "stderr": str(err), "usage": str(usage)}
        assert self._server.stdin and self._server.stdout
        self._server.stdin.write(json.dumps(order) + "\n")
        self._server.stdin.flush()
        self.pid = int(self._server.stdout.readline())
        code = int(self._server.stdout.readline())
        return Outcome(code, out.read_text(), err.read_text(), int(usage.read_text()))


def serve() -> None:
    """Fork for each line on stdin."""
    for name in PRELOADED:
        import_module(name)
    from eagle3pack.publish import card, flow

    flow.FIRST_WAIT_S = 0.02
    for language in card.LANGUAGES:
        card.template(language)
    for line in sys.stdin:
        order = json.loads(line)
        pid = os.fork()
        if pid == 0:
            execute(order)
        print(pid, flush=True)
        _, status = os.waitpid(pid, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)


def execute(order: dict[str, Any]) -> None:
    """Become the command."""
    os.environ.update(order["env"])
    os.chdir(order["cwd"])
    for descriptor, path in ((1, order["stdout"]), (2, order["stderr"])):
        target = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        os.dup2(target, descriptor)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    sys.argv = ["eagle3pack", *order["argv"]]
    code, read_before = 1, bytes_read()
    try:
        from eagle3pack.cli import main

        main()
        code = 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 0 if error.code is None else 1
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        Path(order["usage"]).write_text(str(bytes_read() - read_before))
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def bytes_read() -> int:
    """What this process has read so far; sockets do not count (proc(5), rchar)."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return int(dict(line.split(": ") for line in lines)["rchar"])


if __name__ == "__main__":
    serve()
