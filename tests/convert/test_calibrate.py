"""`convert --calibrate-with` and `--calibration`: from prompts to a record, and what is refused."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from eagle3pack.convert import calibrate
from eagle3pack.convert.merging.calibration import read_calibration, write_calibration
from eagle3pack.documents import schema_problems
from eagle3pack.errors import ConflictError, InputError, UsageError
from tests.cli import Cli
from tests.convert.merging.test_capture import write_target
from tests.convert.test_command import convert, load, record
from tests.tiny import draft_tensors, native_config, write_draft

TEMPLATE = "{% for m in messages %}{{ m['content'] }} {% endfor %}w3"
NUM_PROMPTS = 11


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random target with a tokenizer."""
    torch.set_num_threads(1)
    return write_tokenizer(write_target(tmp_path_factory.mktemp("target")))


def write_tokenizer(folder: Path) -> Path:
    """A tokenizer of 96 words beside a target."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {f"w{i}": i for i in range(96)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "w0", "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("prompts") / "words.jsonl"
    lines = [{"turns": [f"w{5 + i} w17 w{40 + i}", "w8 w9"]} for i in range(NUM_PROMPTS)]
    path.write_text("\n".join(map(json.dumps, lines)))
    return path


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_draft(tmp_path_factory.mktemp("draft") / "mha", dtype="F32")


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibrate, "MAX_TOKENS", 24)


@pytest.fixture(scope="module")
def calibrated(tmp_path_factory: pytest.TempPathFactory, target: Path, prompts: Path, source: Path) -> Path:
    """The folder of a converted draft, its calibration kept beside it."""
    folder = tmp_path_factory.mktemp("calibrated")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(calibrate, "MAX_TOKENS", 24)
        convert(
            source,
            folder / "gqa",
            num_kv_heads=2,
            method="als",
            target=str(target),
            calibrate_with=str(prompts),
            save_calibration=folder / "c.safetensors",
            grouping="auto",
        )
    return folder


def test_the_record_tells_what_was_calibrated_with_and_held_out_errors(
    calibrated: Path, target: Path, prompts: Path
) -> None:
    found = record(calibrated / "gqa")
    assert schema_problems(found, "conversion") == []
    parameters = found["method"]["parameters"]
    assert parameters["metric"] == "calibration"
    about = parameters["calibration"]
    assert schema_problems(about, "calibration") == []
    assert about["target"] == {"id": target.name} and about["prompts"][0]["num_prompts"] == NUM_PROMPTS
    assert about["tokens"]["held_out"] > 0 and len(about["tokens"]["by_step"]) == 3
    assert str(calibrated) not in json.dumps(found) and str(target) not in json.dumps(found)
    (layer,) = found["layers"]
    held_out, merging = layer["held_out"], layer["merging"]
    assert merging["refit_output"] == "ridge" and merging["metric"] == "calibration"
    assert held_out["output_error"] < held_out["output_error_by_mean"]
    assert held_out["output_error"] == pytest.approx(merging["refit"]["error_after"], rel=1e-3)
    by_grouping = held_out["output_error_by_grouping"]
    assert set(by_grouping) == {"contiguous", "similarity"}
    assert merging["grouping"] == min(by_grouping, key=by_grouping.__getitem__)
    assert len(held_out["same_token"]) == 3 and held_out["logits_kl"] > 0


def test_several_files_are_put_together(calibrated: Path, source: Path, tmp_path: Path) -> None:
    file, other = calibrated / "c.safetensors", tmp_path / "other.safetensors"
    made = read_calibration(file)
    convert(source, tmp_path / "gqa", num_kv_heads=2, method="als", calibration=(file, file))
    about = record(tmp_path / "gqa")["method"]["parameters"]["calibration"]
    assert about["tokens"]["moments"] == 2 * made.document["tokens"]["moments"]
    assert len(about["prompts"]) == 2
    write_calibration(replace(made, document={**made.document, "target": {"id": "another"}}), other)
    with pytest.raises(InputError, match=r"different targets: .* and another"):
        convert(source, tmp_path / "two", num_kv_heads=2, method="als", calibration=(file, other))


def test_the_record_tells_what_each_stage_has_accepted_of_held_out_texts(calibrated: Path) -> None:
    acceptance = record(calibrated / "gqa")["layers"][0]["held_out"]["acceptance"]
    assert acceptance["num_texts"] == 4 and acceptance["healed"] is None  # two conversations of two turns
    assert acceptance["source"]["retention"] in (1, None)  # None: a draft at random has nothing accepted
    for stage in ("source", "mean", "merged"):
        found = acceptance[stage]
        accepted = sum(found["accepted_per_position"])
        assert found["drafts"] > 20 and len(found["accepted_per_position"]) == 3
        assert found["mean_accepted_length"] == pytest.approx(1 + accepted / found["drafts"])


def test_without_what_a_replay_needs_the_accepted_length_is_left_out_and_why(
    calibrated: Path, target: Path, source: Path, tmp_path: Path
) -> None:
    file, old = calibrated / "c.safetensors", tmp_path / "old.safetensors"
    made = read_calibration(file)
    bare = tuple(replace(stretch, token_ids=None, answer=None) for stretch in made.stretches)
    write_calibration(replace(made, stretches=bare), old)
    options = {"num_kv_heads": 2, "method": "svd", "dry_run": True}
    without = convert(source, tmp_path / "gqa", calibration=(old,), **options)
    assert "accepted_length" not in without.quality and "same_token_at_step_0" in without.quality
    assert any("accepted length left out: the calibration is of an earlier" in w for w in without.warnings)

    # The digest of a calibration does not cover embedding and head: a draft that shares them fits it.
    tensors = draft_tensors(native_config(), dtype="F32")
    del tensors["embed_tokens.weight"]
    stripped = write_draft(tmp_path / "stripped", tensors=tensors, dtype="F32")
    (tmp_path / "config-only").mkdir()
    shutil.copy(target / "config.json", tmp_path / "config-only")
    for nothing in (None, str(tmp_path / "config-only")):
        without = convert(stripped, tmp_path / "gqa", calibration=(file,), target=nothing, **options)
        assert any("left out: the draft shares the target's" in warning for warning in without.warnings)
    found = convert(stripped, tmp_path / "gqa", calibration=(file,), target=str(target), **options)
    assert found.quality["accepted_length"] >= 1 and found.quality["accepted_texts"] == 4
    assert "accepted length" in found.as_text() and "accepted by position" in found.as_text()


def test_figures_of_texts_that_the_merge_was_fitted_on_are_called_so(
    calibrated: Path, source: Path, tmp_path: Path
) -> None:
    made, file = read_calibration(calibrated / "c.safetensors"), tmp_path / "one.safetensors"
    fitted = tuple(replace(stretch, held_out=False) for stretch in made.stretches)
    write_calibration(replace(made, stretches=fitted), file)
    found = convert(source, tmp_path / "gqa", num_kv_heads=2, method="als", calibration=(file,))
    assert found.as_json()["quality"]["judged_on_held_out"] == 0
    assert "held-out" not in found.as_text() and "on the texts it was fitted on" in found.as_text()
    assert any("held no text out" in warning for warning in found.warnings)
    written = record(tmp_path / "gqa")
    assert schema_problems(written, "conversion") == []
    assert written["layers"][0]["held_out"]["texts"] == "fitted"
    held_out = record(calibrated / "gqa")["layers"][0]["held_out"]
    assert held_out["texts"] == "held out"


def test_a_kept_calibration_gives_the_same_draft_elsewhere(
    calibrated: Path, source: Path, tmp_path: Path
) -> None:
    file = calibrated / "c.safetensors"
    assert (read_calibration(file).document) == record(calibrated / "gqa")["method"]["parameters"][
        "calibration"
    ]
    convert(source, tmp_path / "one", num_kv_heads=2, method="als", calibration=(file,), grouping="auto")
    before, after = load(calibrated / "gqa"), load(tmp_path / "one")
    for name in before:
        torch.testing.assert_close(after[name].float(), before[name].float(), rtol=1e-4, atol=1e-5)


def test_a_dry_run_says_how_the_result_does_on_held_out_activations(
    calibrated: Path, source: Path, tmp_path: Path
) -> None:
    summary = convert(
        source,
        tmp_path / "gqa",
        num_kv_heads=2,
        method="svd",
        calibration=(calibrated / "c.safetensors",),
        dry_run=True,
    )
    assert 0 < summary.quality["output_error"] < summary.quality["output_error_by_mean"]
    assert "held-out output error" in summary.as_text() and "same token at step 0" in summary.as_text()


@pytest.mark.parametrize("refit", ["closed", "ridge"])
def test_what_was_asked_for_wins_over_the_defaults(
    calibrated: Path, source: Path, tmp_path: Path, refit: Any
) -> None:
    convert(
        source,
        tmp_path / "gqa",
        num_kv_heads=2,
        method="procrustes",
        metric="norm",
        refit_output=refit,
        calibration=(calibrated / "c.safetensors",),
    )
    merging = record(tmp_path / "gqa")["layers"][0]["merging"]
    assert (merging["metric"], merging["refit_output"]) == ("norm", refit)


def test_a_calibration_of_other_weights_or_another_shape_is_refused(calibrated: Path, tmp_path: Path) -> None:
    file = calibrated / "c.safetensors"
    twin = write_draft(tmp_path / "twin", dtype="F32", seed=1)
    with pytest.raises(InputError, match="another draft"):
        convert(twin, tmp_path / "gqa", num_kv_heads=2, method="als", calibration=(file,))
    wide = write_draft(tmp_path / "wide", native_config(num_attention_heads=16, num_key_value_heads=16))
    with pytest.raises(InputError, match="num_attention_heads is 8, this one has 16"):
        convert(wide, tmp_path / "gqa", num_kv_heads=2, method="als", calibration=(file,))
    assert not (tmp_path / "gqa").exists()


def test_an_earlier_calibration_is_replaced_with_overwrite_only(
    calibrated: Path, source: Path, target: Path, prompts: Path, tmp_path: Path
) -> None:
    kept = tmp_path / "c.cal"
    shutil.copy(calibrated / "c.safetensors", kept)
    options: dict[str, Any] = {"target": str(target), "calibrate_with": str(prompts), "method": "als"}
    with pytest.raises(ConflictError, match="exists"):
        convert(source, tmp_path / "gqa", save_calibration=kept, **options)
    assert kept.read_bytes() == (calibrated / "c.safetensors").read_bytes()
    convert(source, tmp_path / "gqa", save_calibration=kept, calibration_tokens=64, overwrite=True, **options)
    assert kept.read_bytes() != (calibrated / "c.safetensors").read_bytes()


def test_other_names_and_layouts_do_not_make_another_draft(calibrated: Path, tmp_path: Path) -> None:
    again = write_draft(tmp_path / "again", dtype="F32", prefix="layers.0.", shards=2)
    convert(
        again, tmp_path / "gqa", num_kv_heads=2, method="als", calibration=(calibrated / "c.safetensors",)
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"metric": "calibration"}, "--metric calibration: needs a calibration"),
        ({"refit_output": "ridge"}, "--refit-output ridge: needs a calibration"),
        ({"grouping": "auto"}, "--grouping auto: needs a calibration"),
        ({"calibrate_with": "shipped"}, "needs the target's weights"),
        ({"save_calibration": Path("c")}, "nothing is calibrated"),
        (
            {"calibration": (Path("c"),), "calibrate_with": "shipped", "target": "x"},
            "give one of them, not 2",
        ),
        ({"calibrate_with": "shipped", "target": "x", "save_calibration": Path("no/c")}, "does not exist"),
    ],
)
def test_contradictions_are_refused_before_anything_is_read(
    tmp_path: Path, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        convert(tmp_path / "nowhere", tmp_path / "gqa", num_kv_heads=2, method="als", **options)


def test_pooling_copies_and_several_layers_have_no_use_for_it(calibrated: Path, tmp_path: Path) -> None:
    file = calibrated / "c.safetensors"
    source = write_draft(tmp_path / "mha")
    with pytest.raises(UsageError, match="mean looks at no activations"):
        convert(source, tmp_path / "gqa", num_kv_heads=2, calibration=(file,))
    with pytest.raises(UsageError, match="already"):
        convert(source, tmp_path / "gqa", num_kv_heads=8, method="als", calibration=(file,))
    deep = write_draft(tmp_path / "deep", native_config(num_hidden_layers=2))
    with pytest.raises(UsageError, match="what the first layer reads"):
        convert(deep, tmp_path / "gqa", num_kv_heads=2, method="als", calibration=(file,))


def test_a_broken_file_is_one_clear_error_on_the_command_line(
    cli: Cli, calibrated: Path, source: Path, tmp_path: Path
) -> None:
    broken = tmp_path / "c.safetensors"
    broken.write_bytes((calibrated / "c.safetensors").read_bytes()[:-7])
    result = cli(
        "convert", source, tmp_path / "gqa", "--num-kv-heads", "2", "--method", "als", "--calibration", broken
    )
    assert result.code == 3 and "truncated" in result.err and "Traceback" not in result.err


def test_the_command_line_tells_how_many_tokens_there_are(
    cli: Cli, calibrated: Path, source: Path, tmp_path: Path
) -> None:
    file = calibrated / "c.safetensors"
    result = cli(
        "convert", source, tmp_path / "gqa", "--num-kv-heads", "2", "--method", "als", "--calibration", file
    )
    assert result.code == 0, result.err
    assert "kept for the refit of o_proj" in result.err and "held out" in result.err


def test_without_activations_the_closed_form_is_what_can_be_had(
    calibrated: Path, source: Path, tmp_path: Path
) -> None:
    from dataclasses import replace

    bare = tmp_path / "bare.safetensors"
    write_calibration(replace(read_calibration(calibrated / "c.safetensors"), stretches=()), bare)
    with pytest.raises(UsageError, match="no activations"):
        convert(source, tmp_path / "gqa", num_kv_heads=2, method="als", calibration=(bare,))


@pytest.mark.parametrize("method", ["mean", "als"])
def test_healing_lowers_the_held_out_error_and_says_by_how_much(
    cli: Cli, calibrated: Path, source: Path, tmp_path: Path, method: str
) -> None:
    options = ("--num-kv-heads", "2", "--method", method, "--calibration", calibrated / "c.safetensors")
    state, out = tmp_path / "heal.pt", tmp_path / "gqa"
    healing = (*options, "--heal", "6", "--heal-state", state)
    result = cli("convert", source, out, *healing)
    assert result.code == 0, result.err
    assert "healing: step 6 of 6, held-out error" in result.err and "output error unhealed" in result.err
    found = record(out)
    assert schema_problems(found, "conversion") == []
    assert found["method"] == {"name": method, "parameters": found["method"]["parameters"]}
    assert found["method"]["parameters"]["heal_steps"] == 6
    assert {name.split(".")[2] for name in found["changed_tensors"]} == {
        "q_proj",
        "k_proj",
        "v_proj",
        "o_proj",
    }
    (layer,) = found["layers"]
    healed, held_out = layer["heal"], layer["held_out"]
    assert healed["best_step"] > 0 and healed["error_after"] < healed["error_before"]
    assert held_out["output_error"] == pytest.approx(healed["error_after"], rel=1e-3)
    assert held_out["acceptance"]["healed"]["drafts"] > 20
    assert "; before healing: " in result.err

    again = cli("convert", source, tmp_path / "again", *healing)
    assert again.code == 0 and "going on after step 6" in again.err
    before, after = load(out), load(tmp_path / "again")
    assert all(torch.equal(before[name], after[name]) for name in before)
    other = cli("convert", source, tmp_path / "other", *options, "--heal", "7", "--heal-state", state)
    assert other.code == 3 and "belongs to another run" in other.err
    assert "going on" not in other.err and str(state) in other.err
    assert not (tmp_path / "other").exists()


def test_a_dry_run_does_not_train(calibrated: Path, source: Path, tmp_path: Path) -> None:
    state = tmp_path / "heal.pt"
    summary = convert(
        source,
        tmp_path / "gqa",
        num_kv_heads=2,
        method="als",
        calibration=(calibrated / "c.safetensors",),
        heal=6,
        heal_state=state,
        dry_run=True,
    )
    assert "output_error_before_healing" not in summary.quality and not state.exists()
    assert any("a dry run does not train" in warning for warning in summary.warnings)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"heal": 5}, "--heal: needs a calibration"),
        ({"heal_state": Path("c")}, "--heal-state: nothing is trained"),
        ({"heal": 5, "calibration": (Path("c"),), "heal_state": Path("no/c")}, "does not exist"),
    ],
)
def test_healing_that_cannot_be_is_refused_before_anything_is_read(
    tmp_path: Path, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        convert(tmp_path / "nowhere", tmp_path / "gqa", num_kv_heads=2, **options)
