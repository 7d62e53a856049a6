"""Someone who reads nothing but --help: every example there does what it says, on files of one's own."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest

from eagle3pack.cli import COMMANDS
from tests.cli import Cli, command
from tests.journeys.test_whole_way import PUBLISH_YAML
from tests.test_examples import commands
from tests.verify import drafts

EXAMPLES = [shlex.join(words[1:]) for name in COMMANDS for words in commands(command(name).help or "")]
STAND_INS = {"hf:org/draft": "./draft", "org/target": "./target", "MiniMaxAI/MiniMax-M3": "./target"}
# What an example needs that only its reader has: the exit code and the words that say so.
MISSING = {
    "--calibrate-with": (3, "error: target: holds no weights of the target"),
    "--calibrate-from": (2, "error: --calibrate-from: hidden_states is no folder"),
    "--calibration": (3, "error: FILE: "),
    "--strip-shared": (2, "error: --strip-shared: only the target's config is at hand"),
}


@pytest.mark.parametrize("example", EXAMPLES)
def test_an_example_of_help_runs(
    example: str, cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    drafts.make(drafts.native(num_key_value_heads=drafts.HEADS)).write(tmp_path / "draft")
    drafts.make().write(tmp_path / "draft-gqa")
    (tmp_path / "target").mkdir()
    (tmp_path / "target" / "config.json").write_text(json.dumps(drafts.target_config()))
    name, *words = shlex.split(example)
    if name == "publish":
        (tmp_path / "publish.yaml").write_text(PUBLISH_YAML)
        verify = ("verify", "draft-gqa", "--target", "target", "--report", "report.json")
        assert cli(*verify).code == 0
        words += ["--allow-unverified", "no engine in this test"]
        words += [word for word in ("--dry-run", "--offline") if word not in words]
    else:
        words = [STAND_INS.get(word, word) for word in words]
    if name == "convert":
        words.append("--overwrite")
    result = cli(name, *words)
    code, told = next((MISSING[word] for word in words if word in MISSING), (0, ""))
    assert (result.code, told in result.err) == (code, True), (result.out, result.err)
    assert "Traceback" not in result.err and "Usage:" not in result.err


def test_every_command_has_examples() -> None:
    assert {example.split()[0] for example in EXAMPLES} == set(COMMANDS)
    assert len(EXAMPLES) >= 2 * len(COMMANDS)
