"""Settings and fixtures for every test."""

import pytest
from hypothesis import settings

from tests.cli import Cli, make_cli

# Timings on a shared machine say nothing about the code; benchmarks/ measures.
settings.register_profile("eagle3pack", deadline=None)
settings.load_profile("eagle3pack")


@pytest.fixture
def cli(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Cli:
    """Run `eagle3pack ARGUMENTS` and get its exit code, stdout and stderr."""
    return make_cli(capfd, monkeypatch)
