"""Running the command line in this process, as a user's shell would see it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass

import click
import pytest

from eagle3pack.cli import cli, main


def command(name: str) -> click.Command:
    """A command of the group, imported as the command line imports it."""
    found = cli.get_command(click.Context(cli), name)
    assert found is not None
    return found


@dataclass(frozen=True)
class Result:
    """What a command left: exit code, stdout, stderr."""

    code: int
    out: str
    err: str


Cli = Callable[..., Result]


def make_cli(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Cli:
    """The function that tests get as the fixture `cli`."""

    def run(*arguments: object) -> Result:
        capfd.readouterr()
        monkeypatch.setattr(sys, "argv", ["eagle3pack", *map(str, arguments)])
        with pytest.raises(SystemExit) as exit_:
            main()
        captured = capfd.readouterr()
        code = exit_.value.code
        return Result(code if isinstance(code, int) else 1, captured.out, captured.err)

    return run
