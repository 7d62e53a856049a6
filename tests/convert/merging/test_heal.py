from __future__ import annotations

import math
from dataclasses import replace
from itertools import islice
from pathlib import Path

import pytest
import torch
from torch import Tensor

from eagle3pack.convert.merging.attention import AttentionWeights, attention_forward
from eagle3pack.convert.merging.heal import HealOptions, HealProgress, heal
from eagle3pack.convert.merging.heal_state import HealState, read_state, write_state
from eagle3pack.convert.merging.lessons import batches
from eagle3pack.convert.merging.merge import MergeOptions, merge
from eagle3pack.convert.merging.moments import Sample
from eagle3pack.errors import InputError, PermissionDenied, TransportError, UsageError
from tests.convert.merging.planted import IN, D, disguised, expanded, inputs, layer, rope

ROPE = rope()
SHORT = HealOptions(steps=12, learning_rate=0.02, batch_tokens=180, check_every=4)


def samples(count: int = 11, length: int = 60) -> list[Sample]:
    return [Sample(inputs(300 + i, length), torch.arange(length)) for i in range(count)]


def drafted(count: int = 11, length: int = 25, steps: int = 3) -> list[Sample]:
    """The prefix once a speculative step: a drafted token sees the prefix of step 0 and its own chain."""
    place = torch.arange(length)
    visible = torch.zeros(steps * length, steps * length, dtype=torch.bool)
    for step in range(steps):
        rows = slice(step * length, (step + 1) * length)
        visible[rows, :length] = torch.ones(length, length, dtype=torch.bool).tril()
        for earlier in range(1, step + 1):
            columns = slice(earlier * length, (earlier + 1) * length)
            visible[rows, columns] = torch.eye(length, dtype=torch.bool)
    positions = torch.cat([place + step for step in range(steps)])
    return [Sample(inputs(500 + i, steps * length), positions, visible) for i in range(count)]


def merged(source: AttentionWeights, method: str = "mean", count: int = 2) -> AttentionWeights:
    return merge(source, ROPE, MergeOptions(count, method)).weights  # type: ignore[arg-type]


def error(source: AttentionWeights, weights: AttentionWeights, data: list[Sample]) -> float:
    lost = there = 0.0
    for sample in data:
        expected = attention_forward(source, ROPE, sample.x, sample.positions, sample.visible)
        found = attention_forward(weights, ROPE, sample.x, sample.positions, sample.visible)
        lost += float((found - expected).square().sum())
        there += float(expected.square().sum())
    return lost / there


def same(a: AttentionWeights, b: AttentionWeights) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a.tensors().values(), b.tensors().values(), strict=True))


@pytest.mark.parametrize("method", ["mean", "als"])
@pytest.mark.parametrize("make", [samples, drafted])
def test_training_lowers_the_error_on_inputs_that_it_never_saw(method, make):  # type: ignore[no-untyped-def]
    source, data = layer(1), make(40)
    start = merged(source, method)
    healed = heal(source, start, ROPE, data, HealOptions(steps=30, learning_rate=0.02, batch_tokens=500))
    report = healed.report
    assert report.error_before == pytest.approx(error(source, start, data[::10]))
    assert report.error_after == pytest.approx(error(source, healed.weights, data[::10]))
    assert report.error_after < 0.95 * report.error_before
    fresh = make(50)[40:]
    assert error(source, healed.weights, fresh) < 0.95 * error(source, start, fresh)
    assert (report.steps, report.num_tokens, report.held_out_tokens) == (30, *_tokens(data))
    assert [step for step, _, _ in report.checks] == list(range(1, 31))
    assert report.error_after == min(held_out for _, _, held_out in report.checks)
    assert report.as_dict()["checks"][0] == list(report.checks[0])


def _tokens(data: list[Sample]) -> tuple[int, int]:
    held_out = sum(len(sample.x) for sample in data[::10])
    return sum(len(sample.x) for sample in data) - held_out, held_out


def test_a_planted_layer_comes_back_from_a_disturbed_start() -> None:
    gqa = layer(2, num_kv=2, biases=True)
    source, data = disguised(expanded(gqa), ROPE, 3), samples(41)
    generator = torch.Generator().manual_seed(4)
    disturbed = {
        name: x + 0.2 * x.std() * torch.randn(x.shape, generator=generator, dtype=x.dtype)
        for name, x in gqa.tensors().items()
    }
    report = heal(
        source, replace(gqa, **disturbed), ROPE, data, HealOptions(60, learning_rate=0.05, batch_tokens=240)
    ).report
    assert report.error_after < report.error_before / 10


