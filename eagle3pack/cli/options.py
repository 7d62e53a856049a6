"""Options and parameter types that several commands share."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any, TypeVar

import click

from eagle3pack import console

Command = TypeVar("Command", bound=Callable[..., Any])

_UNITS = {
    "": 1,
    "K": 10**3,
    "M": 10**6,
    "G": 10**9,
    "T": 10**12,
    "KI": 2**10,
    "MI": 2**20,
    "GI": 2**30,
    "TI": 2**40,
}


class ByteSize(click.ParamType[int]):
    """A size such as 5GB, 500MB, 2GiB; powers of ten as hubs count, or of two with an i."""

    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Parse the text to bytes."""
        if isinstance(value, int):
            return value
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]I?|)B?\s*", str(value).upper())
        size = int(float(match[1]) * _UNITS[match[2]]) if match else 0
        if size < 1:
            self.fail(f"{value!r} is no size; write for example 5GB, 500MB or 2GiB", param, ctx)
        return size


class Bound(click.FloatRange):
    """A finite number in a range: NaN is below and above nothing, so that a bound of NaN bounds nothing."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Check the number as click.FloatRange does."""
        number = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{value!r} is no finite number", param, ctx)
        return number


class FilePath(click.Path):
    """A path that reaches the command as a pathlib.Path; --help does not pay for importing that."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Check the text as click.Path does."""
        from pathlib import Path

        return Path(str(super().convert(value, param, ctx)))


_LAST_HEADING = "Running"  # of options in no group, --help among them


def option_group(heading: str, *options: Callable[[Command], Command]) -> Callable[[Command], Command]:
    """Add options that --help prints under a heading, in a command of the class GroupedCommand."""

    def add(command: Command) -> Command:
        others = list(getattr(command, "__click_params__", ()))
        for option in reversed(options):
            option(command)
        for param in command.__click_params__:  # type: ignore[attr-defined]
            if param not in others:
                param.heading = heading
        return command

    return add


class GroupedCommand(click.Command):
    """A command whose --help prints each option group under its heading."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the groups in the order of their options."""
        groups: dict[str, list[tuple[str, str]]] = {}
        for param in self.get_params(ctx):
            record = param.get_help_record(ctx)
            if record is not None and isinstance(param, click.Option):
                groups.setdefault(getattr(param, "heading", _LAST_HEADING), []).append(record)
        for heading, records in groups.items():
            with formatter.section(heading):
                formatter.write_dl(records)


def common_options(command: Command) -> Command:
    """Add --json, -v and -q."""
    for option in (
        click.option(
            "-q",
            "--quiet",
            is_flag=True,
            expose_value=False,
            callback=_quiet,
            help="Say only errors; the exit code is the verdict.",
        ),
        click.option(
            "-v", "--verbose", is_flag=True, expose_value=False, callback=_verbose, help="Say more."
        ),
        click.option("--json", "as_json", is_flag=True, help="Print one JSON object on stdout."),
    ):
        command = option(command)
    return command


def _quiet(ctx: click.Context, param: click.Parameter, value: bool) -> None:
    if value:
        console.set_verbosity(-1)


def _verbose(ctx: click.Context, param: click.Parameter, value: bool) -> None:
    if value:
        console.set_verbosity(1)
