"""One group's rows, cut out of a layer in working precision, and written back merged.

bfloat16 and float16 are worked on in float32. Biases ride along as a last column, so that every map
that moves rows moves them too. Rows of queries and keys are in canonical order (see rotary).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from eagle3pack.convert.merging.attention import AttentionWeights
from eagle3pack.convert.merging.metrics import Metric
from eagle3pack.convert.merging.rotary import Positions, RopeSpec, without_positions
from eagle3pack.convert.merging.sharing import Sharing, Solution

# Relative rounding of second moments by the precision of products, with room for sums over wide inputs.
NOISE = {torch.float32: 1e-6, torch.float64: 1e-12}


@dataclass(frozen=True, slots=True)
class GroupRows:
    """The n source heads of one group and their m query heads each.

    Attributes:
        q: shape (n, m, D, In).
        k, v: shape (n, D, In).
        o: shape (n, m, H, D).
    """

    q: Tensor
    k: Tensor
    v: Tensor
    o: Tensor

    def key_problem(self, metric: Metric, positions: Positions) -> Sharing:
        """Queries and keys with RoPE in between."""
        n, _, d, _ = self.q.shape
        left, right = metric.gram(self.q), metric.gram(self.k.flatten(0, 1))
        assert right.shape == (n * d, n * d)
        return Sharing(left, right, positions, NOISE[self.q.dtype])

    def value_problem(self, metric: Metric) -> Sharing:
        """o_proj and values, nothing in between."""
        left = (self.o.mT @ self.o).double()
        right = metric.gram(self.v.flatten(0, 1))
        return Sharing((left + left.mT) / 2, right, without_positions(self.v.shape[1]), NOISE[self.q.dtype])


def working_dtype(weights: AttentionWeights) -> torch.dtype:
    """float64 for float64 weights, else float32."""
    return torch.float64 if weights.q.dtype == torch.float64 else torch.float32


def has_biases(weights: AttentionWeights) -> bool:
    """Some of q, k and v have biases, so that rows carry one column more."""
    return any(bias is not None for bias in (weights.q_bias, weights.k_bias, weights.v_bias))


def group_rows(weights: AttentionWeights, rope: RopeSpec, heads: tuple[int, ...]) -> GroupRows:
    """Cut out the given source key/value heads with their query heads."""
    index, m = torch.tensor(heads), weights.queries_per_head
    queries = (index[:, None] * m + torch.arange(m)).flatten()
    order, work = rope.canonical_order(), working_dtype(weights)
    augment = has_biases(weights)

    def rows(weight: Tensor, bias: Tensor | None, chosen: Tensor) -> Tensor:
        part = weight[chosen].to(work)
        if not augment:
            return part
        column = torch.zeros(part.shape[:2], dtype=work) if bias is None else bias[chosen].to(work)
        return torch.cat([part, column[..., None]], dim=-1)

    q = rows(weights.q, weights.q_bias, queries)[:, order]
    return GroupRows(
        q=q.reshape(len(heads), m, *q.shape[1:]),
        k=rows(weights.k, weights.k_bias, index)[:, order],
        v=rows(weights.v, weights.v_bias, index),
        o=weights.o[:, queries].to(work).transpose(0, 1).reshape(len(heads), m, -1, weights.head_dim),
    )


def empty_result(weights: AttentionWeights, num_key_value_heads: int) -> AttentionWeights:
    """Room for the merged layer, in the source's dtype; a bias wherever rows can have got one."""
    n, k, d = weights.num_heads, num_key_value_heads, weights.head_dim

    def bias(count: int, present: Tensor | None) -> Tensor | None:
        return None if present is None else present.new_empty(count, d)

    return replace(
        weights,
        q=torch.empty_like(weights.q),
        k=weights.k.new_empty(k, d, weights.k.shape[2]),
        v=weights.v.new_empty(k, d, weights.v.shape[2]),
        o=torch.empty_like(weights.o),
        q_bias=bias(n, weights.q_bias),
        k_bias=bias(k, weights.k_bias),
        v_bias=bias(k, weights.v_bias),
    )


def write_group(
    result: AttentionWeights, index: int, group: GroupRows, keys: Solution, values: Solution, rope: RopeSpec
) -> float:
    """Fill in one merged key/value head and its query heads.

    Returns:
        The largest factor by which a query head's norm grew.
    """
    n, m, d, width = group.q.shape
    stored = torch.argsort(rope.canonical_order())
    work = group.q.dtype
    q = keys.maps[:, None].to(work) @ group.q  # (n, m, D, In)
    k = (keys.basis.to(work) @ group.k.reshape(n * d, width))[stored]
    v = values.basis.to(work) @ group.v.reshape(n * d, width)
    o = group.o @ values.maps[:, None].to(work).mT  # (n, m, H, D)
    queries = slice(index * n * m, (index + 1) * n * m)
    inputs = result.q.shape[2]
    flat = q.reshape(n * m, d, width)[:, stored]
    result.q[queries] = flat[..., :inputs].to(result.q.dtype)
    result.k[index], result.v[index] = k[:, :inputs].to(result.k.dtype), v[:, :inputs].to(result.v.dtype)
    result.o[:, queries] = o.flatten(0, 1).transpose(0, 1).to(result.o.dtype)
    for bias, value, place in (
        (result.q_bias, flat[..., -1], queries),
        (result.k_bias, k[:, -1], index),
        (result.v_bias, v[:, -1], index),
    ):
        if bias is not None:
            bias[place] = value.to(bias.dtype)
    norms = group.q.flatten(2).norm(dim=2).clamp_min(torch.finfo(work).tiny)
    return float((q.flatten(2).norm(dim=2) / norms).max())
