"""Calibration files: what is written comes back, adds up, and is never trusted."""

from __future__ import annotations

import errno
import json
import os
import stat
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from eagle3pack.convert.merging import calibration as calibration_module
from eagle3pack.convert.merging.calibration import (
    METADATA_KEY,
    Calibration,
    Stretch,
    merge_calibrations,
    read_calibration,
    require_same_draft,
    visibility,
    write_calibration,
)
from eagle3pack.documents import schema_problems
from eagle3pack.draft.config import parse_draft_config
from eagle3pack.errors import InputError, PermissionDenied, TransportError
from tests.tiny import native_config

H = 6


def document(tokens: int = 40, **changes: Any) -> dict[str, Any]:
    return {
        "schema": "eagle3pack/calibration/1",
        "created": "2026-01-01T00:00:00Z",
        "tool": {"name": "eagle3pack", "version": "0"},
        "libraries": {"torch": "2"},
        "draft": {
            "id": "draft",
            "attention_sha256": "0" * 64,
            "num_attention_heads": 4,
            "num_key_value_heads": 4,
            "head_dim": 8,
            "hidden_size": H,
        },
        "target": {"id": "target"},
        "prompts": [{"name": "p", "sha256": "1" * 64, "num_prompts": 2}],
        "generation": {"num_speculative_tokens": 3, "max_tokens": 9, "dtype": "float32"},
        "tokens": {
            "moments": tokens,
            "activations": 5,
            "held_out": 4,
            "distances": tokens,
            "by_step": [tokens, 3],
        },
    } | changes


def calibration(seed: int = 0, tokens: int = 40) -> Calibration:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, 2 * H, generator=generator)

    def stretch(count: int, held_out: bool) -> Stretch:
        embeds, hidden = torch.randn(2, count, H, generator=generator).bfloat16()
        positions = torch.arange(count, dtype=torch.int32)
        token_ids = torch.randint(90, (count,), generator=generator, dtype=torch.int32)
        steps = torch.zeros_like(positions)
        return Stretch(embeds, hidden, positions, steps, held_out, token_ids, positions >= 2)

    mass = torch.rand(4, 3 + seed, generator=generator, dtype=torch.float64)
    stretches = (stretch(4, True), stretch(5, False))
    moment = x.T @ x / tokens
    mass = mass / mass.sum(1, keepdim=True)
    return Calibration(document(tokens), (moment + moment.T) / 2, x.mean(0), mass, stretches)


def test_the_document_of_these_tests_holds_the_schema() -> None:
    assert schema_problems(document(), "calibration") == []


def test_a_file_comes_back_bit_for_bit(tmp_path: Path) -> None:
    made = calibration()
    write_calibration(made, tmp_path / "c.safetensors")
    found = read_calibration(tmp_path / "c.safetensors")
    assert found.document == made.document
    assert torch.equal(found.second_moment, made.second_moment) and torch.equal(found.mean, made.mean)
    assert found.distance_mass is not None and made.distance_mass is not None
    assert torch.equal(found.distance_mass, made.distance_mass)
    for one, other in zip(found.stretches, made.stretches, strict=True):
        assert torch.equal(one.hidden, other.hidden) and torch.equal(one.embeds, other.embeds)
        assert torch.equal(one.positions, other.positions) and one.held_out == other.held_out
        assert one.token_ids is not None and one.answer is not None
        assert other.token_ids is not None and other.answer is not None
        assert torch.equal(one.token_ids, other.token_ids) and torch.equal(one.answer, other.answer)
    assert [path.name for path in tmp_path.iterdir()] == ["c.safetensors"]


def test_without_activations_and_distances_it_is_a_calibration_still(tmp_path: Path) -> None:
    made = replace(calibration(), stretches=(), distance_mass=None)
    write_calibration(made, tmp_path / "c.safetensors")
    moments = read_calibration(tmp_path / "c.safetensors").moments(torch.ones(H), 1e-6)
    assert not moments.samples and not moments.held_out and moments.distance_mass is None


