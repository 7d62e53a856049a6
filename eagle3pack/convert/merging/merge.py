"""Merge the key/value heads of one attention layer: the one entry of this package.

Only q, k, v and o change (and their biases). The result is plain grouped-query attention: nothing is
left to do at run time, and any engine loads it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from eagle3pack.convert.merging import grouping, methods
from eagle3pack.convert.merging.attention import AttentionWeights
from eagle3pack.convert.merging.grouping import Groups
from eagle3pack.convert.merging.layer import (
    empty_result,
    group_rows,
    has_biases,
    working_dtype,
    write_group,
)
from eagle3pack.convert.merging.metrics import IDENTITY, Metric
from eagle3pack.convert.merging.moments import Moments
from eagle3pack.convert.merging.report import Losses, MergeReport, measure, summarise
from eagle3pack.convert.merging.ridge import refit_output
from eagle3pack.convert.merging.rotary import (
    Positions,
    RopeSpec,
    at_distances,
    averaged_phases,
    distance_prior,
)
from eagle3pack.convert.merging.sharing import Sharing, Solution, optimal_maps, psd_root
from eagle3pack.errors import InputError, UsageError

Method = Literal["mean", "first", "procrustes", "svd", "als"]
Refit = Literal["closed", "ridge", "none"]

# Norm weights within a pair that differ by no more than this still let it turn: what turning then gets
# wrong is half the difference, where merging loses tenths.
EQUAL_NORM_WEIGHTS = 0.01

# Of the prior in measured distances: calibration texts are short, the contexts that are served are not.
PRIOR_SHARE = 0.1


@dataclass(frozen=True, slots=True)
class MergeOptions:
    """How to merge.

    Attributes:
        num_key_value_heads: of the result; divides the source's.
        method: mean and first change k and v alone; procrustes, svd and als also q and o.
        refit_output: least squares for o_proj: none, closed (from second moments alone) or ridge (on
            calibration activations, starting from the closed form). None takes the method's own:
            closed for svd and als, none for the others.
        grouping: contiguous, similarity, or the groups of source key/value heads themselves.
        max_distance: positions over which als compares logits.
    """

    num_key_value_heads: int
    method: Method
    refit_output: Refit | None = None
    grouping: Literal["contiguous", "similarity"] | Groups = "contiguous"
    max_distance: int = 32768


@dataclass(frozen=True, slots=True)
class Merged:
    """The merged layer, in the source's dtype, and what was kept."""

    weights: AttentionWeights
    report: MergeReport


@dataclass(frozen=True, slots=True)
class Plan:
    """What is really done, after everything that does not fit was degraded.

    Attributes:
        keys_by, values_by: method for keys with queries, and for values with o_proj.
        refit: of o_proj.
        movable: rotated pairs that norms on queries and keys let turn, bool, (rotary pairs,); None for all.
        notes: every degradation with its reason.
    """

    keys_by: Method
    values_by: Method
    refit: Refit
    movable: Tensor | None
    notes: tuple[str, ...]


def merge(
    weights: AttentionWeights,
    rope: RopeSpec,
    options: MergeOptions,
    metric: Metric = IDENTITY,
    moments: Moments | None = None,
) -> Merged:
    """Merge groups of key/value heads of one layer.

    Args:
        weights: of the layer; bfloat16 and float16 are worked on in float32, systems solved in float64.
        rope: its rotary embedding.
        options: what to do.
        metric: of the attention input; `moments.metric()` is the calibrated one.
        moments: calibration: attention mass by distance for als, activations for the ridge.

    Returns:
        The merged layer and its report. Deterministic.

    Raises:
        UsageError: counts that do not divide, or a refit that the method or missing calibration
            does not allow.
        InputError: groups that are no partition, or a metric of another width than the input.
    """
    _require_fits(weights, rope, options, metric, moments)
    plan = plan_merge(weights, rope, options)
    metric = metric.augmented() if has_biases(weights) else metric
    positions = positions_of(rope, options, moments, weights.queries_per_head)
    groups = _groups(weights, rope, options, metric)
    result = empty_result(weights, options.num_key_value_heads)
    growth = 0.0
    merged_keys: list[Losses] = []
    merged_values: list[Losses] = []
    mean_keys: list[Losses] = []
    mean_values: list[Losses] = []
    for index, heads in enumerate(groups):
        rows = group_rows(weights, rope, heads)
        keys, values = rows.key_problem(metric, positions.of(heads)), rows.value_problem(metric)
        key_solution, value_solution = solve_keys(keys, rope, plan), solve_values(values, plan)
        growth = max(growth, write_group(result, index, rows, key_solution, value_solution, rope))
        merged_keys.append(measure(*_after_norms(keys, key_solution, weights, rope), by_pair=True))
        mean_keys.append(measure(*_after_norms(keys, methods.mean(keys), weights, rope), by_pair=True))
        merged_values.append(measure(values, value_solution, by_pair=False))
        mean_values.append(measure(values, methods.mean(values), by_pair=False))
        del rows, keys, values  # none of it is wanted while activations are in memory
    report = MergeReport(
        method=options.method,
        keys_by=plan.keys_by,
        values_by=plan.values_by,
        refit_output=plan.refit,
        metric=metric.name,
        positions="phases" if rope.frequencies is None else "distances",
        grouping=options.grouping if isinstance(options.grouping, str) else "explicit",
        query_order=tuple(grouping.query_order(groups, weights.queries_per_head).tolist()),
        notes=plan.notes,
        query_growth=growth,
        result=summarise(groups, merged_keys, merged_values),
        mean=summarise(groups, mean_keys, mean_values),
    )
    if plan.refit != "ridge" or moments is None:
        return Merged(result, report)
    output, refit = refit_output(weights, result, rope, moments.samples, moments.held_out)
    return Merged(replace(result, o=output.to(result.o.dtype)), replace(report, refit=refit))