def test_samples_kept_apart_choose_among_the_steps_and_are_not_trained_on() -> None:
    source, data = layer(1), samples(22)
    start = merged(source)
    apart = heal(source, start, ROPE, data[:20], SHORT, data[20:])
    assert apart.report.error_after == pytest.approx(error(source, apart.weights, data[20:]))
    assert (apart.report.num_tokens, apart.report.held_out_tokens) == (20 * 60, 2 * 60)
    split = heal(source, start, ROPE, data, SHORT)
    again = [sample for i, sample in enumerate(data) if i % 10]
    assert heal(source, start, ROPE, again, SHORT, data[::10]).report == split.report


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_training_that_only_harms_gives_back_its_start(dtype: torch.dtype) -> None:
    source = layer(5).to(dtype)
    start = merged(source, "als")
    healed = heal(source, start, ROPE, samples(), replace(SHORT, learning_rate=50.0))
    assert healed.report.best_step == 0
    assert healed.report.error_after == healed.report.error_before
    assert same(healed.weights, start)


def test_the_dtype_of_the_start_comes_back_and_its_rounding_is_in_the_errors() -> None:
    source = layer(6).to(torch.bfloat16)
    healed = heal(source, merged(source), ROPE, samples(21), replace(SHORT, steps=30))
    assert {x.dtype for x in healed.weights.tensors().values()} == {torch.bfloat16}
    rounded = error(source.to(torch.float32), healed.weights.to(torch.float32), _single(samples(21)[::10]))
    assert healed.report.error_after == pytest.approx(rounded, rel=1e-4)
    assert healed.report.error_after < healed.report.error_before


def _single(data: list[Sample]) -> list[Sample]:
    return [replace(sample, x=sample.x.float()) for sample in data]


def test_the_same_seed_gives_the_same_bits_and_another_does_not() -> None:
    source, data = layer(7), samples()
    start = merged(source)
    first, second = (heal(source, start, ROPE, data, SHORT) for _ in range(2))
    assert same(first.weights, second.weights) and first.report == second.report
    other = heal(source, start, ROPE, data, replace(SHORT, seed=1))
    assert not same(first.weights, other.weights)


def test_every_sample_is_seen_once_before_any_is_seen_again() -> None:
    drawn = list(islice(batches([2] * 15, 6, seed=3), 10))
    assert all(len(batch) == 3 for batch in drawn)
    seen = [i for batch in drawn for i in batch]
    assert sorted(seen[:15]) == sorted(seen[15:]) == list(range(15))
    assert seen[:15] != seen[15:]
    assert [len(batch) for batch in islice(batches([5], 1, seed=0), 3)] == [1, 1, 1]
    assert next(batches([5], 12, seed=0)) == [0, 0, 0]


class Interrupted(Exception):
    pass


@pytest.mark.parametrize("after", [1, 2])
def test_a_resumed_training_ends_in_the_bits_of_an_uninterrupted_one(tmp_path: Path, after: int) -> None:
    source, data, path = layer(8, biases=True), drafted(), tmp_path / "heal.pt"
    start = merged(source, "als")
    whole = heal(source, start, ROPE, data, SHORT)
    saved = []

    def save(state: HealState) -> None:
        write_state(path, state)
        saved.append(state.step)
        if len(saved) == after:
            raise Interrupted

    with pytest.raises(Interrupted):
        heal(source, start, ROPE, data, SHORT, on_state=save)
    assert saved == [4, 8][:after]
    steps: list[int] = []
    rest = heal(
        source, start, ROPE, data, SHORT, resumed=read_state(path), on_step=lambda at: steps.append(at.step)
    )
    assert steps == list(range(4 * after + 1, 13))
    assert same(rest.weights, whole.weights) and rest.report == whole.report
    assert [entry.name for entry in tmp_path.iterdir()] == ["heal.pt"]


def test_a_finished_training_is_not_repeated(tmp_path: Path) -> None:
    source, data, path = layer(8), samples(), tmp_path / "heal.pt"
    start = merged(source)
    whole = heal(source, start, ROPE, data, SHORT, on_state=lambda state: write_state(path, state))
    steps: list[HealProgress] = []
    again = heal(source, start, ROPE, data, SHORT, resumed=read_state(path), on_step=steps.append)
    assert not steps and same(again.weights, whole.weights) and again.report == whole.report


