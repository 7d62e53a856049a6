"""How positions enter the logits, as the merging methods need it.

A pair of rotated dimensions is one complex number, which RoPE turns by angle frequency x position.
The methods see every head in canonical order: the first half of head_dim holds the real parts, the
second half the imaginary parts, rotated pairs before unrotated ones (which count as pairs of
frequency zero). Only the difference of two positions matters, so all that an objective needs of RoPE
is its average over distances: a `Positions`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from eagle3pack.draft.rope import RopeConfig
from eagle3pack.errors import InputError, UnsupportedDraftError

Pairing = Literal["half", "interleaved"]
DISTANCE_BLOCK = 32768  # distances that are averaged at a time, which bounds the memory
DEFAULT_THETA = 10000.0  # what transformers and vLLM take where the config is silent


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """The rotary embedding of one attention layer.

    Attributes:
        head_dim: D.
        rotary_dim: leading dimensions that are rotated.
        frequencies: radians a position, one a rotated pair; None where the scaling is not understood.
        pairing: "half" pairs dimension f with f + rotary_dim / 2 (Llama in transformers, vLLM, SGLang),
            "interleaved" 2 f with 2 f + 1 (GPT-J).
        attention_scale: constant factor on cos and sin (YaRN).
        unknown: why there are no frequencies.
    """

    head_dim: int
    rotary_dim: int
    frequencies: tuple[float, ...] | None
    pairing: Pairing = "half"
    attention_scale: float = 1.0
    unknown: str = ""

    @property
    def num_rotary_pairs(self) -> int:
        """Pairs that are rotated."""
        return self.rotary_dim // 2

    def canonical_order(self) -> Tensor:
        """Stored row of every canonical dimension, int64, shape (D,)."""
        rotary, plain = self.rotary_dim, range(self.rotary_dim, self.head_dim)
        if self.pairing == "half":
            real, imaginary = list(range(rotary // 2)), list(range(rotary // 2, rotary))
        else:
            real, imaginary = list(range(0, rotary, 2)), list(range(1, rotary, 2))
        middle = len(plain) // 2
        return torch.tensor([*real, *plain[:middle], *imaginary, *plain[middle:]])


def rope_spec(
    config: RopeConfig, head_dim: int, max_position_embeddings: int | None = None, pairing: Pairing = "half"
) -> RopeSpec:
    """Work out frequencies from a draft's rotary settings.

    Args:
        config: theta, scaling and share of rotated dimensions.
        head_dim: D.
        max_position_embeddings: what YaRN falls back to for the length it was trained with.
        pairing: which dimensions form a pair; no config says, engines imply "half" for Llama drafts.

    Returns:
        The spec; without frequencies where rope_type is not understood.

    Raises:
        InputError: a parameter of the scaling is missing or no positive number.
        UnsupportedDraftError: an odd number of dimensions, of which pairs cannot be made.

    Source: transformers 5.24 modeling_rope_utils.py. "dynamic" is the unscaled embedding within the
    length the model was trained with.
    """
    proportional = config.rope_type == "proportional"
    rotary_dim = head_dim if proportional else int(head_dim * config.partial_rotary_factor)
    if head_dim % 2 or rotary_dim % 2 or not 0 <= rotary_dim <= head_dim:
        raise UnsupportedDraftError(
            f"head_dim {head_dim} with {rotary_dim} rotated dimensions does not split into pairs"
        )
    theta = config.theta or DEFAULT_THETA
    plain = [theta ** (-2 * f / rotary_dim) for f in range(rotary_dim // 2)]
    scale, unknown = 1.0, ""
    frequencies: list[float] | None = plain
    match config.rope_type:
        case "default" | "dynamic" | "mrope":  # on text all sections of mRoPE count alike
            pass
        case "linear":
            factor = _number(config.scaling, "factor")
            frequencies = [frequency / factor for frequency in plain]
        case "proportional":
            rotated = int(config.partial_rotary_factor * head_dim // 2)
            factor = _number(config.scaling, "factor", 1.0)
            frequencies = [x / factor if f < rotated else 0.0 for f, x in enumerate(plain)]
        case "llama3":
            frequencies = [_llama3(frequency, config.scaling) for frequency in plain]
        case "yarn":
            frequencies, scale = _yarn(plain, theta, config.scaling, max_position_embeddings)
        case other:
            frequencies, unknown = None, f"rope_type {other!r} has no fixed frequencies that we know"
    return RopeSpec(
        head_dim, rotary_dim, None if frequencies is None else tuple(frequencies), pairing, scale, unknown
    )


def _number(scaling: Mapping[str, Any], key: str, default: float | None = None) -> float:
    value = scaling.get(key)
    value = default if value is None else value
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 < value < math.inf:
        raise InputError(f"{key} of the rope scaling is {value!r}, expected a positive number")
    return float(value)


def _llama3(frequency: float, scaling: Mapping[str, Any]) -> float:
    factor = _number(scaling, "factor")
    low, high = _number(scaling, "low_freq_factor"), _number(scaling, "high_freq_factor")
    turns = _number(scaling, "original_max_position_embeddings") * frequency / (2 * math.pi)
    if turns < low:
        return frequency / factor
    if turns > high:
        return frequency
    smooth = (turns - low) / (high - low)
    return (1 - smooth) * frequency / factor + smooth * frequency


def _yarn(
    plain: list[float], theta: float, scaling: Mapping[str, Any], max_position_embeddings: int | None
) -> tuple[list[float], float]:
    """Frequencies and the factor on cos and sin."""
    length = _number(scaling, "original_max_position_embeddings", max_position_embeddings)
    factor = _number(scaling, "factor", max_position_embeddings / length if max_position_embeddings else None)
    dim = 2 * len(plain)

    def dimension(turns: float) -> float:
        """The (fractional) pair that turns this often within the trained length."""
        return dim * math.log(length / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low = dimension(_number(scaling, "beta_fast", 32.0))
    high = dimension(_number(scaling, "beta_slow", 1.0))
    if scaling.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    width = (high - low) or 0.001
    kept = [1 - min(max((f - low) / width, 0.0), 1.0) for f in range(len(plain))]
    frequencies = [x / factor * (1 - keep) + x * keep for x, keep in zip(plain, kept, strict=True)]

    def mscale(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    if scaling.get("attention_factor") is not None:
        return frequencies, _number(scaling, "attention_factor")
    if scaling.get("mscale") and scaling.get("mscale_all_dim"):
        return frequencies, mscale(_number(scaling, "mscale")) / mscale(_number(scaling, "mscale_all_dim"))
    return frequencies, mscale(1.0)


@dataclass(frozen=True, slots=True)
class Positions:
    """The average of R'MR over distances, for a rotation R and any d x d matrix M.

    M acts on pairs as z -> P z + S conj(z), P its complex-linear and S its antilinear part. Turning
    both sides multiplies P[f, f'] by exp(-i (t_f - t_f')) and S[f, f'] by exp(-i (t_f + t_f')), t the
    angles, so the average is two element-wise products.

    Attributes:
        linear, antilinear: averages of these factors, complex128, shape (D / 2, D / 2), or one for every
            source head, (n, D / 2, D / 2): heads look at distances of their own.
        num_rotary_pairs: pairs that turn; they come first.
    """

    linear: Tensor
    antilinear: Tensor
    num_rotary_pairs: int

    def of(self, heads: Sequence[int]) -> Positions:
        """Those of some source heads."""
        if self.linear.dim() == 2:
            return self
        index = list(heads)
        return Positions(self.linear[index], self.antilinear[index], self.num_rotary_pairs)

    def mixed(self, other: Positions, share: float) -> Positions:
        """With a share of other distances, the same for every head."""
        linear, antilinear = (
            (1 - share) * mine + share * its
            for mine, its in ((self.linear, other.linear), (self.antilinear, other.antilinear))
        )
        return Positions(linear, antilinear, self.num_rotary_pairs)

    def averaged(self, matrices: Tensor) -> Tensor:
        """sum_t w_t R_t' M R_t for canonical matrices, shape (..., D, D): what keys at a distance see."""
        return self._apply(matrices, self.linear, self.antilinear)

    def averaged_back(self, matrices: Tensor) -> Tensor:
        """sum_t w_t R_t M R_t', the adjoint of `averaged`: what queries see."""
        return self._apply(matrices, self.linear.conj(), self.antilinear.conj())

    def _apply(self, matrices: Tensor, linear: Tensor, antilinear: Tensor) -> Tensor:
        if self.num_rotary_pairs == 0:
            return matrices
        p, s = complex_parts(matrices)
        return real_matrices(p * linear, s * antilinear)


