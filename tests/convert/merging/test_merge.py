from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from eagle3pack.convert.merging.attention import AttentionWeights, attention_forward, attention_logits, rotate
from eagle3pack.convert.merging.layer import group_rows
from eagle3pack.convert.merging.merge import (
    Merged,
    MergeOptions,
    mean_pooled,
    merge,
    plan_merge,
    positions_of,
    solve_keys,
    solve_values,
)
from eagle3pack.convert.merging.metrics import IDENTITY, Metric
from eagle3pack.convert.merging.moments import Moments
from eagle3pack.convert.merging.rotary import RopeSpec, at_distances, distance_prior
from eagle3pack.errors import InputError, UsageError
from tests.convert.merging.planted import (
    IN,
    D,
    disguised,
    expanded,
    inputs,
    layer,
    permuted,
    relative_error,
    rope,
)

SPECS = [rope(), rope("interleaved"), rope(rotary_dim=4), rope("interleaved", rotary_dim=4)]
METHODS = ["mean", "first", "procrustes", "svd", "als"]
seeds = st.integers(0, 2**31)


def random_metric(seed: int) -> Metric:
    generator = torch.Generator().manual_seed(seed)
    root = torch.randn(IN, IN, dtype=torch.float64, generator=generator)
    mean = 0.1 * torch.randn(IN, dtype=torch.float64, generator=generator)
    return Metric("calibration", root @ root.T / IN + torch.outer(mean, mean), mean)


def options(count: int, method: Any, **changes: Any) -> MergeOptions:
    return MergeOptions(count, method, **{"max_distance": 16, **changes})


def output_error(source: AttentionWeights, merged: AttentionWeights, spec: RopeSpec, seed: int = 3) -> float:
    x = inputs(seed)
    return relative_error(attention_forward(merged, spec, x), attention_forward(source, spec, x))


@settings(deadline=None, max_examples=12)
@given(
    seed=seeds,
    spec=st.sampled_from(SPECS),
    method=st.sampled_from(["svd", "als"]),
    biases=st.booleans(),
    calibrated=st.booleans(),
    num_kv=st.sampled_from([1, 2]),
)
def test_a_gqa_layer_in_disguise_comes_back_exactly(
    seed: int, spec: RopeSpec, method: str, biases: bool, calibrated: bool, num_kv: int
) -> None:
    gqa = layer(seed, num_heads=6, num_kv=num_kv, biases=biases)
    hidden = disguised(expanded(gqa), spec, seed + 1)
    order = torch.randperm(6, generator=torch.Generator().manual_seed(seed))
    hidden = permuted(hidden, order)
    metric = random_metric(seed) if calibrated else IDENTITY
    found = merge(hidden, spec, options(num_kv, method, grouping="similarity"), metric)
    assert found.weights.k.shape == gqa.k.shape
    assert output_error(gqa, found.weights, spec) < 1e-7
    assert found.report.result.kept_keys == pytest.approx(1, abs=1e-9)
    assert found.report.result.kept_values == pytest.approx(1, abs=1e-9)
    assert found.report.mean.kept_values < 0.99


def test_procrustes_recovers_pure_rotations_only() -> None:
    spec, gqa = rope(), layer(1, num_heads=4, num_kv=1)
    turned = disguised(expanded(gqa), spec, 2, scales=False, linear=False)
    assert output_error(gqa, merge(turned, spec, options(1, "procrustes")).weights, spec) < 1e-6
    stretched = disguised(expanded(gqa), spec, 2)
    assert output_error(gqa, merge(stretched, spec, options(1, "procrustes")).weights, spec) > 0.1


@pytest.mark.parametrize("method", METHODS)
def test_a_group_of_one_is_the_identity(method: str) -> None:
    for source in (layer(4, biases=True), layer(4, num_kv=2)):
        same = merge(source, rope(), options(source.num_key_value_heads, method))
        for field in fields(source):
            before, after = getattr(source, field.name), getattr(same.weights, field.name)
            assert before is None or torch.equal(before, after)
        assert same.report.result.kept_keys == same.report.result.kept_values == 1


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("spec", SPECS, ids=str)
@pytest.mark.parametrize("num_kv", [4, 8])
def test_the_result_under_plain_gqa_is_what_the_method_predicts(
    method: str, spec: RopeSpec, num_kv: int
) -> None:
    """Each source head with its mapped query against the shared key, one by one, and the same for values."""
    source, metric = layer(5, num_heads=8, num_kv=num_kv, biases=True), random_metric(6)
    asked = options(2, method, grouping=(((0, 2), (1, 3)) if num_kv == 4 else ((0, 2, 5, 7), (1, 3, 4, 6))))
    found, x, plan = merge(source, spec, asked, metric), inputs(7), plan_merge(source, spec, asked)
    positions, times = at_distances(spec, distance_prior(16)), torch.arange(len(x))
    augmented, stored = torch.cat([x, torch.ones(len(x), 1)], dim=1), torch.argsort(spec.canonical_order())
    logits = attention_logits(found.weights, spec, x)
    output, new_head = torch.zeros(len(x), len(source.o), dtype=torch.float64), 0
    for heads in asked.grouping:
        rows = group_rows(source, spec, heads)  # type: ignore[arg-type]
        keys = solve_keys(rows.key_problem(metric.augmented(), positions), spec, plan)
        values = solve_values(rows.value_problem(metric.augmented()), plan)
        shared_key = augmented @ (keys.basis @ rows.k.flatten(0, 1))[stored].T
        shared_value = augmented @ (values.basis @ rows.v.flatten(0, 1)).T
        for n in range(len(heads)):
            for m in range(source.queries_per_head):
                query = augmented @ (keys.maps[n] @ rows.q[n, m])[stored].T
                predicted = rotate(query[None], times, spec)[0] @ rotate(shared_key[None], times, spec)[0].T
                torch.testing.assert_close(logits[new_head], predicted * D**-0.5)
                later = torch.ones(len(x), len(x), dtype=torch.bool).triu(1)
                attention = (predicted * D**-0.5).masked_fill(later, -torch.inf).softmax(-1)
                output += attention @ shared_value @ values.maps[n] @ rows.o[n, m].T
                new_head += 1
    torch.testing.assert_close(attention_forward(found.weights, spec, x), output)


@settings(deadline=None, max_examples=10)
@given(seed=seeds, spec=st.sampled_from(SPECS))
def test_more_of_the_source_survives_from_mean_to_procrustes_to_svd_to_als(seed: int, spec: RopeSpec) -> None:
    source, metric = layer(seed), random_metric(seed)
    kept = {method: merge(source, spec, options(2, method), metric).report.result for method in METHODS}
    assert kept["als"].kept_keys >= max(kept["svd"].kept_keys, kept["mean"].kept_keys) - 1e-9
    for method in ("mean", "first", "procrustes"):
        assert kept["svd"].kept_values >= kept[method].kept_values - 1e-9
    assert kept["als"].kept_values == kept["svd"].kept_values
    baseline = merge(source, spec, options(2, "als"), metric).report.mean
    assert baseline == kept["mean"]


@pytest.mark.parametrize("method", METHODS)
def test_the_order_of_source_heads_inside_explicit_groups_does_not_matter(method: str) -> None:
    source, spec = layer(8), rope()
    one = merge(source, spec, options(2, method, grouping=((0, 2), (1, 3)))).weights
    other = merge(source, spec, options(2, method, grouping=((3, 1), (2, 0)))).weights
    assert torch.equal(attention_forward(one, spec, inputs(9)), attention_forward(other, spec, inputs(9)))
    turned = permuted(source, torch.tensor([0, 2, 1, 3]))
    assert output_error(one, merge(turned, spec, options(2, method)).weights, spec) < (
        1 if method == "first" else 1e-9
    )


@pytest.mark.parametrize("method", METHODS)
def test_half_split_and_interleaved_layers_merge_alike(method: str) -> None:
    source = layer(10)
    order = rope("interleaved").canonical_order()
    half = replace(source, q=source.q[:, order], k=source.k[:, order])
    one = merge(source, rope("interleaved"), options(2, method)).weights
    other = merge(half, rope(), options(2, method)).weights
    torch.testing.assert_close(one.k[:, order], other.k)
    torch.testing.assert_close(one.q[:, order], other.q)


@pytest.mark.parametrize("method", METHODS)
def test_a_gqa_source_weighs_each_head_by_all_its_queries(method: str) -> None:
    gqa, spec = layer(11, num_heads=8, num_kv=4), rope()
    found = merge(gqa, spec, options(2, method))
    assert found.weights.k.shape == (2, D, IN)
    assert len(found.report.result.heads) == 8
    assert [head.head for head in found.report.result.heads] == list(range(8))
    if method in ("svd", "als"):  # the same optimum as of the layer with its heads repeated
        repeated = merge(expanded(gqa), spec, options(2, method, grouping=((0, 1, 2, 3), (4, 5, 6, 7))))
        assert found.report.result.kept_keys == pytest.approx(repeated.report.result.kept_keys, abs=1e-6)
        assert found.report.result.kept_values == pytest.approx(repeated.report.result.kept_values, abs=1e-9)


def same(one: Merged, other: Merged) -> bool:
    return one.report == other.report and all(
        torch.equal(getattr(one.weights, name), getattr(other.weights, name)) for name in "qkvo"
    )


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_the_same_input_gives_the_same_bits_in_its_own_dtype(dtype: torch.dtype) -> None:
    source = layer(12).to(dtype)
    for method in METHODS:
        asked = options(2, method, grouping="similarity")
        one, other = merge(source, rope(), asked), merge(source, rope(), asked)
        assert same(one, other)
        assert one.weights.q.dtype == one.weights.k.dtype == one.weights.o.dtype == dtype
        exact = merge(layer(12), rope(), asked).weights
        assert relative_error(one.weights.k.double(), exact.k) < 0.05


def test_the_source_is_left_alone() -> None:
    source = layer(13, biases=True)
    before = [getattr(source, f.name).clone() for f in fields(source) if getattr(source, f.name) is not None]
    merge(source, rope(), options(1, "als"))
    after = [getattr(source, f.name) for f in fields(source) if getattr(source, f.name) is not None]
    assert all(torch.equal(x, y) for x, y in zip(before, after, strict=True))


def test_unknown_scaling_takes_svd_instead_of_als_and_says_so() -> None:
    source = layer(14)
    unknown = RopeSpec(D, D, None, unknown="rope_type 'odd' has no fixed frequencies that we know")
    found = merge(source, unknown, options(2, "als"))
    assert (found.report.keys_by, found.report.values_by) == ("svd", "svd")
    assert found.report.positions == "phases"
    assert "odd" in found.report.notes[0] and "svd" in found.report.notes[0]
    known = merge(source, rope(), options(2, "svd"))
    assert not known.report.notes
    assert torch.equal(known.weights.k, found.weights.k)


def test_norms_on_queries_and_keys_leave_turns_where_they_fit_and_the_mean_elsewhere() -> None:
    spec = rope()
    even = torch.tensor([1.0, 2.0, 0.5, 1.5] * 2, dtype=torch.float64)
    uneven = even.clone()
    uneven[:2] *= 1.5  # pairs 0 and 1
    gqa = replace(layer(15, num_heads=4, num_kv=1), q_norm=even, k_norm=even)
    hidden = disguised(expanded(gqa), spec, 16, scales=False)
    found = merge(hidden, spec, options(1, "als"))
    assert (found.report.keys_by, found.report.values_by) == ("procrustes", "svd")
    assert "4 of 4" in found.report.notes[0]
    assert output_error(gqa, found.weights, spec) < 1e-4
    assert found.report.result.kept_keys == pytest.approx(1, abs=1e-9)
    some = merge(replace(hidden, q_norm=uneven), spec, options(1, "svd"))
    assert "2 of 4" in some.report.notes[0]
    mean = merge(replace(hidden, q_norm=uneven), spec, options(1, "mean"))
    fixed = torch.tensor([0, 1, 4, 5])
    torch.testing.assert_close(some.weights.k[:, fixed], mean.weights.k[:, fixed])
    assert torch.equal(some.weights.q[:, fixed], hidden.q[:, fixed])
    none = merge(replace(hidden, k_norm=torch.arange(1.0, 9.0)), spec, options(1, "als"))
    assert none.report.keys_by == "mean" and torch.equal(none.weights.q, hidden.q)


