"""No engine outlives us, whatever becomes of us or of it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from eagle3pack.errors import PermissionDenied
from eagle3pack.verify.smoke.process import GuardedProcess
from tests.verify.smoke.support import runs, wait_for

# Starts two workers that ignore SIGTERM, one of them in another session, writes all pids, and waits.
STUBBORN = """
import os, pathlib, subprocess, sys, time
worker = ["sh", "-c", "trap '' TERM; exec sleep 600"]
a = subprocess.Popen(worker)
b = subprocess.Popen(worker, start_new_session=True)
print("up", flush=True)
path = pathlib.Path(sys.argv[1])
path.with_suffix(".new").write_text(f"{os.getpid()} {a.pid} {b.pid}")
path.with_suffix(".new").rename(path)
if len(sys.argv) > 2: sys.exit(int(sys.argv[2]))
time.sleep(600)
"""


def start(folder: Path, *arguments: str, grace_s: float = 0.3) -> GuardedProcess:
    command = [sys.executable, "-c", STUBBORN, str(folder / "pids"), *arguments]
    return GuardedProcess(command, folder / "log", os.environ, grace_s=grace_s)


def pids(folder: Path) -> list[int]:
    assert wait_for((folder / "pids").exists)
    return [int(pid) for pid in (folder / "pids").read_text().split()]


def none_runs(all_pids: list[int]) -> bool:
    return wait_for(lambda: not any(map(runs, all_pids)))


def test_stop_ends_workers_that_ignore_it_and_left_the_session(tmp_path: Path) -> None:
    with start(tmp_path) as process:
        found = pids(tmp_path)
        assert len(found) == 3
        assert all(map(runs, found))
        assert process.exit_code is None
    assert not any(map(runs, found))
    assert "up" in process.log_text()
    process.stop()  # again does nothing


def test_a_command_that_ends_by_itself_leaves_no_workers(tmp_path: Path) -> None:
    process = start(tmp_path, "7")
    found = pids(tmp_path)
    assert none_runs(found)
    assert wait_for(lambda: process.exit_code == 7)
    process.stop()


def test_a_killed_owner_takes_its_engine_along(tmp_path: Path) -> None:
    owner = subprocess.Popen(
        [
            sys.executable,
            "-c",
            textwrap.dedent(
                f"""
                import os, sys, time
                from pathlib import Path
                from eagle3pack.verify.smoke.process import GuardedProcess
                command = [sys.executable, "-c", {STUBBORN!r}, {str(tmp_path / "pids")!r}]
                process = GuardedProcess(command, Path({str(tmp_path / "log")!r}), os.environ, grace_s=0.3)
                time.sleep(600)
                """
            ),
        ]
    )
    found = pids(tmp_path)
    owner.send_signal(signal.SIGKILL)
    owner.wait()
    assert none_runs(found)


def test_a_killed_guard_takes_the_command_along(tmp_path: Path) -> None:
    process = start(tmp_path)
    found = pids(tmp_path)
    os.kill(process._guard.pid, signal.SIGKILL)
    assert wait_for(lambda: not runs(found[0]))
    process.stop()
    for pid in found[1:]:  # its workers are orphans then: nothing of ours is left to end them
        os.kill(pid, signal.SIGKILL)


def test_shared_memory_of_killed_workers_is_unlinked(tmp_path: Path) -> None:
    """The tracker that unlinks it must outlive them."""
    code = """
    import signal, sys, time
    from multiprocessing import shared_memory
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    block = shared_memory.SharedMemory(create=True, size=4096)
    open(sys.argv[1], "w").write(block.name)
    time.sleep(600)
    """
    command = [sys.executable, "-c", textwrap.dedent(code), str(tmp_path / "name")]
    process = GuardedProcess(command, tmp_path / "log", os.environ, grace_s=0.5)
    assert wait_for(lambda: (tmp_path / "name").exists() and (tmp_path / "name").read_text())
    block = Path("/dev/shm") / (tmp_path / "name").read_text()
    assert block.exists()
    process.stop()
    assert not block.exists()


def test_the_exit_code_of_a_signal_is_that_of_shells(tmp_path: Path) -> None:
    process = GuardedProcess(["sh", "-c", "kill -SEGV $$"], tmp_path / "log", os.environ, grace_s=0.1)
    assert wait_for(lambda: process.exit_code == 139)
    process.stop()


def test_a_command_that_cannot_be_started_says_so_in_the_log(tmp_path: Path) -> None:
    process = GuardedProcess([str(tmp_path / "nothing")], tmp_path / "log", os.environ, grace_s=0.1)
    assert wait_for(lambda: process.exit_code == 127)
    assert "No such file or directory" in process.log_text()
    process.stop()


def test_the_log_is_added_to_and_only_the_own_part_is_read(tmp_path: Path) -> None:
    (tmp_path / "log").write_text("of another run\n")
    process = GuardedProcess(["echo", "of this run"], tmp_path / "log", os.environ)
    assert wait_for(lambda: process.exit_code == 0)
    process.stop()
    assert process.log_text() == "of this run\n"
    assert (tmp_path / "log").read_text() == "of another run\nof this run\n"


def test_a_log_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(PermissionDenied, match="log cannot be written"):
        GuardedProcess(["true"], tmp_path, os.environ)
