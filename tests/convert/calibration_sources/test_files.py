"""`convert --calibrate-from`: what trainers keep on disk gives what the target in this process gives."""

from __future__ import annotations

import gzip
import importlib
import io
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from eagle3pack.convert import calibrate
from eagle3pack.convert.calibration_sources.feature_files import FeatureFolder
from eagle3pack.convert.calibration_sources.files import doubt_of
from eagle3pack.convert.calibration_sources.tables import load_draft_alone
from eagle3pack.convert.merging.calibration import Calibration, merge_calibrations, read_calibration
from eagle3pack.documents import schema_problems
from eagle3pack.engine.generation import Settings
from eagle3pack.engine.loading import load_draft
from eagle3pack.engine.replay import KnownAnswer
from eagle3pack.engine.speculate import generate
from eagle3pack.engine.target import load_target
from eagle3pack.errors import Eagle3PackError, InputError, UsageError
from tests.cli import Cli
from tests.convert.merging.test_capture import write_target
from tests.convert.test_calibrate import write_tokenizer
from tests.convert.test_command import convert, record
from tests.engine.test_replay import states_of
from tests.tiny import draft_tensors, native_config, write_draft

PROMPTS = [[5 + i, 17, 40 + i] for i in range(11)]
MAX_TOKENS = 24
NUM_LAYERS, WIDTH = 8, 64
Text = tuple[Tensor, int, Tensor]  # tokens, how many are the prompt, states of the auxiliary and last layers


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return write_tokenizer(write_target(tmp_path_factory.mktemp("target")))


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_draft(tmp_path_factory.mktemp("draft") / "mha", dtype="F32")


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibrate, "MAX_TOKENS", MAX_TOKENS)


@pytest.fixture(scope="module")
def in_process(tmp_path_factory: pytest.TempPathFactory, target: Path, source: Path) -> Calibration:
    """What target and draft in one process give."""
    folder = tmp_path_factory.mktemp("in process")
    prompts = folder / "prompts.jsonl"
    prompts.write_text("\n".join(json.dumps({"token_ids": prompt}) for prompt in PROMPTS))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(calibrate, "MAX_TOKENS", MAX_TOKENS)
        return calibrated(source, folder, target=str(target), calibrate_with=str(prompts))


@pytest.fixture(scope="module")
def texts(target: Path, source: Path) -> list[Text]:
    """The target's own answers, and its states."""
    loaded = load_target(target)
    load_draft(source, target=loaded)
    made = generate(loaded, PROMPTS, Settings(max_tokens=MAX_TOKENS, stop_ids=frozenset()))
    loaded.capture((2, 4, 5, NUM_LAYERS))
    tokens = [torch.tensor([*prompt, *out]) for prompt, out in zip(PROMPTS, made.outputs, strict=True)]
    return [
        (text, len(prompt), states_of(loaded, text)) for prompt, text in zip(PROMPTS, tokens, strict=True)
    ]


def calibrated(source: Path, folder: Path, **options: Any) -> Calibration:
    file = folder / "c.safetensors"
    convert(
        source,
        folder / "gqa",
        num_kv_heads=2,
        method="svd",
        save_calibration=file,
        dry_run=True,
        overwrite=True,  # of a calibration made before
        **options,
    )
    return read_calibration(file)


def mask_of(text: Text) -> Tensor:
    return (torch.arange(len(text[0])) >= text[1]).long()


def write_speculators(folder: Path, number: int, text: Text) -> Path:
    """As vLLM's connector does; its loss_mask stands in the dataset."""
    path = folder / f"hs_{number}.safetensors"
    states = text[2].unflatten(1, (4, WIDTH)).contiguous()
    save_file({"hidden_states": states, "token_ids": text[0]}, path)
    return path


def write_speculators_04(folder: Path, number: int, text: Text) -> Path:
    path = folder / f"data_{number}.pt"
    states = [part.contiguous() for part in text[2].chunk(4, dim=1)]
    torch.save({"input_ids": text[0], "hidden_states": states, "loss_mask": mask_of(text)}, path)
    return path


