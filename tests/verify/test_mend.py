"""--fix: what is mended is sound, what is not safe stays as it is."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from safetensors import safe_open
from safetensors.torch import load_file

from eagle3pack.documents import schema_problems
from eagle3pack.draft.target import parse_target_config
from eagle3pack.errors import ConflictError, InputError
from eagle3pack.verify.context import Context
from eagle3pack.verify.mend import what_remains, write_mended_copy
from eagle3pack.verify.report import examine
from eagle3pack.verify.weights import INDEX_NAME
from tests.verify import drafts, faults
from tests.verify.test_faults import examined, ids

MENDABLE = {
    "needless_map": faults.needless_map,
    "model_prefix": faults.model_prefix,
    "verifier_left_in": faults.verifier_left_in,
    "tied": faults.tied,
    "lost_head_dim": faults.lost_head_dim,
    "absent_reduced_vocabulary": faults.absent_reduced_vocabulary,
    "no_model_type": faults.no_model_type,
    "nested_ids": faults.nested_ids,
    "null_switch": faults.null_switch,
    "top_ids": faults.top_ids,
    "four_states_at_the_top": faults.four_states_at_the_top,
    "four_states_speculators": faults.four_states_speculators,
    "lost_target_width": faults.lost_target_width,
}


def mended(draft: drafts.Draft, folder: Path) -> tuple[list[str], Context]:
    """Examine a draft, mend it, and look at the copy."""
    context, examination = examined(draft, folder)
    done = write_mended_copy(context, examination, folder / "mended")
    again = Context(
        folder / "mended",
        target=parse_target_config(draft.target, where="target", name="org/target"),
        target_text=str(folder / "target"),
    )
    return done, again


@pytest.mark.parametrize("name", MENDABLE)
def test_a_mechanical_fault_is_gone(name: str, tmp_path: Path) -> None:
    done, again = mended(MENDABLE[name](), tmp_path)

    assert done
    assert ids(examine(again), "error") == set()


@pytest.mark.parametrize(
    "name", ["plain", "modelopt", "torchspec", "safeailab", "speculators", "sharded", "specforge"]
)
def test_mending_twice_is_mending_once(name: str, tmp_path: Path) -> None:
    _, again = mended(drafts.GOOD[name](), tmp_path)
    examination = examine(again)

    assert ids(examination, "error") == set()
    assert write_mended_copy(again, examination, tmp_path / "twice") == []
    assert not (tmp_path / "twice").exists()


def test_values_are_never_touched(tmp_path: Path) -> None:
    draft = faults.model_prefix()
    mended(draft, tmp_path)

    before = load_file(tmp_path / "draft" / "model.safetensors")
    after = load_file(tmp_path / "mended" / "model.safetensors")
    renamed = {
        name.removeprefix("model.").replace("layers.0.", "midlayer."): tensor
        for name, tensor in before.items()
    }
    assert renamed.keys() == after.keys()
    assert all(renamed[name].equal(after[name]) for name in after)
    with safe_open(tmp_path / "mended" / "model.safetensors", "pt") as file:
        assert file.metadata()["format"] == "pt"


def test_shards_keep_their_files(tmp_path: Path) -> None:
    mended(drafts.make(shards=3, metadata={"torchspec_version": "1"}), tmp_path)

    names = sorted(path.name for path in (tmp_path / "draft").iterdir())
    assert sorted(path.name for path in (tmp_path / "mended").iterdir()) == sorted(
        [*names, "eagle3pack.json"]
    )


def test_what_was_done_goes_into_the_record(tmp_path: Path) -> None:
    done, again = mended(drafts.modelopt(), tmp_path)

    record = json.loads((tmp_path / "mended" / "eagle3pack.json").read_text())
    assert not schema_problems(record, "conversion")
    assert [f"{mend['check']}: {mend['message']}" for mend in record["mends"]] == done
    assert record["output"]["draft_digest"] == again.scan.digest


def test_the_source_is_untouched_and_out_is_not_overwritten(tmp_path: Path) -> None:
    context, examination = examined(drafts.modelopt(), tmp_path)
    before = {path.name: path.read_bytes() for path in (tmp_path / "draft").iterdir()}
    (tmp_path / "out").mkdir()

    with pytest.raises(ConflictError) as caught:
        write_mended_copy(context, examination, tmp_path / "out")
    assert "--overwrite" not in caught.value.hint
    assert {path.name: path.read_bytes() for path in (tmp_path / "draft").iterdir()} == before


def test_a_null_is_left_out_only_where_it_says_nothing(tmp_path: Path) -> None:
    draft = faults.null_switch()
    draft.raw["hidden_size"] = None
    _, examination = examined(draft, tmp_path / "needed")
    assert not any(finding.mends for outcome in examination.failed("error") for finding in outcome.findings)

    done, again = mended(faults.null_switch(), tmp_path / "needless")
    assert "C05: left use_cache out, which was null" in done
    assert "use_cache" not in again.raw


def test_what_was_written_is_shown_as_json(tmp_path: Path) -> None:
    done, _ = mended(faults.tied(), tmp_path)
    assert any(line.endswith("tie_word_embeddings = false") for line in done)


def test_an_index_of_shards_that_are_gone_is_the_fault_beside_one_file(tmp_path: Path) -> None:
    def leave_index(folder: Path) -> None:
        index = {"metadata": {}, "weight_map": {"fc.weight": "model-00001-of-00002.safetensors"}}
        (folder / INDEX_NAME).write_text(json.dumps(index))

    draft = drafts.make()
    draft.afterwards.append(leave_index)
    context, examination = examined(draft, tmp_path)
    write_mended_copy(context, examination, tmp_path / "mended")

    (told,) = [outcome.findings for outcome in examination.failed("error")]
    assert [finding.message for finding in told] == [
        f"{INDEX_NAME} names not one file that is here: model.safetensors holds the weights"
    ]
    assert what_remains(context, tmp_path / "mended") == "no error is left"
    assert not (tmp_path / "mended" / INDEX_NAME).exists()


def test_what_is_left_is_said(tmp_path: Path) -> None:
    draft = faults.mha_weights()
    draft.raw["use_cache"] = None
    context, examination = examined(draft, tmp_path)
    write_mended_copy(context, examination, tmp_path / "mended")
    assert what_remains(context, tmp_path / "mended") == "2 errors left: C10"


def test_a_shape_that_cannot_be_read_is_one_clear_error(tmp_path: Path) -> None:
    draft = drafts.torchspec()  # its metadata can be mended
    draft.raw["num_attention_heads"] = "16"
    context, examination = examined(draft, tmp_path)

    with pytest.raises(InputError, match=r"cannot be mended.*num_attention_heads"):
        write_mended_copy(context, examination, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "build", [faults.mha_weights, faults.no_theta, faults.absolute_map, faults.random_embedding]
)
def test_nothing_is_guessed(build: object, tmp_path: Path) -> None:
    draft = build()  # type: ignore[operator]
    context, examination = examined(draft, tmp_path)
    for outcome in examination.failed("error"):
        assert not any(finding.mends for finding in outcome.findings)
    assert context.folder.exists()
