"""The README's transcript is what its commands print today, on the real draft and target."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.integration.real_models import ROOT, smollm2_target


@pytest.mark.slow
def test_the_transcript_in_the_readme_is_what_its_commands_print() -> None:
    tool = [sys.executable, "tools/document_transcript.py", "--check", "--target", str(smollm2_target())]
    run = subprocess.run(tool, cwd=ROOT, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
