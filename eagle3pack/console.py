"""Everything a person sees: messages, tables, progress. The only place besides `cli` that prints.

Results go to stdout, all else to stderr, so that `--json` output can be piped.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import click

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


def detail(text: str) -> None:
    """Tell what only --verbose shows."""
    if _verbosity >= 1:
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


@contextmanager
def progress(label: str, total: int, *, unit: str = "B") -> Iterator[Callable[[int], None]]:
    """Show progress on stderr, with rate and time left, and yield the function that advances it.

    On a terminal a bar; elsewhere nothing, since a log wants no redrawn lines.

    Args:
        label: what is being done.
        total: how many units there are.
        unit: "B" for bytes, else a word in the plural ("tokens").
    """
    if _verbosity < 0 or total <= 0 or not sys.stderr.isatty():
        yield lambda count: None
        return
    start = time.monotonic()
    done = 0

    def rate(_: object) -> str:
        per_s = done / max(time.monotonic() - start, 1e-9)
        return f"{format_bytes(per_s)}/s" if unit == "B" else f"{per_s:.3g} {unit}/s"

    with click.progressbar(
        length=total,
        label=label,
        file=sys.stderr,
        item_show_func=rate,
        update_min_steps=max(total // 1000, 1),
    ) as bar:

        def advance(count: int) -> None:
            nonlocal done
            done += count
            bar.update(count, current_item=done)

        yield advance