def test_mean_and_first_touch_keys_and_values_alone_unless_a_refit_is_asked_for() -> None:
    source = layer(17)
    for method in ("mean", "first"):
        plain = merge(source, rope(), options(2, method))
        assert torch.equal(plain.weights.q, source.q) and torch.equal(plain.weights.o, source.o)
        refit = merge(source, rope(), options(2, method, refit_output="closed"))
        assert torch.equal(refit.weights.q, source.q) and not torch.equal(refit.weights.o, source.o)
        assert torch.equal(refit.weights.v, plain.weights.v)
        assert refit.report.result.kept_values > plain.report.result.kept_values
    expected = source.k.reshape(2, 2, D, IN).mean(1)
    torch.testing.assert_close(merge(source, rope(), options(2, "mean")).weights.k, expected)
    assert torch.equal(merge(source, rope(), options(2, "first")).weights.v, source.v[::2])


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        (options(3, "svd"), "cannot be made of 4"),
        (options(0, "svd"), "cannot be made of 4"),
        (options(2, "als", refit_output="none"), "o_proj has to follow"),
        (options(2, "als", refit_output="ridge"), "calibration"),
        (options(2, "als", max_distance=0), "at least 1"),
        (options(2, "als", grouping=((0, 1), (2, 2))), "exactly once"),
        (options(2, "als", grouping=((0, 1, 2), (3,))), "2 groups of 2"),
    ],
)
def test_what_cannot_be_done_is_refused(asked: MergeOptions, message: str) -> None:
    with pytest.raises((UsageError, InputError), match=message):
        merge(layer(18), rope(), asked)


def test_a_metric_or_rope_of_another_shape_is_refused() -> None:
    with pytest.raises(InputError, match="width"):
        merge(layer(19), rope(), options(2, "svd"), Metric("norm", torch.ones(IN + 1)))
    with pytest.raises(InputError, match="head_dim"):
        merge(layer(19), RopeSpec(4, 4, (1.0, 0.1)), options(2, "svd"))


@pytest.mark.parametrize("method", METHODS)
def test_dead_heads_duplicates_and_a_single_token_give_finite_weights(method: str) -> None:
    spec, one = rope(), inputs(20, 1)
    single = Metric("calibration", one.T @ one, one[0])
    source = layer(21, biases=True)
    for change in ("q", "k", "v", "o"):
        dead = replace(source, **{change: torch.zeros_like(getattr(source, change))})
        for metric in (IDENTITY, single):
            found = merge(dead, spec, options(1, method, grouping="similarity"), metric)
            assert all(bool(getattr(found.weights, name).isfinite().all()) for name in "qkvo")
    twins = replace(
        source, k=source.k[:1].repeat(4, 1, 1), v=source.v[:1].repeat(4, 1, 1), k_bias=None, v_bias=None
    )
    assert output_error(twins, merge(twins, spec, options(1, method)).weights, spec) < 1e-6
    half_dead = replace(source, v=source.v * torch.tensor([1.0, 0, 1, 1])[:, None, None])
    assert output_error(half_dead, merge(half_dead, spec, options(2, method)).weights, spec) < 2


def test_the_report_is_json_and_counts_every_head_once() -> None:
    found = merge(layer(22), rope(), options(2, "als", grouping="similarity"), random_metric(23))
    as_dict = found.report.as_dict()
    assert sorted(as_dict["query_order"]) == [0, 1, 2, 3]
    assert sorted(h for group in as_dict["result"]["groups"] for h in group["heads"]) == [0, 1, 2, 3]
    for group in as_dict["result"]["groups"]:
        for kept in (group["keys"], group["values"]):
            assert kept["min"] <= kept["median"] <= kept["max"] <= 1 + 1e-9
    assert as_dict["query_growth"] >= 1e-3


@pytest.mark.parametrize("biases", [False, True])
def test_mean_pooling_needs_no_problem(biases: bool) -> None:
    source, groups = layer(31, biases=biases), ((0, 3), (1, 2))
    expected = merge(source, rope(), options(2, "mean", grouping=groups)).weights
    found = mean_pooled(source, rope(), groups)
    assert all(torch.equal(x, found.tensors()[name]) for name, x in expected.tensors().items())


def test_every_source_head_is_compared_over_the_distances_of_its_queries() -> None:
    source, spec = layer(32, num_heads=4, num_kv=2), rope()
    mass = torch.rand(4, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(33))
    mass = mass / mass.sum(1, keepdim=True)
    metric = random_metric(34)
    assert metric.second_moment is not None and metric.mean is not None
    moments = Moments(metric.second_moment, metric.mean, mass)
    found = positions_of(spec, options(1, "als"), moments, source.queries_per_head)
    prior = distance_prior(16) / distance_prior(16).sum()
    for head in range(2):
        own = 0.1 * prior
        own[:5] += 0.9 * mass[2 * head : 2 * head + 2].mean(0)
        torch.testing.assert_close(found.of([head]).linear[0], at_distances(spec, own).linear)
    both = merge(source, spec, options(1, "als"), metric, moments).report
    alike = merge(
        source, spec, options(1, "als"), metric, replace(moments, distance_mass=mass.mean(0))
    ).report
    assert both.result.kept_keys != alike.result.kept_keys
