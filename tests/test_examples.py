from __future__ import annotations

import re
import shlex
from pathlib import Path

import click
import pytest
import yaml

from eagle3pack.documents import require_valid
from examples.quickstart import run as quickstart
from tests.cli import command
from tests.publish import inputs
from tests.tiny import write_draft
from tools import document_transcript

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


def test_the_readme_shows_steps_of_the_quickstart() -> None:
    block = document_transcript.transcript(document_transcript.README.read_text("utf-8"))
    steps = [shlex.split(step) for step in quickstart.commands()]
    shown = [shlex.split(command.replace("\\\n", "")) for command, _ in document_transcript.steps(block)]
    assert [step for step in steps if step in shown] == shown


def test_the_quickstart_ends_with_what_its_reports_say(tmp_path: Path) -> None:
    draft = write_draft(tmp_path / "draft")
    for method, retention in (("mean", 0.421), ("als", 0.991)):
        report = inputs.report(draft)
        report["smoke"]["runs"] = [inputs.run(against=inputs.run(), retention=retention)]
        inputs.write_report(tmp_path / f"report-{method}.json", report)
        require_valid(report, "report", where=method)
    assert "\n  mean  0.421\n  als   0.991\n" in quickstart.summary(tmp_path)


PRINTED = ["merging", "  kept   83.6% of 12 ▍", "digest " + "a1" * 32, "  position 1  0.148", "passed"]


@pytest.mark.parametrize(
    ("shown", "filled"),
    [
        (PRINTED, PRINTED),
        (["merging", "  ..."], ["merging", "  ..."]),
        (["  ...", " position 1 0.2 ██▊", "  ..."], ["  ...", PRINTED[3], "  ..."]),
        (["  ...", "digest " + "0f" * 32, "  ...", "passed"], ["  ...", PRINTED[2], "  ...", "passed"]),
        (["merging", "  kept 9% of 1", "  ...", "passed"], [*PRINTED[:2], "  ...", "passed"]),
    ],
)
def test_a_transcript_is_filled_with_what_is_printed(shown: list[str], filled: list[str]) -> None:
    assert document_transcript.filled(shown, PRINTED) == filled


@pytest.mark.parametrize(
    ("shown", "message"),
    [
        (["merging"], "printed is also '  kept"),
        (["merging", "passed"], "printed is '  kept"),
        (["  ...", "passed", "  ...", "merging"], "no line further down is"),
        (["  ...", "passed", "ended"], "printed is 'nothing'"),
        (["  ...", "  position 2  0.148", "failed"], "shown is 'failed'"),
    ],
)
def test_a_transcript_of_another_shape_is_refused(shown: list[str], message: str) -> None:
    with pytest.raises(document_transcript.ShapeError, match=re.escape(message)):
        document_transcript.filled(shown, PRINTED)
