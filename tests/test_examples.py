from __future__ import annotations

import re
import shlex
from pathlib import Path

import click
import pytest
import yaml

from tests.cli import command

EXAMPLES = Path(__file__).parent.parent / "examples"


def commands(text: str) -> list[list[str]]:
    """Every `eagle3pack ...` command line of a text, continuation lines joined."""
    joined = text.replace("\\\n", " ")
    found = re.findall(
        r"^\s*(?:\$ |run: )?(eagle3pack (?:convert|verify|publish) [^\n#]*)", joined, re.MULTILINE
    )
    return [shlex.split(line) for line in found]


@pytest.mark.parametrize(
    "page",
    sorted(
        [
            *EXAMPLES.rglob("*.md"),
            *EXAMPLES.rglob("*.yml"),
            *EXAMPLES.parent.glob("docs/*.md"),
            EXAMPLES.parent / "README.md",
        ]
    ),
    ids=lambda page: page.name,
)
def test_every_command_line_in_the_documents_parses(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for _, name, *arguments in commands(page.read_text("utf-8")):
        for argument in arguments:  # input files that the reader is taken to have
            if Path(argument).suffix in (".json", ".jsonl", ".yaml") and "/" not in argument:
                (tmp_path / argument).touch()
        try:
            command(name).make_context(name, list(arguments))
        except click.exceptions.Exit:
            pass
        except click.UsageError as error:
            pytest.fail(f"{shlex.join([name, *arguments])}: {error.format_message()}")


def test_the_workflow_is_yaml_and_gates_on_strict() -> None:
    workflow = yaml.safe_load((EXAMPLES / "ci" / "verify-draft.yml").read_text("utf-8"))
    runs = [step.get("run", "") for step in workflow["jobs"]["verify"]["steps"]]
    assert any("eagle3pack verify" in run and "--strict" in run and "--report" in run for run in runs)
