"""The shipped draft, 16 key/value heads to 4: how much of its attention each method keeps."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from eagle3pack.convert.merging.attention import AttentionWeights, attention_forward, from_matrices
from eagle3pack.convert.merging.merge import Merged, MergeOptions, merge
from eagle3pack.convert.merging.metrics import Metric, norm_metric
from eagle3pack.convert.merging.moments import Moments, Sample
from eagle3pack.convert.merging.rotary import RopeSpec, rope_spec
from eagle3pack.draft.rope import RopeConfig

DRAFT = Path(__file__).parents[3] / "examples" / "quickstart" / "draft"
ROPE = rope_spec(RopeConfig(theta=100000.0), 64, 8192)


class Shipped:
    """The draft's attention layer, and inputs as its norms would give them."""

    def __init__(self) -> None:
        tensors = load_file(DRAFT / "model.safetensors")
        attention = {n.split("self_attn.")[1]: t.float() for n, t in tensors.items() if "self_attn." in n}
        self.weights: AttentionWeights = from_matrices(attention, 64)
        names = ("midlayer.input_layernorm.weight", "midlayer.hidden_norm.weight")
        self.norms = [tensors[name].float() for name in names]
        self.metric: Metric = norm_metric(*self.norms)

    def inputs(self, seed: int, length: int = 160) -> Tensor:
        """White token embeddings beside hidden states that drift, both after their norms."""
        generator = torch.Generator().manual_seed(seed)
        token, hidden = torch.randn(2, length, 576, generator=generator)
        for t in range(1, length):
            hidden[t] = 0.7 * (hidden[t - 1] + hidden[t])
        halves = [x * torch.rsqrt(x.square().mean(-1, keepdim=True)) for x in (token, hidden)]
        return torch.cat([half * norm for half, norm in zip(halves, self.norms, strict=True)], dim=-1)

    def output_error(self, merged: Merged) -> float:
        """|difference|^2 / |output|^2 of the attention block on inputs that nothing was fitted to."""
        lost = there = 0.0
        for seed in range(1000, 1003):
            x = self.inputs(seed)
            expected = attention_forward(self.weights, ROPE, x)
            lost += float((attention_forward(merged.weights, ROPE, x) - expected).square().sum())
            there += float(expected.square().sum())
        return lost / there


@pytest.fixture(scope="module")
def shipped() -> Shipped:
    return Shipped()


def merged(shipped: Shipped, count: int, method: str, **changes: object) -> Merged:
    options = MergeOptions(count, method, max_distance=8192, **changes)  # type: ignore[arg-type]
    return merge(shipped.weights, ROPE, options, shipped.metric)


@pytest.mark.parametrize("count", [4, 1])
def test_the_output_error_falls_from_mean_to_procrustes_to_svd_to_als(shipped: Shipped, count: int) -> None:
    found = {method: merged(shipped, count, method) for method in ("mean", "procrustes", "svd", "als")}
    errors = [shipped.output_error(result) for result in found.values()]
    assert errors == sorted(errors, reverse=True)
    assert errors[-1] < (0.12 if count == 4 else 0.2)
    assert errors[0] > 0.75
    kept = [result.report.result.kept_keys for result in found.values()]
    assert kept == sorted(kept)
    assert all(result.report.query_growth < 4 for result in found.values())


def test_a_ridge_refit_is_never_worse_than_the_closed_form(shipped: Shipped) -> None:
    samples = tuple(Sample(shipped.inputs(seed), torch.arange(160)) for seed in range(30))
    x = torch.cat([sample.x for sample in samples]).double()
    moments = Moments(x.T @ x / len(x), x.mean(0), samples=samples, num_tokens=len(x))
    options = MergeOptions(4, "als", refit_output="ridge", max_distance=8192)
    ridge = merge(shipped.weights, ROPE, options, shipped.metric, moments)
    assert ridge.report.refit is not None
    assert ridge.report.refit.error_after <= ridge.report.refit.error_before
    assert shipped.output_error(ridge) <= shipped.output_error(merged(shipped, 4, "als"))


def test_bfloat16_costs_nothing_that_matters(shipped: Shipped) -> None:
    exact = merged(shipped, 4, "als")
    rounded = Merged(exact.weights.to(torch.bfloat16).to(torch.float32), exact.report)
    assert shipped.output_error(rounded) == pytest.approx(shipped.output_error(exact), rel=0.01)


def test_the_sign_of_distances_matters(shipped: Shipped) -> None:
    """Keys lie behind their query: compared over distances of the other sign, als loses more."""
    assert ROPE.frequencies is not None
    mirrored = RopeSpec(64, 64, tuple(-frequency for frequency in ROPE.frequencies))
    options = MergeOptions(4, "als", max_distance=8192)
    wrong = merge(shipped.weights, mirrored, options, shipped.metric)
    assert shipped.output_error(wrong) > shipped.output_error(merged(shipped, 4, "als"))
