"""Write docs/commands.md from the help texts: python tools/document_commands.py [--check]

With --check nothing is written; the exit code is 1 where the page is not what it would be.
"""

from __future__ import annotations

import sys
from pathlib import Path

import click

from eagle3pack.cli import COMMANDS, cli

PAGE = Path(__file__).resolve().parent.parent / "docs" / "commands.md"
WIDTH = 100


def commands_page() -> str:
    """The page: the help of the group and of every command, as a terminal shows it."""
    parts = [
        "# Commands\n",
        "<!-- Written by tools/document_commands.py from the help texts; edit those, not this page. -->\n",
        _section("eagle3pack", cli, None),
    ]
    group = click.Context(cli, info_name="eagle3pack", **cli.context_settings)
    for name in COMMANDS:
        command = cli.get_command(group, name)
        assert command is not None
        parts.append(_section(f"eagle3pack {name}", command, group))
    return "\n".join(parts)


def _section(title: str, command: click.Command, parent: click.Context | None) -> str:
    name = title.rpartition(" ")[2]
    settings = {**command.context_settings, "terminal_width": WIDTH}
    context = click.Context(command, info_name=name, parent=parent, **settings)
    return f"## {title}\n\n```text\n{command.get_help(context)}\n```\n"


def main() -> None:
    """Write the page, or compare it."""
    page = commands_page()
    if "--check" not in sys.argv:
        PAGE.write_text(page, "utf-8")
    elif not PAGE.exists() or PAGE.read_text("utf-8") != page:
        sys.exit(f"{PAGE.name} is out of date: run python tools/document_commands.py")


if __name__ == "__main__":
    main()