def complex_parts(matrices: Tensor) -> tuple[Tensor, Tensor]:
    """Split canonical (..., D, D) matrices into complex-linear and antilinear (..., D/2, D/2) parts."""
    half = matrices.shape[-1] // 2
    rr, ri = matrices[..., :half, :half], matrices[..., :half, half:]
    ir, ii = matrices[..., half:, :half], matrices[..., half:, half:]
    return torch.complex(rr + ii, ir - ri) / 2, torch.complex(rr - ii, ir + ri) / 2


def real_matrices(linear: Tensor, antilinear: Tensor) -> Tensor:
    """The inverse of `complex_parts`."""
    top = torch.cat([(linear + antilinear).real, (antilinear - linear).imag], dim=-1)
    bottom = torch.cat([(linear + antilinear).imag, (linear - antilinear).real], dim=-1)
    return torch.cat([top, bottom], dim=-2)


def without_positions(head_dim: int) -> Positions:
    """No rotation at all: values, and queries and keys without RoPE."""
    ones = torch.ones(head_dim // 2, head_dim // 2, dtype=torch.complex128)
    return Positions(ones, ones, 0)


def averaged_phases(rope: RopeSpec) -> Positions:
    """Every rotated pair's angle uniform and independent: needs the pairing alone."""
    pairs, rotary = rope.head_dim // 2, rope.num_rotary_pairs
    linear = torch.eye(pairs, dtype=torch.complex128)
    antilinear = torch.zeros_like(linear)
    linear[rotary:, rotary:] = 1
    antilinear[rotary:, rotary:] = 1
    return Positions(linear, antilinear, rotary)


def at_distances(rope: RopeSpec, mass: Tensor) -> Positions:
    """The query sits `t` positions behind the key with weight mass[t].

    Args:
        rope: with frequencies.
        mass: nonnegative, shape (distances,) or (n, distances), by head; normalised here.
    """
    assert rope.frequencies is not None, rope.unknown
    frequencies = torch.zeros(rope.head_dim // 2, dtype=torch.float64)
    frequencies[: rope.num_rotary_pairs] = torch.tensor(rope.frequencies, dtype=torch.float64)
    share = mass.double() / mass.double().sum(-1, keepdim=True)
    pairs = len(frequencies)
    linear = torch.zeros(*share.shape[:-1], pairs, pairs, dtype=torch.complex128)
    antilinear = torch.zeros_like(linear)
    for start in range(0, share.shape[-1], DISTANCE_BLOCK):
        part = share[..., start : start + DISTANCE_BLOCK]
        distances = torch.arange(start, start + part.shape[-1], dtype=torch.float64)
        angles = -distances[:, None] * frequencies
        turns = torch.polar(torch.ones_like(angles), angles)
        weighted = (turns * part[..., None]).mT
        linear += weighted @ turns.conj()
        antilinear += weighted @ turns
    return Positions(linear, antilinear, rope.num_rotary_pairs)


def distance_prior(max_distance: int) -> Tensor:
    """Attention mass by distance where none was measured: 1 / (1 + t) for t < max_distance, float64."""
    return 1 / (1 + torch.arange(max_distance, dtype=torch.float64))
