"""The documentation says what the code does: generated pages, links, the tree, the options."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import click
import pytest

from eagle3pack.cli import COMMANDS
from tests.cli import command

ROOT = Path(__file__).parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), *(ROOT / "examples").rglob("*.md")])


def test_the_command_reference_is_what_help_prints() -> None:
    run = subprocess.run(
        [sys.executable, "tools/document_commands.py", "--check"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_an_example_and_is_in_the_readme(name: str) -> None:
    help_text = command(name).help or ""
    assert help_text.replace("\n", " ").startswith(COMMANDS[name])
    assert f"eagle3pack {name} " in help_text
    assert f"eagle3pack {name} " in (ROOT / "README.md").read_text("utf-8")


@pytest.mark.parametrize("name", COMMANDS)
def test_every_option_has_a_help_text(name: str) -> None:
    for parameter in command(name).params:
        if parameter.param_type_name == "option" and not getattr(parameter, "hidden", False):
            shown = getattr(parameter, "help", None) or getattr(parameter, "show_default", None)
            assert shown, parameter.opts


@pytest.mark.parametrize("name", COMMANDS)
def test_help_prints_every_option_once_and_under_a_heading(name: str) -> None:
    context = click.Context(command(name), info_name=name)
    printed = command(name).get_help(context)
    for parameter in command(name).get_params(context):
        if isinstance(parameter, click.Option) and not parameter.hidden:
            shown = re.findall(rf"^  (?:-\w, )?{parameter.opts[-1]}[ \n]", printed, re.MULTILINE)
            assert len(shown) == 1, parameter.opts
    headings = re.findall(r"^(\w.*):$", printed, re.MULTILINE)
    assert len(headings) > 3
    assert headings[-1] == "Running"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_to_files_that_exist(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", page.read_text("utf-8")):
        if not re.match(r"[a-z]+:", target):
            assert (page.parent / target).exists(), target


def test_the_rooms_of_the_architecture_page_are_those_on_disk() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text("utf-8")
    named = set(re.findall(r"`(eagle3pack/[\w./]+)`", page))
    for place in named:
        assert (ROOT / place).exists(), place
    package = ROOT / "eagle3pack"
    rooms = {f"eagle3pack/{path.name}/" for path in package.iterdir() if (path / "__init__.py").exists()}
    assert rooms <= named
