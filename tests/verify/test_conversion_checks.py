"""A converted draft is held against its record."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from eagle3pack.cli.convert import convert
from eagle3pack.verify.context import Context, Options
from eagle3pack.verify.report import examine
from tests.verify import drafts


@pytest.fixture
def converted(tmp_path: Path) -> Path:
    """An MHA draft converted to two heads."""
    drafts.make(drafts.native(num_key_value_heads=drafts.HEADS)).write(tmp_path / "mha")
    out = tmp_path / "gqa"
    done = CliRunner().invoke(
        convert, [str(tmp_path / "mha"), str(out), "--num-kv-heads", "2"], catch_exceptions=False
    )
    assert done.exit_code == 0, done.output
    return out


def answers(folder: Path, *, quick: bool = False) -> dict[str, str]:
    """id -> status of the conversion checks."""
    outcomes = examine(Context(folder, Options(quick=quick))).outcomes["conversion"]
    return {outcome.check.id: outcome.status for outcome in outcomes}


def edit(folder: Path, change: Any) -> None:
    path = folder / "eagle3pack.json"
    record = json.loads(path.read_text())
    change(record)
    path.write_text(json.dumps(record))


def test_a_fresh_conversion_passes_and_asks_for_retraining(converted: Path) -> None:
    found = answers(converted)
    assert (found["M00"], found["M01"], found["M02"]) == ("passed", "passed", "passed")
    assert found["M10"] == "failed"


def test_without_a_record_nothing_is_asked(tmp_path: Path) -> None:
    folder = drafts.make().write(tmp_path / "draft")
    assert set(answers(folder).values()) == {"not_applicable"}


def test_an_edited_config_is_seen(converted: Path) -> None:
    path = converted / "config.json"
    path.write_text(path.read_text().replace('"silu"', '"silu" '))
    assert answers(converted)["M01"] == "failed"
    assert answers(converted, quick=True)["M01"] == "passed"


def test_a_tensor_that_a_conversion_leaves_alone_is_seen(converted: Path) -> None:
    edit(converted, lambda record: record["changed_tensors"].append("fc.weight"))
    assert answers(converted, quick=True)["M01"] == "failed"


def test_another_number_of_heads_is_seen(converted: Path) -> None:
    edit(converted, lambda record: record["heads"].update(num_key_value_heads_after=4))
    assert answers(converted, quick=True)["M02"] == "failed"


def test_a_head_that_is_left_out_is_seen(converted: Path) -> None:
    edit(converted, lambda record: record["layers"][0]["head_map"][0].pop())
    assert answers(converted, quick=True)["M02"] == "failed"


def test_a_broken_record_is_told_and_decides_nothing(converted: Path) -> None:
    (converted / "eagle3pack.json").write_text("{")
    found = answers(converted)
    assert found["M00"] == "failed"
    assert found["M01"] == "not_decided"
