"""Rotary position embedding as vLLM computes it for a draft (half-split pairs, "neox" style).

Sources: Su et al. 2021, arXiv:2104.09864; YaRN, Peng et al. 2023, arXiv:2309.00071; the llama3 rule of
Meta's Llama 3.1; vLLM 0.32 model_executor/layers/rotary_embedding. M-RoPE (`mrope_section`) gives every
text token one position on all its axes, so it is plain RoPE here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from eagle3pack.draft.rope import RopeConfig
from eagle3pack.errors import InputError, UnsupportedDraftError

DEFAULT_THETA = 10000.0  # what engines take where the config is silent


@dataclass(frozen=True, slots=True)
class RotaryTable:
    """Angles a position, and what scales the rotated vectors.

    Attributes:
        frequencies: radians a position for each pair, float32, shape (rotary_dim / 2,).
        magnitude: factor on cos and sin; 1 except for YaRN.
    """

    frequencies: Tensor
    magnitude: float = 1.0

    def cos_sin(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Cosines and sines of shape (*positions.shape, rotary_dim), computed in float32."""
        angles = positions[..., None].float() * self.frequencies
        angles = torch.cat((angles, angles), dim=-1)
        return (angles.cos() * self.magnitude).to(dtype), (angles.sin() * self.magnitude).to(dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the first dimensions of each head; those beyond the table pass through.

    Args:
        x: (..., head_dim).
        cos: (..., rotary_dim), broadcast over heads.
        sin: as `cos`.
    """
    size = cos.shape[-1]
    rotated, rest = x[..., :size], x[..., size:]
    first, second = rotated.chunk(2, dim=-1)
    rotated = rotated * cos + torch.cat((-second, first), dim=-1) * sin
    return torch.cat((rotated, rest), dim=-1) if rest.shape[-1] else rotated


def rotary_table(rope: RopeConfig, head_dim: int, max_position: int, *, where: str) -> RotaryTable:
    """The table of a rope config.

    Args:
        rope: the settings of the config.
        head_dim: D.
        max_position: positions the model is served for; only "dynamic" scaling and a YaRN without its
            own original length look at it.
        where: the config, for messages.

    Raises:
        UnsupportedDraftError: a scaling that this engine does not compute.
        InputError: the scaling lacks a parameter.
    """
    theta = rope.theta if rope.theta is not None else DEFAULT_THETA
    size = int(head_dim * rope.partial_rotary_factor)
    exponents = torch.arange(0, size, 2, dtype=torch.float32) / size
    plain = 1.0 / theta**exponents
    scaling = _Parameters(rope.scaling, rope.rope_type, where)
    if rope.rope_type in ("default", "mrope"):
        return RotaryTable(plain)
    if rope.rope_type == "linear":
        return RotaryTable(plain / scaling.number("factor"))
    if rope.rope_type == "dynamic":
        return RotaryTable(1.0 / _dynamic_theta(theta, size, max_position, scaling) ** exponents)
    if rope.rope_type == "llama3":
        return RotaryTable(_llama3(plain, scaling))
    if rope.rope_type == "yarn":
        return _yarn(theta, plain, size, max_position, scaling)
    raise UnsupportedDraftError(
        f"rope_type {rope.rope_type!r} is not computed by the reference engine",
        where=where,
        hint="Run the smoke test with --engine vllm.",
    )


@dataclass(frozen=True, slots=True)
class _Parameters:
    """The parameters of one scaling rule."""

    values: Mapping[str, Any]
    rope_type: str
    where: str

    def number(self, key: str, default: float | None = None) -> float:
        value = self.values.get(key, default)
        if not isinstance(value, (int, float)) or isinstance(value, bool):
            raise InputError(f"rope scaling {self.rope_type!r} needs a number {key}", where=self.where)
        return float(value)


def _dynamic_theta(theta: float, size: int, max_position: int, scaling: _Parameters) -> float:
    """NTK-aware base; vLLM fixes it for the longest position instead of following the sequence."""
    power = size / (size - 2)
    if "alpha" in scaling.values:
        return float(theta * scaling.number("alpha") ** power)
    factor = scaling.number("factor")
    trained = scaling.number("max_trained_positions", max_position)
    return float(theta * (factor * max_position / trained - (factor - 1)) ** power)


def _llama3(plain: Tensor, scaling: _Parameters) -> Tensor:
    """Divide slow frequencies by the factor, keep fast ones, blend in between."""
    factor, low, high = (scaling.number(key) for key in ("factor", "low_freq_factor", "high_freq_factor"))
    turns = scaling.number("original_max_position_embeddings") * plain / (2 * math.pi)
    kept = ((turns - low) / (high - low)).clamp(0, 1) if high != low else (turns >= low).float()
    return (1 - kept) * plain / factor + kept * plain


def _yarn(theta: float, plain: Tensor, size: int, max_position: int, scaling: _Parameters) -> RotaryTable:
    """Interpolate slow frequencies, keep fast ones, and sharpen the attention by a constant."""
    factor = scaling.number("factor")
    original = scaling.number("original_max_position_embeddings", max_position)

    def dimension(turns: float) -> float:  # where a pair makes that many turns over the original length
        return size * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = dimension(scaling.number("beta_fast", 32)), dimension(scaling.number("beta_slow", 1))
    if scaling.values.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, size - 1)
    span = high - low if high != low else 0.001
    interpolated = ((torch.arange(size // 2, dtype=torch.float32) - low) / span).clamp(0, 1)
    frequencies = plain / factor * interpolated + plain * (1 - interpolated)
    return RotaryTable(frequencies, _yarn_magnitude(factor, scaling))


def _yarn_magnitude(factor: float, scaling: _Parameters) -> float:
    def by(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    if scaling.values.get("attention_factor") is not None:
        return scaling.number("attention_factor")
    if scaling.values.get("mscale") and scaling.values.get("mscale_all_dim"):
        return by(scaling.number("mscale")) / by(scaling.number("mscale_all_dim"))
    return by(1.0)
