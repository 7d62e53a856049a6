"""Write the transcript of the quickstart in README.md anew: python tools/document_transcript.py [--check]

The commands that stand there are run, in a folder of their own, and of what they print the lines that the
transcript shows are put in; `...` stands for any lines. A line is found by its shape: numbers, digests and
bars may differ. --check writes nothing; either way a line that is not printed any more is an error.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
README = ROOT / "README.md"
TARGET = Path(".cache/smollm2-target")
MARK = (
    "<!-- Written by tools/document_transcript.py: choose commands and lines here, the tool fills them. -->"
)
ELISION = "  ..."


class ShapeError(Exception):
    """The transcript shows a line that its command does not print."""


def transcript(page: str) -> str:
    """The text of the transcript's block on the page."""
    return page.split(f"{MARK}\n```console\n")[1].split("```")[0]


def steps(block: str) -> list[tuple[str, list[str]]]:
    """Every command as it is written, continuation lines and all, and the lines shown of its output."""
    found = []
    for step in block.strip().split("\n\n$ "):
        command, _, shown = re.sub(r"\\\n", "\0", step.removeprefix("$ ")).partition("\n")
        found.append((command.replace("\0", "\\\n"), shown.split("\n") if shown else []))
    return found


def shape(line: str) -> str:
    """The line without what differs between two runs: digests, numbers, bars, widths of columns."""
    line = re.sub(r"\b[0-9a-f]{64}\b|\d[\d.,]*", "#", line)
    return " ".join(re.sub("[▏▎▍▌▋▊▉█]", "", line).split())


def filled(shown: Sequence[str], printed: Sequence[str]) -> list[str]:
    """The lines shown, as they are printed now.

    Raises:
        ShapeError: a line is not printed, or lines are printed where no elision stands.
    """
    lines, at, elided = [], 0, False
    for line in shown:
        if line == ELISION:
            elided = True
        else:
            span = printed[at:] if elided else printed[at : at + 1]
            matches = [i for i, other in enumerate(span, at) if shape(other) == shape(line)]
            if not matches:
                follows = (
                    "no line further down is" if elided else f"printed is {span[0] if span else 'nothing'!r}"
                )
                raise ShapeError(f"shown is {line!r}, {follows}")
            at, elided, line = matches[0] + 1, False, printed[matches[0]]
        lines.append(line)
    if not elided and at < len(printed):
        raise ShapeError(f"printed is also {printed[at]!r}")
    return lines


def run(command: str, folder: Path) -> list[str]:
    """Run a command of eagle3pack in a folder and return the lines that it prints."""
    program, *arguments = shlex.split(command.replace("\\\n", ""))
    result = subprocess.run(
        [sys.executable, "-m", program, *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if result.returncode:
        raise ShapeError(f"`{command}` exits with {result.returncode}:\n{result.stdout}")
    return result.stdout.rstrip().split("\n")


def renewed(block: str, target: Path) -> str:
    """The block with what its commands print now.

    Raises:
        ShapeError: a command fails, or prints something else.
    """
    written = []
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)  # the repository as the commands see it, and nothing of it written to
        (folder / "examples").symlink_to(ROOT / "examples")
        (folder / TARGET).parent.mkdir()
        (folder / TARGET).symlink_to(target.resolve())
        for command, shown in steps(block):
            written.append("\n".join([f"$ {command}", *filled(shown, run(command, folder))]))
    return "\n\n".join(written) + "\n"


def main() -> None:
    """Write the transcript, or compare it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing")
    parser.add_argument("--target", type=Path, default=ROOT / TARGET, help="made by make_smollm2_target.py")
    arguments = parser.parse_args()
    page = README.read_text("utf-8")
    block = transcript(page)
    try:
        new = renewed(block, arguments.target)
    except ShapeError as error:
        sys.exit(f"The transcript in README.md is out of date: {error}")
    if not arguments.check:
        README.write_text(page.replace(block, new), "utf-8")


if __name__ == "__main__":
    main()