def test_a_state_of_another_run_is_refused(tmp_path: Path) -> None:
    source, data, path = layer(9), samples(), tmp_path / "heal.pt"
    start = merged(source)
    heal(source, start, ROPE, data, SHORT, on_state=lambda state: write_state(path, state))
    for changed in (
        (source, start, data, replace(SHORT, steps=13)),
        (source, start, data[:-1], SHORT),
        (source, merged(source, "als"), data, SHORT),
        (layer(10), start, data, SHORT),
    ):
        weights, begin, given, options = changed
        begun: list[int] = []
        with pytest.raises(InputError, match="belongs to another run") as raised:
            heal(
                weights,
                begin,
                ROPE,
                given,
                options,
                on_begin=begun.append,
                resumed=read_state(path),
                resumed_from=str(path),
            )
        assert not begun and raised.value.where == str(path)


def test_files_that_are_no_state_are_refused_and_none_is_a_start(tmp_path: Path) -> None:
    assert read_state(tmp_path / "none.pt") is None
    for name, content in (("text", b"hello"), ("empty", b"")):
        (tmp_path / name).write_bytes(content)
    torch.save({"format": "another"}, tmp_path / "other")
    torch.save(torch.ones(2), tmp_path / "tensor")
    (tmp_path / "folder").mkdir()
    for name in ("text", "empty", "other", "tensor", "folder"):
        with pytest.raises(InputError, match="no state that --heal wrote") as raised:
            read_state(tmp_path / name)
        assert "elete" not in raised.value.hint  # it may be somebody's weights


def test_a_state_that_cannot_be_written_leaves_the_older_one(tmp_path: Path) -> None:
    with pytest.raises((TransportError, PermissionDenied)):
        write_state(tmp_path / "no such folder" / "heal.pt", _state())
    path = tmp_path / "heal.pt"
    write_state(path, _state())
    before = path.read_bytes()
    broken = _state()
    broken.optimizer = {"cannot": lambda: None}
    with pytest.raises(Exception, match=r"pickle|local object"):  # Python 3.13 words it so
        write_state(path, broken)
    assert path.read_bytes() == before and len(list(tmp_path.iterdir())) == 1


def _state() -> HealState:
    return HealState("", 0, {}, {}, {}, 0, 1.0, 1.0, [], [])


def test_a_group_of_one_has_nothing_to_heal() -> None:
    source = layer(11)
    healed = heal(source, source, ROPE, samples(), SHORT)
    assert healed.report.error_before == healed.report.error_after == 0
    assert same(healed.weights, source)


def test_silent_layers_and_a_single_sample_are_no_trouble() -> None:
    source = layer(12)
    silent = replace(source, o=torch.zeros_like(source.o))
    report = heal(silent, merged(silent), ROPE, samples(), SHORT).report
    assert report.error_before == report.error_after == 0
    report = heal(source, merged(source), ROPE, samples(1), SHORT).report
    assert report.num_tokens == report.held_out_tokens == 60
    assert report.error_after < report.error_before
    start = replace(merged(source), v=torch.zeros_like(merged(source).v))
    assert heal(source, start, ROPE, samples(), SHORT).report.error_after < 1


def test_numbers_that_overflow_end_the_training_with_the_best_so_far() -> None:
    source = layer(13).to(torch.float32)
    start = merged(source)
    healed = heal(source, start, ROPE, samples(), replace(SHORT, learning_rate=1e25))
    assert healed.report.stopped_at is not None
    assert healed.report.error_after <= healed.report.error_before
    assert all(bool(x.isfinite().all()) for x in healed.weights.tensors().values())


def test_norms_on_queries_and_keys_are_trained_only_when_asked_for() -> None:
    ones = torch.ones(D, dtype=torch.float64)
    source = replace(layer(14), q_norm=ones * 1.5, k_norm=ones)
    start = replace(merged(source), q_norm=ones)
    kept = heal(source, start, ROPE, samples(21), SHORT)
    assert kept.weights.q_norm is not None and torch.equal(kept.weights.q_norm, ones)
    trained = heal(source, start, ROPE, samples(21), replace(SHORT, train_norms=True))
    assert trained.weights.q_norm is not None and not torch.equal(trained.weights.q_norm, ones)
    assert trained.report.error_after < trained.report.error_before


def test_inputs_captured_in_inference_mode_can_be_trained_on() -> None:
    source = layer(15).to(torch.float32)
    with torch.inference_mode():
        data = [Sample(torch.randn(6, IN), torch.arange(6)) for _ in range(4)]
    assert heal(source, merged(source), ROPE, data, SHORT).report.num_tokens == 18


def test_the_rate_rises_and_falls_to_nothing() -> None:
    options = HealOptions(steps=100, learning_rate=1.0)
    rates = [options.rate(step) for step in range(100)]
    assert rates[:10] == pytest.approx([0.1 * (i + 1) for i in range(10)])
    assert rates[10:] == sorted(rates[10:], reverse=True) and 0 < rates[-1] < 1e-3
    assert HealOptions(steps=1).rate(0) > 0


def test_what_does_not_fit_is_refused() -> None:
    source, data = layer(16), samples()
    start = merged(source)
    options: list[tuple[HealOptions, str]] = [
        (HealOptions(steps=0), "steps 0"),
        (HealOptions(steps=1, learning_rate=0.0), "learning rate"),
        (HealOptions(steps=1, learning_rate=math.nan), "learning rate"),
        (HealOptions(steps=1, warm_up=2.0), "warm-up"),
        (HealOptions(steps=1, weight_decay=-1.0), "weight decay"),
        (HealOptions(steps=1, batch_tokens=0), "tokens a batch"),
        (HealOptions(steps=1, check_every=-1), "between checks"),
    ]
    for bad, match in options:
        with pytest.raises(UsageError, match=match):
            heal(source, start, ROPE, data, bad)
    with pytest.raises(UsageError, match="needs calibration"):
        heal(source, start, ROPE, [], SHORT)
    with pytest.raises(UsageError, match="not known"):
        heal(source, start, replace(ROPE, frequencies=None, unknown="its scaling is not known"), data, SHORT)
    layers = [
        replace(start, q=start.q[:2]),
        replace(start, o=start.o[:5]),
        replace(start, k=start.k[..., :5], v=start.v[..., :5]),
        replace(start, k=start.k[[0, 1, 1]], v=start.v[[0, 1, 1]]),
        replace(start, k=start.k * math.nan),
    ]
    for weights in layers:
        with pytest.raises(InputError, match=r"merged layer|over 3"):
            heal(source, weights, ROPE, data, SHORT)


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"x": torch.ones(60, IN + 1)}, "expected \\(tokens, 24\\)"),
        ({"x": torch.ones(0, IN), "positions": torch.arange(0)}, "expected \\(tokens"),
        ({"x": torch.full((60, IN), math.nan)}, "sample 1.*NaN"),
        ({"positions": torch.arange(3)}, "positions for 60 tokens"),
        ({"visible": torch.ones(60, 3, dtype=torch.bool)}, "no bool of shape"),
        ({"visible": torch.ones(60, 60)}, "no bool of shape"),
        ({"visible": torch.zeros(60, 60, dtype=torch.bool)}, "sees nothing"),
    ],
)
def test_samples_that_do_not_fit_are_refused(changes: dict[str, Tensor], match: str) -> None:
    source, data = layer(17), samples(3)
    data[1] = replace(data[1], **changes)
    with pytest.raises(InputError, match=match):
        heal(source, merged(source), ROPE, data, SHORT)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_a_gpu_trains_as_well_and_takes_over_from_a_cpu(tmp_path: Path) -> None:
    source, data, path = layer(18).to(torch.float32), samples(41), tmp_path / "heal.pt"
    start, options = merged(source), HealOptions(steps=40, learning_rate=0.02)
    reports = [
        heal(source, start, ROPE, data, replace(options, device=device)).report for device in ("cpu", "cuda")
    ]
    assert reports[0].error_after == pytest.approx(reports[1].error_after, rel=0.05)

    def save(state: HealState) -> None:
        write_state(path, state)
        if state.step >= 20:
            raise Interrupted

    with pytest.raises(Interrupted):
        heal(source, start, ROPE, data, options, on_state=save)
    on_gpu = heal(source, start, ROPE, data, replace(options, device="cuda"), resumed=read_state(path))
    assert on_gpu.report.error_after == pytest.approx(reports[0].error_after, rel=0.05)
