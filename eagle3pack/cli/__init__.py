"""The command line: parse, call one function, print, exit code. No domain logic.

Exit codes, the same for every command: 0 fine; 1 internal error; 2 usage; 3 a check failed or an input is
broken; 4 authentication or permission; 5 conflict; 6 refused by a remote; 7 transport or disk gave out,
run it again; 8 mismatch after publishing; 9 one hub of two; 130 interrupted.
"""

from __future__ import annotations

import signal
import sys
from types import FrameType

import click

from eagle3pack import __version__, console
from eagle3pack.cli.convert import convert
from eagle3pack.cli.publish import publish
from eagle3pack.cli.verify import verify
from eagle3pack.errors import Eagle3PackError

INTERRUPTED = 130  # 128 + SIGINT, as shells report it


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__, prog_name="eagle3pack")
def cli() -> None:
    """Convert, verify and publish EAGLE3 speculative-decoding draft models.

    \b
    Example:
      eagle3pack convert ./my-draft ./my-draft-gqa --num-kv-heads 4
    """
    console.set_verbosity(0)


cli.add_command(convert)
cli.add_command(publish)
cli.add_command(verify)


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
        sys.exit(INTERRUPTED)
    except BrokenPipeError:  # `| head` closed our stdout
        sys.stderr.close()
        sys.exit(0)


def _interrupt(signum: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt
