"""A process between us and an engine, so that no engine outlives us.

    python guard.py GRACE_S COMMAND...        its stdin is a pipe that we hold

The guard starts COMMAND and ends it, with everything that it started, as soon as the pipe closes. The
kernel closes our end whatever becomes of us: a return, an exception, Ctrl-C, SIGKILL. Orphans are
handed to the guard (PR_SET_CHILD_SUBREAPER), so that workers which leave their process group or lose
their parent are found too.

It runs as a script in a fresh interpreter and imports nothing but the standard library.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
POLL_S = 0.1
ORPHANS_S = 3.0  # what workers get to end by themselves once the command has ended
_libc = ctypes.CDLL(None, use_errno=True)


def main(arguments: list[str]) -> int:
    """Run the command until it ends or our owner does; return its exit code."""
    grace_s, command = float(arguments[0]), arguments[1:]
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # only the pipe ends us: then nothing is left behind
    _libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    try:
        child = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, start_new_session=True, preexec_fn=_before_command
        )
    except OSError as error:
        print(f"{command[0]}: {error.strerror}", file=sys.stderr)
        return 127
    while child.poll() is None and not _owner_is_gone():
        pass
    _end_all(child, grace_s)
    code = child.wait()
    return code if code >= 0 else 128 - code


def _before_command() -> None:
    """Between fork and exec: the command dies with the guard, and takes signals again."""
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    _libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def _owner_is_gone() -> bool:
    """Wait a moment for the pipe to close or to say something, which means the same."""
    readable, _, _ = select.select([sys.stdin.fileno()], [], [], POLL_S)
    return bool(readable)


def _end_all(child: subprocess.Popen[bytes], grace_s: float) -> None:
    """Ask the command to end, then what it has left behind, then kill what is still there.

    Python's resource trackers are killed last: each unlinks the shared memory of the processes that it
    belongs to once they are gone, which would stay in /dev/shm otherwise.
    """
    if child.poll() is None:
        child.terminate()
    _wait(child, lambda: child.poll() is not None, grace_s)
    if _wait(child, lambda: not _descendants(), min(grace_s, ORPHANS_S)):
        return
    _signal_all(signal.SIGTERM)
    if _wait(child, lambda: not _descendants(), min(grace_s, ORPHANS_S)):
        return
    _signal_all(signal.SIGKILL, spare=b"resource_tracker")
    _wait(child, lambda: not _descendants(), min(grace_s, ORPHANS_S))
    while _descendants():
        _signal_all(signal.SIGKILL)
        _wait(child, lambda: not _descendants(), POLL_S)


def _wait(child: subprocess.Popen[bytes], done: Callable[[], bool], limit_s: float) -> bool:
    """Wait until something holds; whether it does."""
    deadline = time.monotonic() + limit_s
    while not done():
        if time.monotonic() > deadline:
            return False
        _reap(child)
        time.sleep(POLL_S / 10)
    return True


def _signal_all(number: int, *, spare: bytes | None = None) -> None:
    for pid in _descendants():
        with contextlib.suppress(OSError):  # it ended meanwhile
            if spare is None or spare not in Path(f"/proc/{pid}/cmdline").read_bytes():
                os.kill(pid, number)


def _reap(child: subprocess.Popen[bytes]) -> None:
    """Collect orphans that ended; the command itself is Popen's to collect."""
    child.poll()
    for pid in _descendants(direct=True):
        if pid != child.pid:
            os.waitpid(pid, os.WNOHANG)


def _descendants(*, direct: bool = False) -> list[int]:
    """Every process that descends from the guard, zombies included until they are collected."""
    parents: dict[int, int] = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                stat = (folder / "stat").read_text()
            except OSError:  # it ended meanwhile
                continue
            parents[int(folder.name)] = int(stat.rpartition(")")[2].split()[1])
    found = {os.getpid()}
    children = [pid for pid, parent in parents.items() if parent in found]
    if direct:
        return children
    while grown := {pid for pid, parent in parents.items() if parent in found} - found:
        found |= grown
    return sorted(found - {os.getpid()})


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
