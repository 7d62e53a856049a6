"""One layer's attention weights by head, and its plain forward pass.

Shape letters as in draft/config.py, and In: width of the attention input (2 H in an EAGLE3 draft's
first layer: token embedding and hidden state side by side).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from eagle3pack.convert.merging.rotary import RopeSpec
from eagle3pack.errors import InputError


@dataclass(frozen=True, slots=True)
class AttentionWeights:
    """One attention layer, head by head, in the row order in which it is stored.

    Query head h reads key/value head h // (N / K), as every engine has it.

    Attributes:
        q: shape (N, D, In).
        k, v: shape (K, D, In).
        o: shape (H, N, D).
        q_bias, k_bias, v_bias: shape (N, D) and (K, D), or None.
        o_bias: shape (H,), or None; no method changes it.
        q_norm, k_norm: weights of the RMSNorm on each head before RoPE, shape (D,), or None.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    o: Tensor
    q_bias: Tensor | None = None
    k_bias: Tensor | None = None
    v_bias: Tensor | None = None
    o_bias: Tensor | None = None
    q_norm: Tensor | None = None
    k_norm: Tensor | None = None

    @property
    def num_heads(self) -> int:
        """N, query heads."""
        return self.q.shape[0]

    @property
    def num_key_value_heads(self) -> int:
        """K, key/value heads."""
        return self.k.shape[0]

    @property
    def head_dim(self) -> int:
        """D."""
        return self.q.shape[1]

    @property
    def queries_per_head(self) -> int:
        """Query heads that read one key/value head."""
        return self.num_heads // self.num_key_value_heads

    @property
    def has_qk_norm(self) -> bool:
        """Queries and keys are normalised per head before RoPE."""
        return self.q_norm is not None or self.k_norm is not None

    def tensors(self) -> dict[str, Tensor]:
        """The weights that there are, by attribute."""
        every = {f.name: getattr(self, f.name) for f in fields(self)}
        return {name: x for name, x in every.items() if x is not None}

    def to(self, kind: torch.dtype | torch.device) -> AttentionWeights:
        """The same weights in another dtype or on another device."""
        return replace(self, **{name: x.to(kind) for name, x in self.tensors().items()})


def from_matrices(tensors: Mapping[str, Tensor], head_dim: int) -> AttentionWeights:
    """View the stored matrices of one layer head by head.

    Args:
        tensors: `q_proj.weight` (N D, In), `k_proj.weight`, `v_proj.weight` (K D, In) or
            `qkv_proj.weight` with `o_proj.weight` (H, N D); biases and `q_norm.weight`,
            `k_norm.weight` where there are any.
        head_dim: D.

    Raises:
        InputError: a tensor is missing or its shape does not fit, or it holds NaN or infinity.
    """
    tensors = _split_fused(dict(tensors), head_dim)
    for name in ("q_proj.weight", "k_proj.weight", "v_proj.weight", "o_proj.weight"):
        if name not in tensors:
            raise InputError("the attention layer lacks this tensor", where=name)
    for name, tensor in tensors.items():
        if not bool(torch.isfinite(tensor).all()):
            raise InputError("holds NaN or infinity", where=name)

    def heads(name: str) -> Tensor | None:
        tensor = tensors.get(name)
        if tensor is None:
            return None
        if tensor.shape[0] % head_dim or tensor.shape[0] == 0:
            raise InputError(f"{tensor.shape[0]} rows are no multiple of head_dim {head_dim}", where=name)
        return tensor.reshape(-1, head_dim, *tensor.shape[1:])

    q, k, v = (heads(f"{x}_proj.weight") for x in "qkv")
    output = tensors["o_proj.weight"]
    assert q is not None and k is not None and v is not None
    if k.shape != v.shape or k.shape[2] != q.shape[2]:
        raise InputError("q, k and v differ in shape where they must agree", where="k_proj.weight")
    if len(q) % len(k):
        raise InputError(f"{len(q)} query heads over {len(k)} key/value heads", where="k_proj.weight")
    if output.shape[1] != len(q) * head_dim:
        raise InputError(f"expected {len(q) * head_dim} columns", where="o_proj.weight")
    return AttentionWeights(
        q,
        k,
        v,
        output.reshape(len(output), -1, head_dim),
        q_bias=heads("q_proj.bias"),
        k_bias=heads("k_proj.bias"),
        v_bias=heads("v_proj.bias"),
        o_bias=tensors.get("o_proj.bias"),
        q_norm=tensors.get("q_norm.weight"),
        k_norm=tensors.get("k_norm.weight"),
    )