def specforge(text: Text) -> dict[str, Tensor]:
    """Padded to the longest of its batch, as SpecForge's collator does."""
    pad = 5
    states = torch.nn.functional.pad(text[2], (0, 0, 0, pad), value=9.0)
    return {
        "input_ids": torch.nn.functional.pad(text[0], (0, pad)),
        "loss_mask": torch.nn.functional.pad(mask_of(text), (0, pad)),
        "aux_hidden_state": states[None, :, : 3 * WIDTH].clone(),
        "hidden_state": states[None, :, 3 * WIDTH :].clone(),
    }


def write_specforge(folder: Path, number: int, text: Text) -> Path:
    path = folder / "rows_0-2000" / f"data_{number}.ckpt"
    path.parent.mkdir(exist_ok=True)
    torch.save(specforge(text), path)
    return path


def write_specforge_gz(folder: Path, number: int, text: Text) -> Path:
    buffer = io.BytesIO()
    torch.save(specforge(text), buffer)
    path = folder / f"data_{number}.ckpt.gz"
    path.write_bytes(gzip.compress(buffer.getvalue()))
    return path


Writer = Callable[[Path, int, Text], Path]
WITH_MASK: list[Writer] = [write_speculators_04, write_specforge, write_specforge_gz]


def assert_same(found: Calibration, expected: Calibration) -> None:
    """The same rounds, inputs to bfloat16's rounding, and near-equal averages."""
    assert len(found.stretches) == len(expected.stretches)
    for a, b in zip(found.stretches, expected.stretches, strict=True):
        assert a.held_out == b.held_out
        for name in ("positions", "steps", "token_ids", "answer"):
            assert torch.equal(getattr(a, name), getattr(b, name)), name
        torch.testing.assert_close(a.embeds, b.embeds)
        torch.testing.assert_close(a.hidden.float(), b.hidden.float(), rtol=0.01, atol=0.01)
    torch.testing.assert_close(found.second_moment, expected.second_moment, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(found.mean, expected.mean, rtol=1e-3, atol=1e-3)
    assert found.document["tokens"] == expected.document["tokens"]
    assert found.document["generation"] == expected.document["generation"]


@pytest.mark.parametrize("write", WITH_MASK)
def test_files_of_the_targets_states_give_what_the_target_gives(
    tmp_path: Path, source: Path, texts: list[Text], in_process: Calibration, write: Writer
) -> None:
    folder = tmp_path / "features"
    folder.mkdir()
    for number, text in enumerate(texts):
        write(folder, number, text)
    torch.save({"counts": torch.zeros(3)}, folder / "token_freq.pt")  # stands beside them
    found = calibrated(source, tmp_path, calibrate_from=folder)
    assert_same(found, in_process)
    assert schema_problems(found.document, "calibration") == []
    assert found.document["source"]["kind"] == "files" and found.document["target"] == {"id": None}
    assert found.document["prompts"] == [{"name": "features", "num_prompts": len(texts)}]


def test_the_mask_of_a_dataset_is_that_of_its_row(
    tmp_path: Path, source: Path, texts: list[Text], in_process: Calibration
) -> None:
    arrow = importlib.import_module("pyarrow")
    folder = tmp_path / "dataset" / "hidden_states"
    folder.mkdir(parents=True)
    (folder.parent / "dataset_info.json").write_text("{}")
    rows = [mask_of(text).tolist() for text in texts]
    for part, some in enumerate((rows[:4], rows[4:])):
        table = arrow.table({"loss_mask": some})
        path = folder.parent / f"data-{part:05}-of-00002.arrow"
        with arrow.OSFile(str(path), "wb") as sink, arrow.ipc.new_stream(sink, table.schema) as writer:
            writer.write_table(table)
    for number, text in enumerate(texts):
        write_speculators(folder, number, text)
    assert_same(calibrated(source, tmp_path, calibrate_from=folder), in_process)
    assert_same(calibrated(source, tmp_path, calibrate_from=folder.parent), in_process)
    (folder / "hs_3.safetensors").rename(folder / "hs_99.safetensors")
    with pytest.raises(InputError, match="of none of the 11 rows"):
        FeatureFolder(folder).read(len(texts) - 1)


def test_merged_ones_tell_no_figure_of_one_of_them(in_process: Calibration) -> None:
    merged = merge_calibrations([in_process, in_process]).document
    assert {"output_tokens", "mean_accepted_length"} <= set(in_process.document["generation"])
    assert set(merged["generation"]) == {"dtype", "num_speculative_tokens", "max_tokens"}
    assert schema_problems(merged, "calibration") == []


def test_a_dataset_that_cannot_be_read_is_not_passed_over(
    tmp_path: Path, source: Path, texts: list[Text], monkeypatch: pytest.MonkeyPatch
) -> None:
    write_speculators(tmp_path, 0, texts[0])
    (tmp_path / "dataset_info.json").write_text("{}")
    monkeypatch.setitem(__import__("sys").modules, "pyarrow", None)
    with pytest.raises(UsageError, match="needs pyarrow"):
        convert(source, tmp_path / "gqa", num_kv_heads=2, method="als", calibrate_from=tmp_path)


def test_without_a_mask_every_token_is_an_answer(
    cli: Cli, tmp_path: Path, source: Path, texts: list[Text]
) -> None:
    folder = tmp_path / "features"
    folder.mkdir()
    for number, text in enumerate(texts):
        write_speculators(folder, number, text)
    options = ("--num-kv-heads", "2", "--method", "als", "--calibrate-from", folder)
    result = cli("convert", source, tmp_path / "gqa", *options)
    assert result.code == 0, result.err
    for said in (
        "11 files of speculators",
        "every token counts as its answer",
        "in 11 of 11 conversations; the draft's mean accepted length is",
        "warning: the draft proposes next to nothing right",  # it is a random one
        "kept for the refit",
    ):
        assert said in result.err
    document = record(tmp_path / "gqa")["method"]["parameters"]["calibration"]
    assert document["generation"]["output_tokens"] == sum(min(len(text[0]) - 1, MAX_TOKENS) for text in texts)


def test_states_that_tell_the_draft_nothing_are_named(source: Path) -> None:
    """A draft that proposes what its first state says, on its states, on noise and on another text's."""
    draft = load_draft_alone(source, None, torch.float32)
    assert draft.fc is not None and draft.lm_head is not None
    for weight in (
        draft.fc.weight,
        draft.layers[0].self_attn.o_proj.weight,
        draft.layers[0].mlp.down_proj.weight,
    ):
        torch.nn.init.zeros_(weight)
    draft.fc.weight[:, :WIDTH] = torch.eye(WIDTH)
    draft.norm.weight.fill_(1)
    generator = torch.Generator().manual_seed(0)
    answers = []
    for _ in range(12):
        tokens = torch.randint(len(draft.lm_head.weight), (42,), generator=generator)
        states = torch.zeros(41, 3 * WIDTH)
        states[:-1, :WIDTH] = draft.lm_head.weight[tokens[2:]]  # state t goes with token t + 1: t + 2 is next
        answers.append(KnownAnswer(tokens, 2, states))
    noise = [replace(a, states=torch.randn(a.states.shape, generator=generator)) for a in answers]
    others = [replace(a, states=b.states) for a, b in zip(answers, answers[1:] + answers[:1], strict=True)]
    assert doubt_of(draft, answers) == ""
    for wrong in (noise, others):
        assert "reverse order" in doubt_of(draft, wrong)
    assert doubt_of(draft, noise[:2]) == doubt_of(draft, []) == ""  # too few to tell


def test_an_empty_file_of_ones_own_is_not_to_be_downloaded_alone(tmp_path: Path) -> None:
    for name, content in (("hs_0.safetensors", b""), ("hs_1.safetensors", (99).to_bytes(8, "little") + b"{")):
        (tmp_path / name).write_bytes(content)
    for index in range(2):
        with pytest.raises(InputError) as raised:
            FeatureFolder(tmp_path).read(index)
        assert "make it again" in raised.value.hint
    with pytest.raises(InputError) as raised:
        read_calibration(tmp_path / "hs_0.safetensors")
    assert "make it again" in raised.value.hint


def test_eight_bit_states_are_scaled_back(tmp_path: Path, texts: list[Text]) -> None:
    states = texts[0][2].unflatten(1, (4, WIDTH))
    scales = states.abs().amax((1, 2), keepdim=True) / 448
    stored = {
        "hidden_states": (states / scales).to(torch.float8_e4m3fn),
        "hidden_states_scales": scales,
        "token_ids": texts[0][0],
    }
    save_file(stored, tmp_path / "hs_0.safetensors")
    found = FeatureFolder(tmp_path).read(0)
    assert found.states.dtype == torch.bfloat16
    torch.testing.assert_close(found.states.float(), texts[0][2], rtol=0.07, atol=0.05)


def test_of_several_answers_the_longest_is_taken_with_what_stands_before_it(
    tmp_path: Path, source: Path
) -> None:
    from eagle3pack.convert.calibration_sources.feature_files import Features, answer_of
    from eagle3pack.draft.config import parse_draft_config

    config = parse_draft_config(native_config(), where="config.json")
    mask = torch.tensor([1, 1, 0, 1, 1, 1, 1, 0, 1, 1, 1, 1, 0]).bool()
    features = Features(torch.arange(13), torch.randn(13, 3 * WIDTH), mask)
    answer = answer_of(features, config, 100, where="x")
    assert answer is not None and answer.token_ids.tolist() == list(range(7)) and answer.prompt_tokens == 3
    cut = answer_of(features, config, 3, where="x")
    assert cut is not None and cut.token_ids.tolist() == list(range(6)) and len(cut.states) == 6
    for nothing in ([0] * 13, [1] + [0] * 12, [0, 1, 0, 1, 0] + [0] * 8):
        short = Features(features.token_ids, features.states, torch.tensor(nothing).bool())
        assert answer_of(short, config, 100, where="x") is None


def test_a_draft_without_tables_of_its_own_takes_the_targets(
    tmp_path: Path, target: Path, texts: list[Text]
) -> None:
    tensors = draft_tensors(native_config(), dtype="F32")
    bare = {name: x for name, x in tensors.items() if name not in ("embed_tokens.weight", "lm_head.weight")}
    source = write_draft(tmp_path / "bare", tensors=bare, dtype="F32")
    folder = tmp_path / "features"
    folder.mkdir()
    for number, text in enumerate(texts):
        write_specforge(folder, number, text)
    with pytest.raises(UsageError, match=r"shares embed_tokens\.weight with its target"):
        calibrated(source, tmp_path, calibrate_from=folder)
    found = calibrated(source, tmp_path, calibrate_from=folder, target=str(target))
    assert found.document["target"] == {"id": target.name}
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("\n".join(json.dumps({"token_ids": prompt}) for prompt in PROMPTS))
    assert_same(found, calibrated(source, tmp_path, target=str(target), calibrate_with=str(prompts)))


def broken(change: Callable[[dict[str, Any]], None]) -> Callable[[Path, Text], None]:
    def write(folder: Path, text: Text) -> None:
        held: dict[str, Any] = specforge(text)
        change(held)
        torch.save(held, folder / "data_0.ckpt")

    return write


class Code:
    """Runs when it is unpickled, if anyone lets it."""

    def __reduce__(self) -> tuple[Any, ...]:
        return print, ("run",)


BROKEN = {
    "width": (
        broken(lambda held: held.update(aux_hidden_state=held["aux_hidden_state"][..., :-1])),
        "holds 191 numbers a token; the draft reads 3 states of 64",
    ),
    "layers": (
        broken(lambda held: held.update(aux_hidden_state=held["aux_hidden_state"][..., :WIDTH])),
        "holds 64 numbers a token",
    ),
    "lengths": (broken(lambda held: held.update(input_ids=held["input_ids"][:-1])), "tokens, the states of"),
    "mask": (broken(lambda held: held.update(loss_mask=held["loss_mask"][:-1])), "and a loss_mask of"),
    "token": (
        broken(lambda held: held["input_ids"].fill_(96)),
        "holds token 96, the draft's vocabulary has 96",
    ),
    "negative": (broken(lambda held: held["input_ids"].fill_(-1)), "holds token -1"),
    "nan": (broken(lambda held: held["aux_hidden_state"].fill_(float("nan"))), "NaN or infinity"),
    "keys": (
        broken(lambda held: held.pop("loss_mask")),
        "is no hidden-state file: it holds aux_hidden_state",
    ),
    "list": (broken(lambda held: held.update(input_ids=["a"])), "is a list, expected a tensor"),
    "dtype": (broken(lambda held: held.update(input_ids=held["input_ids"].float())), "its tokens are"),
    "shape": (
        broken(lambda held: held.update(aux_hidden_state=torch.zeros(4))),
        "expected \\(tokens, width\\)",
    ),
    "code": (broken(lambda held: held.update(more=Code())), "holds more than tensors"),
    "damaged": (lambda folder, text: (folder / "data_0.ckpt").write_bytes(b"PK\3\4no"), "cannot be read as"),
    "gzip": (lambda folder, text: (folder / "data_0.ckpt.gz").write_bytes(b"no"), "cannot be read as"),
    "no dict": (lambda folder, text: torch.save([1], folder / "data_0.ckpt"), "holds a list"),
    "empty": (lambda folder, text: None, "holds no hidden-state files"),
    "mixed": (
        lambda folder, text: (write_specforge(folder, 0, text), write_speculators(folder, 1, text)),
        "holds files of SpecForge and of speculators",
    ),
    "weights": (
        lambda folder, text: save_file({"w": torch.zeros(2)}, folder / "model.safetensors"),
        "is no hidden-state file: it holds w; expected hidden_states, token_ids",
    ),
    "flat": (
        lambda folder, text: save_file(
            {"token_ids": text[0], "hidden_states": text[2]}, folder / "hs_0.safetensors"
        ),
        "expected \\(tokens, layers, width\\)",
    ),
    "no answer": (broken(lambda held: held["loss_mask"].zero_()), "no text has an answer of two tokens"),
}


@pytest.mark.parametrize("fault", BROKEN)
def test_broken_files_are_one_clear_error(
    tmp_path: Path, source: Path, texts: list[Text], fault: str, capsys: pytest.CaptureFixture[str]
) -> None:
    write, message = BROKEN[fault]
    folder = tmp_path / "features"
    folder.mkdir()
    write(folder, texts[0])
    with pytest.raises(Eagle3PackError, match=message) as raised:
        convert(source, tmp_path / "gqa", num_kv_heads=2, method="als", calibrate_from=folder)
    assert raised.value.exit_code == 3 and "run" not in capsys.readouterr().out
    assert not (tmp_path / "gqa").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"calibrate_from": Path("no")}, "no is no folder"),
        ({"calibrate_from": Path(), "calibrate_with": "shipped"}, "give one of them"),
        ({"calibration_tokens": 100}, "--calibration-tokens: nothing is calibrated"),
    ],
)
def test_contradictions_are_refused_before_anything_is_read(
    tmp_path: Path, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        convert(tmp_path / "nowhere", tmp_path / "gqa", num_kv_heads=2, method="als", **options)
