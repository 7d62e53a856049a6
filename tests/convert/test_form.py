"""What a conversion says of the form that it writes, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from eagle3pack.documents import schema_problems
from eagle3pack.errors import UsageError
from tests.convert.test_command import convert, record
from tests.tiny import native_config, target_config, write_draft


def test_layers_that_are_the_targets_default_are_called_a_guess(tmp_path: Path) -> None:
    target = tmp_path / "target.json"
    target.write_text(json.dumps(target_config()))
    silent = {key: value for key, value in native_config().items() if "eagle" not in key}
    for name, raw, assumed in (("silent", silent, True), ("telling", native_config(), False)):
        source, out = write_draft(tmp_path / name, raw), tmp_path / f"{name}-gqa"
        summary = convert(source, out, num_kv_heads=2, canonical=True, target=str(target))
        written = json.loads((out / "config.json").read_text())["eagle_aux_hidden_state_layer_ids"]
        assert any(f"{written} was written, which is a guess" in said for said in summary.warnings) == assumed
        found = record(out)
        assert found.get("assumed_aux_hidden_state_layer_ids") == (written if assumed else None)
        assert schema_problems(found, "conversion") == []


def test_the_portable_form_has_its_own_names(tmp_path: Path) -> None:
    source = write_draft(tmp_path / "mha")
    with pytest.raises(UsageError, match="midlayer"):
        convert(source, tmp_path / "gqa", num_kv_heads=2, canonical=True, layout="layers")
    assert not (tmp_path / "gqa").exists()
    summary = convert(source, tmp_path / "gqa", num_kv_heads=2, canonical=True, layout="midlayer")
    assert summary.written
