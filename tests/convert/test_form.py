"""What a conversion says of the form that it writes, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from eagle3pack.checkpoint.files import open_checkpoint
from eagle3pack.convert import command
from eagle3pack.documents import schema_problems
from eagle3pack.errors import MismatchError, UsageError
from tests.cli import Cli
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


@pytest.mark.parametrize(("heads", "changed"), [(2, ("k_proj", "v_proj")), (8, ())])
def test_what_was_proved_is_told(cli: Cli, tmp_path: Path, heads: int, changed: tuple[str, ...]) -> None:
    source, out = write_draft(tmp_path / "mha"), tmp_path / "gqa"
    kept = [
        e for e in open_checkpoint(source).tensors.values() if not any(part in e.name for part in changed)
    ]
    result = cli("convert", source, out, "--num-kv-heads", heads, "--prove")
    assert result.code == 0
    assert f"proved                  {len(kept)} unchanged tensors, " in result.err
    found = record(out)
    assert found["proved"] == {"tensors": len(kept), "bytes": sum(entry.nbytes for entry in kept)}
    assert schema_problems(found, "conversion") == []
    convert(source, tmp_path / "unproved", num_kv_heads=heads)
    assert "proved" not in record(tmp_path / "unproved")


def test_a_copy_is_proved_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = command.write_output

    def damaging(plan: Any, computation: Any, config: Path, folder: Path, **options: Any) -> Any:
        written = write(plan, computation, config, folder, **options)
        file = folder / "model.safetensors"
        file.write_bytes(file.read_bytes()[:-1] + bytes([file.read_bytes()[-1] ^ 1]))
        return written

    monkeypatch.setattr(command, "write_output", damaging)
    with pytest.raises(MismatchError, match="is not the one in"):
        convert(write_draft(tmp_path / "mha"), tmp_path / "gqa", num_kv_heads=8, prove=True)
    assert not (tmp_path / "gqa").exists()
