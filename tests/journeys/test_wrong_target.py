"""A draft, and a target that it was not trained for: said at once, or by verify, and what to do."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.cli import Cli
from tests.verify import drafts

WRONG: dict[str, tuple[dict[str, Any], int, str, str]] = {
    # what the target has -> convert's exit code and words, verify's words
    "hidden size": ({"hidden_size": 128}, 3, "the draft reads hidden states of 64", "hidden_size is 64"),
    "vocabulary": ({"vocab_size": 1000}, 0, "vocab_size is 512", "vocab_size is 512"),
    "layers": ({"num_hidden_layers": 3}, 3, "the draft reads layers up to 5", "names [4, 5]"),
}


@pytest.mark.parametrize("what", WRONG)
def test_a_target_that_does_not_fit_is_told_with_the_next_step(what: str, cli: Cli, tmp_path: Path) -> None:
    changes, code, told, verified_as = WRONG[what]
    draft = drafts.make(drafts.native(num_key_value_heads=drafts.HEADS)).write(tmp_path / "draft")
    target = tmp_path / "target.json"
    target.write_text(json.dumps(drafts.target_config(**changes)))
    converted = cli("convert", draft, tmp_path / "gqa", "--target", target)
    assert (converted.code, told in converted.err) == (code, True), converted.err
    assert "the target that the draft was trained for" in converted.err
    assert (tmp_path / "gqa").exists() == (code == 0)
    verified = cli("verify", draft, "--target", target, "--quick")
    assert (verified.code, verified_as in verified.out) == (3, True), verified.out
    fix = verified.out.split(verified_as)[1].split("fix: ")[1].splitlines()[0]
    assert "target" in fix