def test_a_file_without_token_ids_is_read_and_makes_a_merged_one_that_has_none(tmp_path: Path) -> None:
    old = replace(
        calibration(),
        stretches=tuple(replace(s, token_ids=None, answer=None) for s in calibration().stretches),
    )
    for i, made in enumerate((old, merge_calibrations([calibration(1), old]))):
        write_calibration(made, tmp_path / f"{i}.safetensors")
        found = read_calibration(tmp_path / f"{i}.safetensors")
        assert all(stretch.token_ids is stretch.answer is None for stretch in found.stretches)


def test_tokens_that_the_draft_does_not_know_are_refused() -> None:
    shape = {"hidden_size": H, "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 8}
    config = parse_draft_config(native_config(**shape, vocab_size=60, draft_vocab_size=60), where="c")
    with pytest.raises(InputError, match="the draft's vocabulary has 60"):
        require_same_draft(calibration(), config, "0" * 64, where="c")


def test_moments_norm_the_hidden_half_and_keep_held_out_texts_apart() -> None:
    made, weight = calibration(), torch.linspace(0.5, 2, H)
    moments = made.moments(weight, 1e-5)
    (train,), (held,) = moments.samples, moments.held_out
    assert (len(train.x), len(held.x), moments.num_tokens) == (5, 4, 40)
    hidden = made.stretches[1].hidden.float()
    normed = torch.nn.functional.rms_norm(hidden, (H,), weight, 1e-5)
    torch.testing.assert_close(train.x[:, H:].float(), normed, rtol=0.01, atol=0.01)
    assert torch.equal(train.x[:, :H], made.stretches[1].embeds)
    assert train.residual is not None and torch.equal(train.residual, made.stretches[1].hidden)
    residual = made.moments(weight, 1e-5, norm_before_residual=True).samples[0].residual
    assert residual is not None and torch.equal(residual, train.x[:, H:])


def test_a_file_with_one_mass_for_all_heads_is_read_and_merged(tmp_path: Path) -> None:
    new, alike = calibration(0, 40), torch.tensor([0.25, 0.75], dtype=torch.float64)
    write_calibration(replace(new, distance_mass=alike), tmp_path / "c.safetensors")
    old = read_calibration(tmp_path / "c.safetensors")
    assert old.distance_mass is not None and torch.equal(old.distance_mass, alike)
    both = merge_calibrations([old, new]).distance_mass
    assert both is not None and new.distance_mass is not None
    expected = (torch.nn.functional.pad(alike, (0, 1)) + new.distance_mass) / 2
    torch.testing.assert_close(both, expected)


def test_merged_calibrations_weigh_tokens() -> None:
    one, other = calibration(0, 40), calibration(1, 120)
    both = merge_calibrations([one, other])
    torch.testing.assert_close(both.second_moment, 0.25 * one.second_moment + 0.75 * other.second_moment)
    torch.testing.assert_close(both.mean, 0.25 * one.mean + 0.75 * other.mean)
    assert both.distance_mass is not None and both.distance_mass.shape == (4, 4)
    assert both.distance_mass.sum(1).tolist() == pytest.approx([1] * 4)
    assert one.distance_mass is not None and other.distance_mass is not None
    torch.testing.assert_close(
        both.distance_mass[:, 3], 0.75 * other.distance_mass[:, 3]
    )  # that far, only one of them looks
    assert both.document["tokens"]["moments"] == 160 and both.document["tokens"]["by_step"] == [160, 6]
    assert len(both.stretches) == 4 and len(both.document["prompts"]) == 2
    assert schema_problems(both.document, "calibration") == []


@pytest.mark.parametrize("key", ["draft", "target"])
def test_calibrations_of_different_models_do_not_mix(key: str) -> None:
    other = calibration(1)
    changed = {**other.document[key], "attention_sha256" if key == "draft" else "id": "f" * 64}
    with pytest.raises(InputError, match="different"):
        merge_calibrations([calibration(), replace(other, document={**other.document, key: changed})])


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("second_moment", torch.eye(2 * H + 1), "expected F32"),
        ("second_moment", torch.eye(2 * H, dtype=torch.float64), "expected F32"),
        ("second_moment", torch.full((2 * H, 2 * H), torch.nan), "NaN"),
        ("second_moment", -torch.eye(2 * H), "negative"),
        ("second_moment", torch.ones(2 * H, 2 * H).triu(), "symmetric"),
        ("mean", None, "missing"),
        ("positions", torch.arange(8, dtype=torch.int32), "expected"),
        ("steps", torch.full((9,), 99, dtype=torch.int32), "before the start"),
        ("steps", torch.full((9,), -1, dtype=torch.int32), "before the start"),
        ("token_ids", torch.full((9,), -1, dtype=torch.int32), "negative id"),
        ("token_ids", torch.zeros(9), "expected I32"),
        ("answer", torch.full((9,), 2, dtype=torch.uint8), "other than 0 and 1"),
        ("answer", None, "missing"),
        ("positions", torch.arange(9, dtype=torch.int32), "do not stand at"),
        ("lengths", torch.tensor([4, 4]), "add up"),
        ("lengths", torch.tensor([-1, 10]), "add up"),
        ("distance_mass", torch.zeros(3, dtype=torch.float64), "no distribution"),
        ("distance_mass", torch.ones(3, 1, dtype=torch.float64), "expected F64"),
        ("distance_mass", torch.eye(4, 3, dtype=torch.float64), "no distribution"),
        (METADATA_KEY, "{}", "required"),
        (METADATA_KEY, "[", "not valid JSON"),
        (METADATA_KEY, None, "no calibration"),
    ],
)
def test_a_file_that_lies_is_refused(tmp_path: Path, name: str, value: Any, message: str) -> None:
    path = tmp_path / "c.safetensors"
    write_calibration(calibration(), path)
    tensors, metadata = load_file(path), {METADATA_KEY: json.dumps(document())}
    place: dict[str, Any] = metadata if name == METADATA_KEY else tensors
    if value is None:
        del place[name]
    else:
        place[name] = value
    save_file(tensors, path, metadata=metadata)
    with pytest.raises(InputError, match=message):
        read_calibration(path)


