"""The command line: parse, call one function, print, exit code. No domain logic.

Exit codes, the same for every command: 0 fine; 1 internal error; 2 usage; 3 a check failed or an input is
broken; 4 authentication or permission; 5 conflict; 6 refused by a remote; 7 transport or disk gave out,
run it again; 8 mismatch after publishing; 9 one hub of two; 130 interrupted.
"""

from __future__ import annotations

import importlib
import os
import signal
import sys
import threading
import traceback
from types import FrameType
from typing import NoReturn

import click

from eagle3pack import __version__, console
from eagle3pack.errors import Eagle3PackError, TransportError

INTERRUPTED = 130  # 128 + SIGINT, as shells report it

# Command -> what `eagle3pack --help` says of it, so that this costs what importing Click costs: the module
# of a command, eagle3pack.cli.NAME, is imported when it is asked for.
COMMANDS = {
    "convert": "Turn the MHA draft SOURCE into a GQA one in OUT.",
    "publish": "Publish the verified draft in FOLDER with a card made from its reports.",
    "verify": "Hold the draft SOURCE against its target and the engines that will serve it.",
}


class _Commands(click.Group):
    """The commands, each imported on its first use."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        command: click.Command = getattr(importlib.import_module(f"{__name__}.{cmd_name}"), cmd_name)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))


# What a bug report should name; read from the installed packages' metadata, not imported.
_VERSIONS_OF = ("torch", "transformers", "safetensors", "numpy", "huggingface-hub", "modelscope-hub", "click")


def _print_version(ctx: click.Context, param: click.Parameter, value: bool) -> None:
    if not value or ctx.resilient_parsing:
        return
    import platform
    from importlib import metadata

    click.echo(f"eagle3pack {__version__}")
    click.echo(f"Python {platform.python_version()} on {platform.platform(terse=True)}")
    for name in _VERSIONS_OF:
        try:
            click.echo(f"{name} {metadata.version(name)}")
        except metadata.PackageNotFoundError:
            click.echo(f"{name} not installed")
    ctx.exit()


@click.group(
    cls=_Commands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100}
)
@click.option(
    "--version",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_print_version,
    help="Show the version, and those of what matters.",
)
def cli() -> None:
    """Convert, verify and publish EAGLE3 speculative-decoding draft models.

    \b
    Example:
      eagle3pack convert ./my-draft ./my-draft-gqa --num-kv-heads 4
    """
    console.set_verbosity(0)


def main() -> None:
    """Run the command line; every error of the user's ends in one line, a hint and its exit code."""
    signal.signal(signal.SIGTERM, _interrupt)  # so that a terminated job cleans up as an interrupted one does
    try:
        sys.exit(cli.main(standalone_mode=False) or 0)  # not standalone: ctx.exit(code) comes back as a value
    except Eagle3PackError as error:
        console.fail(str(error), error.hint)
        sys.exit(error.exit_code)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except (click.Abort, KeyboardInterrupt):
        console.fail("interrupted; nothing half-written is left")
        _exit_at_once(INTERRUPTED)
    except BrokenPipeError:  # `| head` closed our stdout
        sys.stderr.close()
        sys.exit(0)
    except OSError as error:
        *_, (frame, _) = traceback.walk_tb(error.__traceback__)
        if frame.f_code is not click.echo.__code__:
            raise
        # stdout takes nothing; Python would try again, and complain, on its way out
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        console.fail(f"stdout: cannot be written ({error.strerror})", "Send the output somewhere else.")
        sys.exit(TransportError.exit_code)


def _exit_at_once(code: int) -> NoReturn:
    """Exit without waiting for a hub client's threads, which would first fetch all of a file."""
    if threading.active_count() > 1:
        sys.stdout.flush()
        os._exit(code)
    sys.exit(code)


def _interrupt(signum: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt
