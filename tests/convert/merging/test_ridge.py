from __future__ import annotations

import pytest
import torch

from eagle3pack.convert.merging import ridge as ridge_module
from eagle3pack.convert.merging.attention import attention_forward, attention_heads
from eagle3pack.convert.merging.merge import MergeOptions, merge
from eagle3pack.convert.merging.moments import Moments, Sample
from eagle3pack.convert.merging.ridge import outputs, refit_output, relative_error, ridge, second_moments
from eagle3pack.convert.merging.rotary import distance_prior
from tests.convert.merging.planted import IN, inputs, layer, rope


def calibration(count: int, length: int = 20) -> Moments:
    samples = tuple(Sample(inputs(100 + i, length), torch.arange(length)) for i in range(count))
    x = torch.cat([sample.x for sample in samples])
    return Moments(x.T @ x / len(x), x.mean(0), distance_prior(length), samples, len(x))


@pytest.mark.parametrize("columns", [5, 512])
@pytest.mark.parametrize("tokens", [1, 50, 10**6])
def test_the_refit_is_ridge_regression_centred_on_the_closed_form(
    monkeypatch: pytest.MonkeyPatch, columns: int, tokens: int
) -> None:
    monkeypatch.setattr(ridge_module, "_COLUMNS", columns)
    monkeypatch.setattr(ridge_module, "_TOKENS", tokens)
    source, moments, spec = layer(1, biases=True), calibration(6), rope()
    merged = merge(source, spec, MergeOptions(1, "als"), moments.metric(), moments).weights
    blocks = list(outputs(source, merged, spec, moments.samples))
    z = torch.cat([attention_heads(merged, spec, s.x).transpose(0, 1).flatten(1) for s in moments.samples])
    y = torch.cat([attention_forward(source, spec, s.x) for s in moments.samples])
    rest = y - z @ merged.o.flatten(1).T
    floor = 0.1 * float((z.T @ z).diagonal().mean())
    rows = torch.cat([z, floor**0.5 * torch.eye(z.shape[1], dtype=torch.float64)])
    targets = torch.cat([rest, torch.zeros(z.shape[1], rest.shape[1], dtype=torch.float64)])
    o = ridge(*second_moments(blocks), merged.o.flatten(1), 0.1)
    assert sum(len(block.z) for block in blocks) == len(z)
    torch.testing.assert_close(o - merged.o.flatten(1), torch.linalg.lstsq(rows, targets).solution.T)
    expected = float((y - z @ o.T).square().sum() / y.square().sum())
    assert relative_error(o, blocks) == pytest.approx(expected)


def test_a_refit_helps_on_held_out_activations_and_reports_by_how_much() -> None:
    source, moments, spec = layer(2), calibration(40), rope()
    found = merge(source, spec, MergeOptions(1, "als", refit_output="ridge"), moments.metric(), moments)
    refit = found.report.refit
    assert refit is not None and refit.penalty is not None
    assert refit.error_after < refit.error_before
    assert refit.num_tokens == 36 * 20
    fresh = [inputs(900 + i, 20) for i in range(5)]
    closed = merge(source, spec, MergeOptions(1, "als"), moments.metric(), moments)
    assert torch.equal(closed.weights.k, found.weights.k)

    def error(weights) -> float:  # type: ignore[no-untyped-def]
        pairs = [(attention_forward(weights, spec, x), attention_forward(source, spec, x)) for x in fresh]
        return float(sum((a - b).square().sum() for a, b in pairs) / sum(b.square().sum() for _, b in pairs))

    assert error(found.weights) < error(closed.weights)


def test_a_refit_that_does_not_help_held_out_tokens_leaves_the_closed_form() -> None:
    source, spec = layer(3), rope()
    merged = merge(source, spec, MergeOptions(4, "als")).weights
    output, report = refit_output(source, merged, spec, calibration(3).samples)
    assert report.penalty is None and report.error_before == report.error_after
    assert torch.equal(output, merged.o)


def test_one_token_and_dead_outputs_are_refitted_without_trouble() -> None:
    source, spec = layer(4), rope()
    moments = calibration(1, length=1)
    found = merge(source, spec, MergeOptions(1, "svd", refit_output="ridge"), moments.metric(), moments)
    assert bool(found.weights.o.isfinite().all())
    silent = Moments(torch.eye(IN), torch.zeros(IN), None, (Sample(torch.zeros(4, IN), torch.arange(4)),), 4)
    found = merge(source, spec, MergeOptions(1, "svd", refit_output="ridge"), moments.metric(), silent)
    assert found.report.refit is not None and found.report.refit.error_after == 0


def test_few_tokens_shrink_the_second_moment_towards_its_diagonal() -> None:
    moment = torch.ones(2, 2, dtype=torch.float64)
    few, many = (Moments(moment, torch.zeros(2), num_tokens=n).metric() for n in (19, 20))
    rows = torch.eye(2, dtype=torch.float64)
    assert few.gram(rows).tolist() == [[1, pytest.approx(0.9)], [pytest.approx(0.9), 1]]
    assert torch.equal(many.gram(rows), moment)
    with_bias = few.augmented().gram(torch.eye(3, dtype=torch.float64))
    assert torch.equal(with_bias[:2, :2], few.gram(rows))