def test_a_folder_that_does_not_exist_is_one_clear_error(tmp_path: Path) -> None:
    with pytest.raises(PermissionDenied, match=r"cannot be written \(No such file or directory\)"):
        write_calibration(calibration(), tmp_path / "nowhere" / "c.safetensors")


@pytest.mark.parametrize(
    ("code", "error"),
    [(errno.EACCES, PermissionDenied), (errno.EROFS, PermissionDenied), (28, TransportError)],
)
def test_what_the_system_says_of_a_file_is_said_plainly_and_an_old_one_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, error: type[Exception]
) -> None:
    path = tmp_path / "c.safetensors"
    path.write_bytes(b"old")

    def save_file(*_: Any, **__: Any) -> None:
        raise SafetensorError(f"Error while serializing: I/O error: x (os error {code}) at path .tmpYbfbs8")

    monkeypatch.setattr("safetensors.torch.save_file", save_file)
    with pytest.raises(error, match=rf"cannot be written \({os.strerror(code)}\)$"):
        write_calibration(calibration(), path)
    assert path.read_bytes() == b"old" and list(tmp_path.iterdir()) == [path]


def test_the_mode_of_a_calibration_follows_the_umask(tmp_path: Path) -> None:
    before = os.umask(0o022)
    try:
        write_calibration(calibration(), tmp_path / "c.safetensors")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "c.safetensors").stat().st_mode) == 0o644


def test_an_entry_sees_true_states_before_its_round_and_its_round_up_to_itself() -> None:
    #        0, 1 read; then the round after 1 drafts at 2 and 3; then 2 is read with its true state
    positions, steps = torch.tensor([0, 1, 2, 3, 2]), torch.tensor([0, 0, 1, 2, 0])
    assert visibility(positions, steps).int().tolist() == [
        [1, 0, 0, 0, 0],
        [1, 1, 0, 0, 0],
        [1, 1, 1, 0, 0],
        [1, 1, 1, 1, 0],
        [1, 1, 0, 0, 1],
    ]


def test_a_second_moment_that_is_rounded_unevenly_becomes_symmetric(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calibration_module, "_ROWS", 5)
    made = calibration()
    noise = 1e-7 * torch.randn(2 * H, 2 * H, generator=torch.Generator().manual_seed(0))
    write_calibration(replace(made, second_moment=made.second_moment + noise), tmp_path / "c.safetensors")
    moment = read_calibration(tmp_path / "c.safetensors").second_moment
    assert torch.equal(moment, moment.T)
    torch.testing.assert_close(moment, made.second_moment)
