"""Everything a person sees: messages, tables, progress. The only place besides `cli` that prints.

Results go to stdout, all else to stderr, so that `--json` output can be piped.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import click

LINE_EVERY_S = 15.0  # of progress, where no terminal shows a bar

_verbosity = 0  # -1 quiet, 0 normal, 1 verbose; set once by the CLI


def set_verbosity(level: int) -> None:
    """Set how much is said: -1 only errors, 0 normal, 1 details."""
    global _verbosity
    _verbosity = level


def is_verbose() -> bool:
    """Whether the user asked for details."""
    return _verbosity >= 1


def is_quiet() -> bool:
    """Whether the user asked for errors alone."""
    return _verbosity < 0


def say(text: str = "") -> None:
    """Tell the user something, unless they asked for quiet."""
    if _verbosity >= 0:
        click.echo(text, err=True)


def warn(text: str) -> None:
    """Tell what the user should not overlook."""
    if _verbosity >= 0:
        click.echo(click.style("warning: ", fg="yellow", bold=True) + text, err=True)


def fail(problem: str, hint: str = "") -> None:
    """Print an error and what to do about it; the caller exits."""
    click.echo(click.style("error: ", fg="red", bold=True) + problem, err=True)
    if hint:
        click.echo(click.style("hint: ", bold=True) + hint, err=True)


def print_result(text: str) -> None:
    """Print a result on stdout."""
    click.echo(text)


def print_json(document: Mapping[str, Any]) -> None:
    """Print one JSON object on stdout."""
    import json  # --help does without

    click.echo(json.dumps(document, indent=2, ensure_ascii=False, allow_nan=False))


def table(rows: Sequence[Sequence[str]], *, indent: str = "  ") -> str:
    """Lay rows out in columns; text left, numbers (that start with a digit or a sign) right."""
    widths = [max(len(row[i]) for row in rows if i < len(row)) for i in range(max(map(len, rows), default=0))]
    lines = []
    for row in rows:
        cells = [
            cell.rjust(width) if cell[:1].isdigit() or cell[:1] in "+-" else cell.ljust(width)
            for cell, width in zip(row, widths, strict=False)
        ]
        lines.append(indent + "  ".join(cells).rstrip())
    return "\n".join(lines)


def format_bytes(count: float) -> str:
    """Bytes as people read them, in powers of ten as disks and hubs count: 6.60 GB."""
    units = ["B", "kB", "MB", "GB", "TB"]
    while abs(count) >= 999.5 and len(units) > 1:
        count /= 1000
        del units[0]
    return f"{count:.0f} B" if units[0] == "B" else f"{count:.3g} {units[0]}"


def format_seconds(seconds: float) -> str:
    """A duration as people say it: 40 s, 12 min, 3.4 h."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"


@dataclass(slots=True)
class _Pace:
    """How far something has come."""

    label: str
    total: int
    unit: str
    start: float
    done: int = 0
    marked: tuple[float, int] = field(init=False)  # when the last line was shown, and what was done by then

    def __post_init__(self) -> None:
        self.marked = (self.start, 0)

    def amount(self, count: float) -> str:
        return format_bytes(count) if self.unit == "B" else f"{count:,.0f}"

    def per_s(self) -> float:
        """Since the last line: a slow start tells nothing of what is left."""
        then, done = self.marked
        return (self.done - done) / max(time.monotonic() - then, 1e-9)

    def rate(self) -> str:
        per_s = self.per_s()
        return f"{format_bytes(per_s)}/s" if self.unit == "B" else f"{per_s:.3g} {self.unit}/s"

    def line(self) -> str:
        left = max(self.total - self.done, 0) / max(self.per_s(), 1e-9)
        return (
            f"{self.label}: {self.amount(self.done)} of {self.amount(self.total)}, {self.rate()}, "
            f"{format_seconds(left)} left"
        )


@contextmanager
def progress(label: str, total: int, *, unit: str = "B") -> Iterator[Callable[[int], None]]:
    """Show progress on stderr, with rate and time left, and yield the function that advances it.

    On a terminal a bar; elsewhere a line now and then, since a log wants no redrawn ones.

    Args:
        label: what is being done.
        total: how many units there are, at most.
        unit: "B" for bytes, else a word in the plural ("tokens").
    """
    pace = _Pace(label, total, unit, time.monotonic())
    if _verbosity < 0 or total <= 0:
        yield lambda count: None
    elif sys.stderr.isatty():
        bar: Any
        with click.progressbar(
            length=total,
            label=label,
            file=sys.stderr,
            item_show_func=lambda _: pace.rate(),
            update_min_steps=max(total // 1000, 1),
        ) as bar:

            def redraw(count: int) -> None:
                pace.done += count
                bar.update(count, current_item=pace.done)

            yield redraw
    else:
        next_line = pace.start + LINE_EVERY_S

        def note(count: int) -> None:
            nonlocal next_line
            pace.done += count
            now = time.monotonic()
            if now >= next_line and pace.done:
                next_line = now + LINE_EVERY_S * min(max((now - pace.start) / 150, 1), 8)  # ever more rarely
                say(pace.line())
                pace.marked = (now, pace.done)

        yield note