def mean_pooled(weights: AttentionWeights, rope: RopeSpec, groups: Groups) -> AttentionWeights:
    """What `mean` makes of the same groups, without weighing anything."""
    result = empty_result(weights, len(groups))
    solution = methods.average(len(groups[0]), weights.head_dim)
    for index, heads in enumerate(groups):
        write_group(result, index, group_rows(weights, rope, heads), solution, solution, rope)
    return result


def plan_merge(weights: AttentionWeights, rope: RopeSpec, options: MergeOptions) -> Plan:
    """Decide what is really done, with a reason for everything that does not fit."""
    keys_by, values_by, movable = options.method, options.method, None
    notes: list[str] = []
    closed = options.method in ("svd", "als")
    if values_by == "als":
        values_by = "svd"  # nothing turns between o_proj and values, so svd is the optimum there
    if keys_by not in ("mean", "first") and weights.has_qk_norm:
        movable = _movable_pairs(weights, rope)
        keys_by = "procrustes" if bool(movable.any()) else "mean"
        notes.append(
            f"queries and keys are normalised per head, which lets {int(movable.sum())} of {len(movable)} "
            f"rotary pairs turn: keys by {'turning these and ' if bool(movable.any()) else ''}averaging"
        )
    elif keys_by == "als" and rope.frequencies is None:
        keys_by = "svd"
        notes.append(f"{rope.unknown}: keys by svd, which needs the pairing alone, instead of als")
    return Plan(
        keys_by, values_by, options.refit_output or ("closed" if closed else "none"), movable, tuple(notes)
    )


def solve_keys(problem: Sharing, rope: RopeSpec, plan: Plan) -> Solution:
    """The shared key of one group and its query maps."""
    if problem.n == 1:
        return methods.mean(problem)  # nothing to share
    phases = replace(problem, positions=averaged_phases(rope))
    match plan.keys_by:
        case "mean":
            return methods.mean(problem)
        case "first":
            return methods.first(problem)
        case "procrustes":
            return methods.procrustes(phases, plan.movable)
        case "svd":
            return methods.low_rank(phases)
        case "als":
            return methods.alternating(problem, methods.low_rank(phases), methods.mean(problem))


def solve_values(problem: Sharing, plan: Plan) -> Solution:
    """The shared value of one group and its o_proj maps."""
    if problem.n == 1:
        return methods.mean(problem)
    match plan.values_by:
        case "mean":
            solution = methods.mean(problem)
        case "first":
            solution = methods.first(problem)
        case "procrustes":
            solution = methods.procrustes(problem)
        case _:
            return methods.low_rank(problem)
    return solution if plan.refit == "none" else replace(solution, maps=optimal_maps(problem, solution.basis))