def _split_fused(tensors: dict[str, Tensor], head_dim: int) -> dict[str, Tensor]:
    """q, k and v out of one matrix that holds them below each other; N from o_proj's columns."""
    for kind in ("weight", "bias"):
        fused = tensors.pop(f"qkv_proj.{kind}", None)
        if fused is None:
            continue
        if "o_proj.weight" not in tensors:
            raise InputError("the attention layer lacks this tensor", where="o_proj.weight")
        query = tensors["o_proj.weight"].shape[1]
        rest = len(fused) - query
        if rest <= 0 or rest % (2 * head_dim):
            raise InputError(
                f"{len(fused)} rows do not split into {query} of queries and keys and values of "
                f"head_dim {head_dim}",
                where=f"qkv_proj.{kind}",
            )
        parts = torch.split(fused, [query, rest // 2, rest // 2])
        tensors |= {f"{x}_proj.{kind}": part for x, part in zip("qkv", parts, strict=True)}
    return tensors


def to_matrices(weights: AttentionWeights, *, fused: bool = False) -> dict[str, Tensor]:
    """The matrices as they are stored; the inverse of `from_matrices`."""
    matrices = {
        "q_proj.weight": weights.q.flatten(0, 1),
        "k_proj.weight": weights.k.flatten(0, 1),
        "v_proj.weight": weights.v.flatten(0, 1),
        "o_proj.weight": weights.o.flatten(1, 2),
    }
    for name, bias in (("q", weights.q_bias), ("k", weights.k_bias), ("v", weights.v_bias)):
        if bias is not None:
            matrices[f"{name}_proj.bias"] = bias.flatten()
    if fused:
        for kind in ("weight", "bias"):
            if f"q_proj.{kind}" in matrices:
                matrices[f"qkv_proj.{kind}"] = torch.cat([matrices.pop(f"{x}_proj.{kind}") for x in "qkv"])
    if weights.o_bias is not None:
        matrices["o_proj.bias"] = weights.o_bias
    for name, norm in (("q", weights.q_norm), ("k", weights.k_norm)):
        if norm is not None:
            matrices[f"{name}_norm.weight"] = norm
    return matrices


def rotate(heads: Tensor, positions: Tensor, rope: RopeSpec) -> Tensor:
    """Apply RoPE in the stored layout to heads of shape (N, T, D) at integer positions (T,)."""
    assert rope.frequencies is not None, rope.unknown
    frequencies = torch.tensor(rope.frequencies, dtype=heads.dtype, device=heads.device)
    angles = positions.to(heads.dtype)[:, None] * frequencies
    cos, sin = angles.cos() * rope.attention_scale, angles.sin() * rope.attention_scale
    turned, plain = heads[..., : rope.rotary_dim], heads[..., rope.rotary_dim :]
    if rope.pairing == "half":
        real, imaginary = turned.chunk(2, dim=-1)
        turned = torch.cat([real * cos - imaginary * sin, imaginary * cos + real * sin], dim=-1)
    else:
        real, imaginary = turned[..., 0::2], turned[..., 1::2]
        turned = torch.stack([real * cos - imaginary * sin, imaginary * cos + real * sin], dim=-1).flatten(-2)
    return torch.cat([turned, plain], dim=-1)


def attention_logits(
    weights: AttentionWeights, rope: RopeSpec, x: Tensor, positions: Tensor | None = None, eps: float = 1e-6
) -> Tensor:
    """Scaled logits before the mask, shape (N, T, T), for the attention input x of shape (T, In)."""
    q, k = _queries_and_keys(weights, rope, x, positions, eps)
    logits: Tensor = q @ k.mT * weights.head_dim**-0.5
    return logits


def attention_heads(
    weights: AttentionWeights,
    rope: RopeSpec,
    x: Tensor,
    positions: Tensor | None = None,
    visible: Tensor | None = None,
    eps: float = 1e-6,
) -> Tensor:
    """What attention hands to o_proj, shape (N, T, D); arguments as `attention_forward`."""
    return attend(*project(weights, rope, x, positions, eps), visible)


def attention_forward(
    weights: AttentionWeights,
    rope: RopeSpec,
    x: Tensor,
    positions: Tensor | None = None,
    visible: Tensor | None = None,
    eps: float = 1e-6,
) -> Tensor:
    """Plain grouped-query attention, as engines compute it.

    Args:
        weights: of the layer.
        rope: with frequencies.
        x: the attention input of one sequence, shape (T, In); weights of another dtype are converted one
            matrix at a time, which saves memory and costs time.
        positions: integer, shape (T,); 0, 1, ... by default.
        visible: whether query t sees key s, bool, shape (T, T); causal by default.
        eps: of the norms on queries and keys.

    Returns:
        The attention output, shape (T, H).
    """
    return project_output(weights, attention_heads(weights, rope, x, positions, visible, eps))


def project(
    weights: AttentionWeights, rope: RopeSpec, x: Tensor, positions: Tensor | None = None, eps: float = 1e-6
) -> tuple[Tensor, Tensor, Tensor]:
    """Rotated queries and keys, and values, one key and value head a query head, all (N, T, D)."""
    q, k = _queries_and_keys(weights, rope, x, positions, eps)
    v = _project(x, weights.v, weights.v_bias).repeat_interleave(weights.queries_per_head, dim=0)
    return q, k, v


def attend(q: Tensor, k: Tensor, v: Tensor, visible: Tensor | None = None) -> Tensor:
    """What queries (N, T, D) gather from keys and values (N, S, D) that they see, bool (T, S); (N, T, D)."""
    # A batch of one: only then is the attention computed in tiles, never (N, T, S) at once.
    return F.scaled_dot_product_attention(
        q[None], k[None], v[None], attn_mask=visible, is_causal=visible is None
    )[0]


def project_output(weights: AttentionWeights, heads: Tensor) -> Tensor:
    """o_proj, from (N, T, D) to (T, H)."""
    output = heads.transpose(0, 1).flatten(1) @ weights.o.flatten(1).to(heads.dtype).T
    return output if weights.o_bias is None else output + weights.o_bias


def _queries_and_keys(
    weights: AttentionWeights, rope: RopeSpec, x: Tensor, positions: Tensor | None, eps: float
) -> tuple[Tensor, Tensor]:
    """Rotated, one key head a query head, both (N, T, D)."""
    positions = torch.arange(len(x)) if positions is None else positions
    q = _normed(_project(x, weights.q, weights.q_bias), weights.q_norm, eps)
    k = _normed(_project(x, weights.k, weights.k_bias), weights.k_norm, eps)
    q, k = rotate(q, positions, rope), rotate(k, positions, rope)
    return q, k.repeat_interleave(weights.queries_per_head, dim=0)


def _project(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """All heads in one product, (N, T, D), in the precision of x."""
    heads = (x @ weight.flatten(0, 1).to(x.dtype).T).reshape(len(x), *weight.shape[:2]).transpose(0, 1)
    return heads if bias is None else heads + bias[:, None]


def _normed(heads: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    if weight is None:
        return heads
    return heads * torch.rsqrt(heads.square().mean(-1, keepdim=True) + eps) * weight
