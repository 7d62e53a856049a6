"""An engine's process, kept under a guard and writing to a log of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType

from eagle3pack.errors import PermissionDenied
from eagle3pack.verify.smoke import guard

GRACE_S = 15.0  # from SIGTERM to SIGKILL: vLLM frees its shared memory meanwhile
_TAIL_BYTES = 400_000


class GuardedProcess:
    """A command that never outlives this process; see `guard`.

    Its standard output and error go to the log. Use it as a context manager, or call `stop`.

    Args:
        command: what to run.
        log_path: created, or added to.
        environment: the whole environment of the command.

    Raises:
        PermissionDenied: the log cannot be written.
    """

    def __init__(
        self,
        command: Sequence[str],
        log_path: Path,
        environment: Mapping[str, str],
        *,
        grace_s: float = GRACE_S,
    ) -> None:
        self.command = tuple(command)
        self.log_path = log_path
        self._grace_s = grace_s
        try:
            log_path.parent.mkdir(parents=True, exist_ok=True)
            with log_path.open("ab") as log:
                self._log_start = log.tell()
                self._guard = subprocess.Popen(
                    [sys.executable, "-IS", str(Path(guard.__file__)), str(grace_s), *command],
                    stdin=subprocess.PIPE,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    env=dict(environment),
                    start_new_session=True,  # a Ctrl-C in the terminal is ours to handle
                )
        except OSError as error:
            raise PermissionDenied(
                f"the log cannot be written ({error.strerror})", where=str(log_path)
            ) from None

    def __enter__(self) -> GuardedProcess:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.stop()

    @property
    def exit_code(self) -> int | None:
        """Of the command; None while it runs."""
        return self._guard.poll()

    def stop(self) -> None:
        """End the command and everything that it started; does nothing if that is done already."""
        if self._guard.stdin is not None and not self._guard.stdin.closed:
            self._guard.stdin.close()
        try:
            self._guard.wait(timeout=self._grace_s + 30)
        except subprocess.TimeoutExpired:  # only a process in uninterruptible sleep survives SIGKILL
            self._guard.kill()
            self._guard.wait()

    def log_text(self) -> str:
        """The end of what this command has written so far."""
        with self.log_path.open("rb") as log:
            size = log.seek(0, os.SEEK_END)
            log.seek(max(self._log_start, size - _TAIL_BYTES))
            return log.read().decode("utf-8", errors="replace")
