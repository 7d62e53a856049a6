"""Held-out figures against their definitions."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from eagle3pack.convert.merging.attention import attention_forward, attention_logits
from eagle3pack.convert.merging.calibrated import merge_judged
from eagle3pack.convert.merging.fidelity import Rest, attention_outputs, compare, output_error
from eagle3pack.convert.merging.merge import MergeOptions, merge
from eagle3pack.convert.merging.metrics import IDENTITY
from eagle3pack.convert.merging.moments import Moments, Sample
from eagle3pack.errors import UsageError
from tests.convert.merging.planted import IN, H, inputs, layer, rope
from tests.convert.merging.test_ridge import calibration


def samples(count: int = 3, length: int = 12) -> list[Sample]:
    generator = torch.Generator().manual_seed(5)
    return [
        Sample(
            inputs(50 + i, length),
            torch.arange(length),
            steps=torch.arange(length) % 3,
            residual=torch.randn(length, H, generator=generator),
        )
        for i in range(count)
    ]


def rest(vocabulary: int = 17) -> Rest:
    generator = torch.Generator().manual_seed(6)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    return Rest(
        random(H), random(20, H), random(20, H), random(H, 20), random(H), random(vocabulary, H), 1e-5
    )


@pytest.mark.parametrize("order", ["contiguous", "similarity"])
def test_figures_are_what_they_are_called(order: str) -> None:
    source, spec, given, head = layer(1), rope(), samples(), rest()
    merged = merge(source, spec, MergeOptions(2, "als", grouping=order))  # type: ignore[arg-type]
    found = compare(source, merged.weights, spec, merged.report.query_order, given, lambda: head)
    lost = there = divergence = logits = 0.0
    same: dict[int, list[bool]] = {0: [], 1: [], 2: []}
    visible = torch.ones(12, 12, dtype=torch.bool).tril()
    for sample in given:
        y, other = (attention_forward(w, spec, sample.x) for w in (source, merged.weights))
        lost, there = lost + float((y - other).square().sum()), there + float(y.square().sum())
        ours, theirs = (
            attention_logits(w, spec, sample.x).masked_fill(~visible, -torch.inf).softmax(-1)
            for w in (source, merged.weights)
        )
        ours = ours[torch.tensor(merged.report.query_order)]
        divergence += float((ours * (ours / theirs).log()).nan_to_num().sum()) / (4 * 36)
        distributions = []
        for attended in (y, other):
            assert sample.residual is not None
            hidden = sample.residual + attended.float()
            x = F.rms_norm(hidden, (H,), head.post_attention_layernorm, 1e-5)
            hidden = hidden + (F.silu(x @ head.gate.T) * (x @ head.up.T)) @ head.down.T
            distributions.append((F.rms_norm(hidden, (H,), head.norm, 1e-5) @ head.lm_head.T).softmax(-1))
        one, two = distributions
        logits += float((one * (one / two).log()).sum()) / 36
        for i in range(12):
            same[i % 3].append(bool(one[i].argmax() == two[i].argmax()))
    assert found.num_tokens == 36
    assert found.output_error == pytest.approx(lost / there, rel=1e-4)
    expected = attention_outputs(source, spec, given)
    assert found.output_error == pytest.approx(output_error(expected, merged.weights, spec, given), rel=1e-6)
    assert found.attention_kl == pytest.approx(divergence, rel=1e-3)
    assert found.logits_kl == pytest.approx(logits, rel=1e-3)
    assert found.same_token == pytest.approx([sum(x) / len(x) for x in same.values()])


def test_a_layer_beside_itself_is_no_different() -> None:
    source, spec = layer(2), rope()
    found = compare(source, source, spec, range(4), samples(), rest)
    assert (found.output_error, found.attention_kl, found.logits_kl) == (0, 0, 0)
    assert found.same_token == (1, 1, 1)
    assert compare(source, source, spec, range(4), samples()).logits_kl is None


def test_the_grouping_with_the_lower_held_out_error_is_taken() -> None:
    source, spec, moments = layer(3), rope(), calibration(20)
    options = MergeOptions(2, "als", refit_output="ridge")
    found = merge_judged(source, spec, options, moments.metric(), moments, choose_grouping=True)
    errors = found.output_errors
    assert set(errors) <= {"contiguous", "similarity"}
    assert found.merged.report.grouping == min(errors, key=errors.__getitem__)
    assert found.fidelity.output_error == pytest.approx(min(errors.values()), rel=1e-6)
    assert found.fidelity.output_error < found.mean_output_error


def test_a_calibration_without_activations_judges_nothing() -> None:
    bare = Moments(torch.eye(IN), torch.zeros(IN))
    with pytest.raises(UsageError, match="no activations"):
        merge_judged(layer(4), rope(), MergeOptions(2, "als"), IDENTITY, bare)
