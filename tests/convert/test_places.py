"""What `convert` must not write over, and mistakes that are found before anything is recorded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from eagle3pack.checkpoint import folder as folder_module
from eagle3pack.convert import calibrate
from eagle3pack.errors import Eagle3PackError, InputError, PermissionDenied, UsageError
from tests.convert.test_command import convert
from tests.tiny import draft_tensors, native_config, target_config, write_draft


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A draft, a target's config and prompts; a recording would fail the test."""

    def recorded(*_: object) -> None:
        pytest.fail("found only after the recording began")

    monkeypatch.setattr(calibrate, "_made", recorded)
    monkeypatch.chdir(tmp_path)
    write_draft(tmp_path / "draft")
    (tmp_path / "target").mkdir()
    (tmp_path / "target" / "config.json").write_text(json.dumps(target_config()))
    (tmp_path / "prompts.jsonl").write_text('{"turns": ["a"]}\n')
    return tmp_path


def refused(
    place: Path, error: type[Eagle3PackError], message: str, out: str = "out", **options: Any
) -> None:
    """Nothing changes on disk, and the error says what is wrong."""
    before = {path: path.read_bytes() for path in place.rglob("*") if path.is_file()}
    settings = {"method": "als", "target": "target", "calibrate_with": "prompts.jsonl"} | options
    with pytest.raises(error, match=message):
        convert(Path("draft"), Path(out), **settings)
    assert {path: path.read_bytes() for path in place.rglob("*") if path.is_file()} == before


@pytest.mark.parametrize("option", ["save_calibration", "heal_state"])
@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("draft/model.safetensors", "is a file of the model draft; it is not overwritten"),
        ("draft/new.safetensors", "is a file of the model draft"),
        ("target/config.json", "is a file of the model target"),
        ("target/model.safetensors.index.json", "is a file of the model target"),
        ("draft", "is a folder"),
        ("nowhere/c", "does not exist"),
        ("out", "OUT out: is the file of --"),
        ("n" * 240, "too long a name"),
    ],
)
def test_no_file_is_written_over_a_model_or_where_none_can_be(
    place: Path, option: str, path: str, message: str
) -> None:
    refused(place, UsageError, message, heal=1, **{option: Path(path)})


def test_a_file_that_is_no_calibration_is_kept(place: Path) -> None:
    (place / "notes.txt").write_text("mine")
    for overwrite in (False, True):
        refused(
            place,
            UsageError,
            "notes.txt: exists and is no calibration; it is not overwritten",
            save_calibration=Path("notes.txt"),
            overwrite=overwrite,
        )
    refused(place, InputError, "no state that --heal wrote", heal=1, heal_state=Path("notes.txt"))


def test_files_do_not_go_where_the_output_will_be(place: Path) -> None:
    write_draft(place / "out")
    for path, option in (("out/c.cal", "save_calibration"), ("out/h.pt", "heal_state")):
        refused(place, UsageError, "holds the file of --", heal=1, overwrite=True, **{option: Path(path)})


def test_a_folder_that_may_not_be_written_is_found_at_once(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (place / "ro").mkdir()
    monkeypatch.setattr(folder_module.os, "access", lambda path, mode: Path(path).name != "ro")
    for option in ("save_calibration", "heal_state"):
        refused(place, PermissionDenied, "ro/c: may not be written", heal=1, **{option: Path("ro/c")})
    refused(place, PermissionDenied, "may not be written", out="ro/out")


@pytest.mark.parametrize("dry_run", [False, True])
def test_what_is_read_is_not_replaced(place: Path, dry_run: bool) -> None:
    (place / "states").mkdir()
    (place / "states" / "config.json").write_text("{}")
    options: dict[str, Any] = {"overwrite": True, "dry_run": dry_run}
    refused(place, UsageError, "OUT target: is the target", out="target", **options)
    refused(
        place,
        UsageError,
        "OUT target: holds the target",
        "target",
        **options,
        target="target/config.json",
    )
    refused(place, UsageError, "is the target", "target", method="mean", calibrate_with=None, **options)
    refused(
        place,
        UsageError,
        "is the folder of --calibrate-from",
        "states",
        calibrate_with=None,
        calibrate_from=Path("states"),
        **options,
    )


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"grouping": "nofile.json"}, UsageError, "nofile.json' is none of contiguous, similarity and auto"),
        ({"grouping": "groups.json"}, InputError, r"groups.json: expected 2 groups of 4 heads, found 2 \+ 2"),
        ({"grouping": "deep.json"}, InputError, "deep.json: is not valid JSON"),
        ({"grouping": "prompts.jsonl"}, InputError, "prompts.jsonl: holds .* expected lists"),
        ({"refit_output": "none"}, UsageError, "--refit-output none: --method als chooses a basis"),
        ({"heal_state": Path("h")}, UsageError, "nothing is trained"),
        ({"num_kv_heads": 8}, UsageError, "the draft has 8 key/value heads already; none are merged"),
        ({"calibrate_from": Path("draft")}, UsageError, "--calibrate-with and --calibrate-from: give one"),
        (
            {"endpoint": "http://x", "calibrate_with": None},
            UsageError,
            "--endpoint: a server answers prompts",
        ),
    ],
)
def test_what_cannot_be_merged_is_refused_before_the_recording(
    place: Path, options: dict[str, Any], error: type[Eagle3PackError], message: str
) -> None:
    (place / "groups.json").write_text("[[0, 1], [2, 3]]")
    (place / "deep.json").write_text("[" * 100_000)
    refused(place, error, message, **options)


def test_a_draft_that_cannot_be_merged_is_refused_before_the_recording(place: Path) -> None:
    tensors = draft_tensors(native_config())
    del tensors["embed_tokens.weight"]
    name = "layers.0.self_attn.q_proj.weight"
    write_draft(place / "draft", tensors=tensors)
    refused(place, UsageError, "--metric embedding: the draft has no embed_tokens", metric="embedding")
    dtype, shape, data = tensors[name]
    tensors[name] = (dtype, shape, b"\xff\xff" + data[2:])
    write_draft(place / "draft", tensors=tensors)
    refused(place, InputError, r"model.safetensors: the tensor midlayer.self_attn.q_proj.weight holds NaN")
    rope = {"rope_type": "longrope", "factor": 2.0}
    write_draft(place / "draft", native_config(rope_scaling=rope))
    refused(place, UsageError, "--grouping auto: it runs the attention, and", grouping="auto")
