"""Whole commands, measured from outside and interleaved, so that ratios hold while the speed drifts."""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Run:
    """One run of a command.

    Attributes:
        wall_s: until the command ended and what it wrote was on disk.
        cpu_s: user and system time of the command and its children.
        peak_bytes: the largest resident set of any process of it (VmHWM).
    """

    wall_s: float
    cpu_s: float
    peak_bytes: int


def run(command: Sequence[str], *, sync: Path | None = None) -> Run:
    """Run a command; its output is thrown away.

    This process must stay small: a child's peak includes what its parent had when it was forked.

    Args:
        command: program and arguments.
        sync: a path whose file system is flushed inside the measured time.

    Raises:
        SystemExit: the command failed; its stderr was shown.
    """
    started = time.perf_counter()
    child = os.posix_spawnp(
        command[0],
        list(command),
        os.environ,
        file_actions=[(os.POSIX_SPAWN_OPEN, 1, os.devnull, os.O_WRONLY, 0)],
    )
    _, status, usage = os.wait4(child, 0)
    if status:
        sys.exit(f"{' '.join(command)} ended with {os.waitstatus_to_exitcode(status)}")
    if sync is not None:
        descriptor = os.open(sync, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)
    wall = time.perf_counter() - started
    return Run(wall, usage.ru_utime + usage.ru_stime, usage.ru_maxrss * 1024)


def interleave(
    cases: Mapping[str, Callable[[], Run]], *, rounds: int, before_each: Callable[[], None] = lambda: None
) -> dict[str, list[Run]]:
    """Run every case in turn, A B C A B C ..., after a first round that does not count."""
    runs: dict[str, list[Run]] = {name: [] for name in cases}
    for number in range(rounds + 1):
        for name, case in cases.items():
            before_each()
            found = case()
            print(f"  round {number}: {name}: {found.wall_s:.2f} s", file=sys.stderr, flush=True)
            if number:
                runs[name].append(found)
    return runs


def median(runs: Sequence[Run]) -> Run:
    """The median of each figure."""
    return Run(
        statistics.median(run.wall_s for run in runs),
        statistics.median(run.cpu_s for run in runs),
        int(statistics.median(run.peak_bytes for run in runs)),
    )


def ratio(of: Sequence[Run], to: Sequence[Run]) -> float:
    """The median over rounds of wall time against another case's in the same round."""
    return statistics.median(a.wall_s / b.wall_s for a, b in zip(of, to, strict=True))
