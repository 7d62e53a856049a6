"""Attention layers with a known answer: random ones, and true GQA layers in disguise."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from eagle3pack.convert.merging.attention import AttentionWeights
from eagle3pack.convert.merging.rotary import Pairing, RopeSpec

D, IN, H, LENGTH = 8, 24, 12, 10


def rope(pairing: Pairing = "half", rotary_dim: int = D) -> RopeSpec:
    """Frequencies over the whole range, high to low."""
    pairs = rotary_dim // 2
    return RopeSpec(D, rotary_dim, tuple(10.0 ** (-f) for f in range(pairs)), pairing)


def layer(seed: int, num_heads: int = 4, num_kv: int = 4, biases: bool = False) -> AttentionWeights:
    """Seeded random weights, float64."""
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.float64, generator=generator) / shape[-1] ** 0.5

    return AttentionWeights(
        q=2 * random(num_heads, D, IN),
        k=2 * random(num_kv, D, IN),
        v=random(num_kv, D, IN),
        o=random(H, num_heads, D),
        q_bias=random(num_heads, D) if biases else None,
        k_bias=random(num_kv, D) if biases else None,
        v_bias=random(num_kv, D) if biases else None,
    )


def inputs(seed: int, length: int = LENGTH) -> Tensor:
    """A sequence of attention inputs, float64, (T, In)."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(length, IN, dtype=torch.float64, generator=generator)


def expanded(gqa: AttentionWeights) -> AttentionWeights:
    """The same function with a key/value head for every query head."""

    def repeat(heads: Tensor | None) -> Tensor | None:
        return None if heads is None else heads.repeat_interleave(gqa.queries_per_head, dim=0)

    return replace(
        gqa,
        k=gqa.k.repeat_interleave(gqa.queries_per_head, dim=0),
        v=gqa.v.repeat_interleave(gqa.queries_per_head, dim=0),
        k_bias=repeat(gqa.k_bias),
        v_bias=repeat(gqa.v_bias),
    )


def pair_matrix(factors: Tensor, spec: RopeSpec) -> Tensor:
    """Multiply rotated pair f by a complex number, in the stored layout; (D, D)."""
    matrix = torch.eye(spec.head_dim, dtype=torch.float64)
    for f, factor in enumerate(factors):
        a, b = (f, f + spec.rotary_dim // 2) if spec.pairing == "half" else (2 * f, 2 * f + 1)
        matrix[a, a], matrix[a, b] = factor.real, -factor.imag
        matrix[b, a], matrix[b, b] = factor.imag, factor.real
    return matrix


def disguised(
    mha: AttentionWeights,
    spec: RopeSpec,
    seed: int,
    *,
    scales: bool = True,
    linear: bool = True,
    unrotated: bool = True,
) -> AttentionWeights:
    """The same function with a random gauge on every head.

    Args:
        mha: as many key/value heads as query heads.
        spec: RoPE.
        seed: of the gauge.
        scales: pairs also change size, not only phase.
        linear: values mix by any invertible matrix; an orthogonal one if false.
        unrotated: unrotated query and key dimensions mix by any invertible matrix.
    """
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.float64, generator=generator)

    q, k, v, o = mha.q.clone(), mha.k.clone(), mha.v.clone(), mha.o.clone()
    q_bias, k_bias, v_bias = (None if b is None else b.clone() for b in (mha.q_bias, mha.k_bias, mha.v_bias))
    for h in range(mha.num_heads):
        sizes = random(spec.num_rotary_pairs).exp() if scales else torch.ones(spec.num_rotary_pairs)
        factors = torch.polar(sizes.double(), random(spec.num_rotary_pairs))
        on_keys, on_queries = pair_matrix(factors, spec), pair_matrix(1 / factors.conj(), spec)
        rest = spec.head_dim - spec.rotary_dim
        if rest and unrotated:
            mix = random(rest, rest) + 2 * torch.eye(rest, dtype=torch.float64)
            on_keys[spec.rotary_dim :, spec.rotary_dim :] = mix
            on_queries[spec.rotary_dim :, spec.rotary_dim :] = mix.inverse().T
        on_values = random(D, D)
        on_values = (
            on_values + 2 * torch.eye(D, dtype=torch.float64) if linear else torch.linalg.qr(on_values)[0]
        )
        q[h], k[h], v[h] = on_queries @ q[h], on_keys @ k[h], on_values @ v[h]
        o[:, h] = o[:, h] @ on_values.inverse()
        for bias, matrix in ((q_bias, on_queries), (k_bias, on_keys), (v_bias, on_values)):
            if bias is not None:
                bias[h] = matrix @ bias[h]
    return replace(mha, q=q, k=k, v=v, o=o, q_bias=q_bias, k_bias=k_bias, v_bias=v_bias)


def permuted(mha: AttentionWeights, order: Tensor) -> AttentionWeights:
    """The same function with heads in another order."""

    def pick(heads: Tensor | None) -> Tensor | None:
        return None if heads is None else heads[order]

    return replace(
        mha,
        q=mha.q[order],
        k=mha.k[order],
        v=mha.v[order],
        o=mha.o[:, order],
        q_bias=pick(mha.q_bias),
        k_bias=pick(mha.k_bias),
        v_bias=pick(mha.v_bias),
    )


def relative_error(found: Tensor, expected: Tensor) -> float:
    """Norm of the difference over the norm of what was expected."""
    return float((found - expected).norm() / expected.norm())
