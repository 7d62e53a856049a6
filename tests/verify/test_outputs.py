"""Where reports and logs may go."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from eagle3pack.errors import UsageError
from eagle3pack.verify.outputs import require_log_path, require_report_path
from tests.cli import Cli
from tests.verify import drafts

NAMES = ["config.json", "model.safetensors", "model.safetensors.index.json", "eagle3pack.json"]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("role", ["source", "target", "against"])
def test_no_file_of_a_model_is_overwritten(name: str, role: str, tmp_path: Path, cli: Cli) -> None:
    folders = {r: drafts.make().write(tmp_path / r) for r in ("source", "against")}
    folders["target"] = drafts.write_target(tmp_path / "target")
    before = {path.name: path.read_bytes() for path in folders[role].iterdir()}
    result = cli(
        *("verify", folders["source"], "--target", folders["target"], "--against", folders["against"]),
        *("--engine", "reference", "--report", folders[role] / name),
    )

    assert result.code == 2
    assert "it is not overwritten" in result.err
    assert {path.name: path.read_bytes() for path in folders[role].iterdir()} == before


def test_only_reports_are_replaced(tmp_path: Path) -> None:
    notes = tmp_path / "notes.json"
    for text in ("not json", "[]", '{"schema": "eagle3pack/receipt/1"}'):
        notes.write_text(text)
        with pytest.raises(UsageError, match="no report of eagle3pack"):
            require_report_path(notes, ["hf:org/draft"])
    with pytest.raises(UsageError, match="no report of eagle3pack"):
        require_report_path(Path("/dev/null"), [])
    notes.write_text(json.dumps({"schema": "eagle3pack/report/1"}))
    require_report_path(notes, ["hf:org/draft"])
    require_report_path(tmp_path / "new.json", ["hf:org/draft"])


def test_a_folder_that_is_not_there_is_told(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="there is no folder"):
        require_report_path(tmp_path / "none" / "report.json", [])
    with pytest.raises(UsageError, match="there is no folder"):
        require_log_path(tmp_path / "none" / "vllm.log", [])


def test_a_name_too_long_is_told(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="too long"):
        require_report_path(tmp_path / ("x" * 250), [])


def test_a_log_does_not_go_over_weights(tmp_path: Path) -> None:
    folder = drafts.make().write(tmp_path / "draft")
    with pytest.raises(UsageError, match="not overwritten"):
        require_log_path(folder / "model.safetensors", [str(folder)])
