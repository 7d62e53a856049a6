"""`--retrain-with`: refused early, written whole or not at all, and no part of the draft."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from eagle3pack.convert.handoff import specforge, speculators, torchspec
from eagle3pack.documents import schema_problems
from eagle3pack.errors import ConflictError, InputError, UnsupportedDraftError, UsageError
from tests.cli import Cli
from tests.convert.handoff.samples import hand_over, load, write_target
from tests.tiny import draft_tensors, native_config, speculators_config, write_draft

FRAMEWORKS = ["torchspec", "specforge", "speculators"]
TENSORS_OF_A_MAP = ("d2t", "t2d")


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_the_command_line_is_printed_and_kept(cli: Cli, tmp_path: Path, framework: str) -> None:
    source, target = write_draft(tmp_path / "mha"), write_target(tmp_path / "target")
    place = tmp_path / "re train"
    result = cli(
        *("convert", source, tmp_path / "gqa", "--num-kv-heads", 2, "--target", target),
        *("--retrain-with", framework, place, "--json"),
    )
    assert result.code == 0, result.err
    document = json.loads(result.out)
    assert schema_problems(document, "convert-result") == []
    command = document["hand_off"]["command"]
    assert f"'{place}/" in command  # quoted for a shell
    assert command in (place / "README.md").read_text()
    assert all(note in (place / "README.md").read_text() for note in document["hand_off"]["notes"])


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_the_draft_is_the_same_as_without_it(
    tmp_path: Path, framework: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "0")
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        write_draft(tmp_path / name / "mha")
    hand_over(tmp_path / "one", framework)
    hand_over(tmp_path / "two", "speculators")
    for path in (tmp_path / "one" / "gqa").iterdir():
        assert path.read_bytes() == (tmp_path / "two" / "gqa" / path.name).read_bytes()


def test_an_existing_folder_is_refused_even_with_overwrite(cli: Cli, tmp_path: Path) -> None:
    source, place = write_draft(tmp_path / "mha"), tmp_path / "retrain"
    place.mkdir()
    result = cli(
        *("convert", source, tmp_path / "gqa", "--num-kv-heads", 2, "--overwrite"),
        *("--retrain-with", "torchspec", place),
    )
    assert result.code == ConflictError.exit_code
    assert f"--retrain-with torchspec {place}: exists" in result.err
    assert not (tmp_path / "gqa").exists()


@pytest.mark.parametrize("place", ["gqa", "gqa/retrain", ".", "mha/retrain"])
def test_folders_within_each_other_are_refused(tmp_path: Path, place: str) -> None:
    source = write_draft(tmp_path / "mha")
    before = sorted(path.name for path in source.iterdir())
    with pytest.raises((UsageError, ConflictError)):
        hand_over_to(tmp_path, tmp_path / place)
    assert not (tmp_path / "gqa").exists()
    assert sorted(path.name for path in source.iterdir()) == before


def hand_over_to(folder: Path, place: Path) -> None:
    from eagle3pack.convert.command import ConvertOptions, run_convert
    from tests.convert.test_command import NoProgress

    options = ConvertOptions(num_kv_heads=2, retrain_with=("torchspec", place))
    run_convert(str(folder / "mha"), str(folder / "gqa"), options, say=lambda _: None, progress=NoProgress())


def test_a_dry_run_checks_it_and_writes_nothing(tmp_path: Path) -> None:
    summary = hand_over(tmp_path, "torchspec", dry_run=True)
    assert summary.as_json()["hand_off"]["command"] is None
    assert f"for torchspec           {tmp_path / 'retrain'}" in summary.as_text()
    assert not (tmp_path / "retrain").exists()


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_a_broken_vocabulary_map_leaves_nothing_behind(tmp_path: Path, framework: str) -> None:
    raw = native_config(draft_vocab_size=40)
    tensors = draft_tensors(raw)
    tensors["d2t"] = ("I64", (40,), bytes(8) + (200).to_bytes(8, "little") * 39)
    write_draft(tmp_path / "mha", raw, tensors=tensors)
    with pytest.raises(InputError, match="in ascending order"):
        hand_over(tmp_path, framework)
    assert {path.name for path in tmp_path.iterdir()} == {"mha", "target"}


def test_what_the_draft_does_not_bring_is_taken_from_the_target(tmp_path: Path) -> None:
    tensors = draft_tensors(native_config())
    del tensors["embed_tokens.weight"], tensors["lm_head.weight"]
    write_draft(tmp_path / "mha", tensors=tensors)
    hand_over(tmp_path, "specforge")
    target, draft = load(tmp_path / "target"), load(tmp_path / "retrain" / "draft")
    assert torch.equal(draft["lm_head.weight"], target["lm_head.weight"])
    assert "embed_tokens.weight" not in draft  # SpecForge takes the target's itself
    assert "lm_head.weight" not in load(tmp_path / "gqa")


@pytest.mark.parametrize("target", [None, "config", "other"])
def test_without_a_target_that_has_it_a_missing_tensor_is_a_usage_error(
    tmp_path: Path, target: str | None
) -> None:
    tensors = draft_tensors(native_config())
    del tensors["embed_tokens.weight"]
    write_draft(tmp_path / "mha", tensors=tensors)
    folder = write_target(tmp_path / "model")
    if target == "other":
        (folder / "model.safetensors").unlink()
        write_draft(tmp_path / "model", tensors={"norm.weight": ("BF16", (2,), bytes(4))})
        (folder / "config.json").write_text((write_target(tmp_path / "b") / "config.json").read_text())
    text = {None: None, "config": str(folder / "config.json"), "other": str(folder)}[target]
    with pytest.raises(UsageError, match=r"wants embed_tokens\.weight") as caught:
        hand_over(tmp_path, "torchspec", target=text)
    assert "--target" in caught.value.hint
    assert not (tmp_path / "gqa").exists()


@pytest.mark.parametrize("framework", ["specforge", "speculators"])
def test_frameworks_that_write_the_target_down_need_it(tmp_path: Path, framework: str) -> None:
    with pytest.raises(UsageError) as caught:
        hand_over(tmp_path, framework, target=None)
    assert caught.value.hint == "Give --target."


UNSUPPORTED: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "two layers": (native_config(num_hidden_layers=2), ("torchspec", "specforge")),
    "norm_before_residual": (native_config(norm_before_residual=True), ("torchspec", "specforge")),
    "norm_output": (native_config(norm_output=True), ("torchspec", "specforge")),
    "attention biases": (native_config(attention_bias=True), ("torchspec", "specforge")),
    "q and k norms": (native_config(architectures=["Eagle3Qwen3ForCausalLM"]), ("torchspec", "specforge")),
    "fc_norm": (native_config(fc_norm=True), ("torchspec",)),
    "norm_before_fc": (native_config(norm_before_fc=True), ("torchspec", "specforge")),
    "longrope": (
        native_config(rope_scaling={"rope_type": "longrope", "factor": 4.0}),
        ("torchspec", "specforge"),
    ),
    "linear rope of another theta": (
        native_config(rope_theta=5e5, rope_scaling={"rope_type": "linear", "factor": 4.0}),
        ("torchspec",),
    ),
    "another hidden size": (native_config(target_hidden_size=32), ("speculators",)),
    "both norms": (native_config(norm_before_fc=True, fc_norm=True), FRAMEWORKS),
}


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize("what", UNSUPPORTED)
def test_what_a_release_cannot_train_is_refused_before_the_conversion(
    tmp_path: Path, what: str, framework: str
) -> None:
    raw, refused = UNSUPPORTED[what]
    if framework in refused:
        with pytest.raises(UnsupportedDraftError, match="cannot train this draft") as caught:
            hand_over(tmp_path, framework, raw)
        releases = [module.RELEASE for module in (torchspec, specforge, speculators)]
        assert any(release in str(caught.value) for release in releases)
        assert not (tmp_path / "gqa").exists()
    else:
        hand_over(tmp_path, framework, raw)


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize("raw", [native_config(), speculators_config()])
def test_the_new_count_is_in_every_config(tmp_path: Path, framework: str, raw: dict[str, Any]) -> None:
    hand_over(tmp_path, framework, raw)
    (path,) = (tmp_path / "retrain").rglob("config.json")
    config = json.loads(path.read_text())
    assert config.get("transformer_layer_config", config)["num_key_value_heads"] == 2


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_the_same_input_gives_the_same_bytes(tmp_path: Path, framework: str) -> None:
    raw = native_config(draft_vocab_size=40)
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        hand_over(tmp_path / name, framework, raw)
    files = [path for path in (tmp_path / "one" / "retrain").rglob("*") if path.is_file()]
    for path in files:
        other = tmp_path / "two" / path.relative_to(tmp_path / "one")
        here, there = path.read_bytes(), other.read_bytes()
        if path.suffix in (".yaml", ".md", ".json"):
            there = there.replace(str(tmp_path / "two").encode(), str(tmp_path / "one").encode())
        assert here == there, path