def _require_fits(
    weights: AttentionWeights, rope: RopeSpec, options: MergeOptions, metric: Metric, moments: Moments | None
) -> None:
    count, asked = weights.num_key_value_heads, options.num_key_value_heads
    if asked < 1 or count % asked:
        fitting = ", ".join(str(n) for n in range(1, count + 1) if count % n == 0)
        raise UsageError(
            f"{asked} key/value heads cannot be made of {count}", hint=f"These counts can: {fitting}."
        )
    if rope.head_dim != weights.head_dim:
        raise InputError(f"head_dim {rope.head_dim} of the rotary settings is not {weights.head_dim}")
    if options.max_distance < 1:
        raise UsageError(f"max distance {options.max_distance}, expected at least 1")
    moment, inputs = metric.second_moment, weights.q.shape[2]
    if moment is not None and moment.shape[0] != inputs:
        raise InputError(f"its width {moment.shape[0]} is not the attention input's {inputs}", where="metric")
    if options.refit_output == "none" and options.method in ("svd", "als"):
        raise UsageError(
            f"{options.method} chooses a basis for the values that o_proj has to follow",
            where="refit of o_proj",
            hint="Leave the refit at closed, or take mean, first or procrustes.",
        )
    if options.refit_output == "ridge" and (moments is None or not moments.samples):
        raise UsageError("ridge needs calibration activations", where="refit of o_proj")
    if options.refit_output == "ridge" and rope.frequencies is None:
        raise UsageError(f"ridge runs the attention, and {rope.unknown}", where="refit of o_proj")


def positions_of(
    rope: RopeSpec, options: MergeOptions, moments: Moments | None, queries_per_head: int
) -> Positions:
    """What distances keys are compared over; measured ones by source head."""
    if rope.frequencies is None:
        return averaged_phases(rope)
    measured = moments.distance_mass if moments is not None else None
    prior = at_distances(rope, distance_prior(options.max_distance))
    if measured is None:
        return prior
    if measured.dim() == 2:
        measured = measured.reshape(-1, queries_per_head, measured.shape[1]).mean(1)
    return at_distances(rope, measured).mixed(prior, PRIOR_SHARE)


def _groups(weights: AttentionWeights, rope: RopeSpec, options: MergeOptions, metric: Metric) -> Groups:
    count, groups = weights.num_key_value_heads, options.num_key_value_heads
    if not isinstance(options.grouping, str):
        return grouping.checked(options.grouping, count, groups)
    if options.grouping == "contiguous" or groups in (1, count):
        return grouping.contiguous(count, groups)
    every = group_rows(weights, rope, tuple(range(count)))
    energy = metric.gram(every.q).sum(1).diagonal(dim1=-2, dim2=-1)  # (K, D)
    half = weights.head_dim // 2
    outputs = psd_root((every.o.mT @ every.o).double().sum(1)).to(working_dtype(weights))
    similarity = grouping.key_similarity(every.k, energy[:, :half] + energy[:, half:], metric)
    similarity = similarity + grouping.value_similarity(outputs @ every.v, metric)
    return grouping.similar(similarity, groups)


def _movable_pairs(weights: AttentionWeights, rope: RopeSpec) -> Tensor:
    """Rotated pairs whose two norm weights agree, on queries and on keys; bool, (rotary pairs,)."""
    movable = torch.ones(rope.num_rotary_pairs, dtype=torch.bool)
    for norm in (weights.q_norm, weights.k_norm):
        if norm is not None:
            real, imaginary = norm.double()[rope.canonical_order()].chunk(2)
            difference = (real - imaginary).abs() <= EQUAL_NORM_WEIGHTS * torch.maximum(
                real.abs(), imaginary.abs()
            )
            movable &= difference[: rope.num_rotary_pairs]
    return movable


def _after_norms(
    problem: Sharing, solution: Solution, weights: AttentionWeights, rope: RopeSpec
) -> tuple[Sharing, Solution]:
    """Queries and keys as logits see them: normalised per head on average, times the norm's weight.

    Turns of pairs commute with the norm, so the solution itself stays, but for the size of its key.
    """
    if not weights.has_qk_norm:
        return problem, solution
    order, d = rope.canonical_order(), problem.d
    ones = torch.ones(d, dtype=torch.float64)
    on_q = ones if weights.q_norm is None else weights.q_norm.double()[order]
    on_k = ones if weights.k_norm is None else weights.k_norm.double()[order]

    def inverse_rms(moments: Tensor) -> Tensor:
        size = moments.diagonal(dim1=-2, dim2=-1).mean(-1)
        return torch.where(size > 0, size.clamp_min(torch.finfo(torch.float64).tiny).rsqrt(), 0.0)

    left = problem.left * inverse_rms(problem.left).square()[..., None, None] * on_q[:, None] * on_q
    sizes = inverse_rms(problem.own())  # (n,)
    scale = (sizes[:, None] * on_k).flatten()
    shared = inverse_rms(solution.basis @ problem.right @ solution.basis.T)
    back = torch.where(sizes > 0, 1 / torch.where(sizes > 0, sizes, 1.0), 0.0).repeat_interleave(d)
    right = scale[:, None] * problem.right * scale
    return replace(problem, left=left, right=right), replace(solution, basis=shared * solution.basis * back)
