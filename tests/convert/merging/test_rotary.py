from __future__ import annotations

from typing import Any

import pytest
import torch

from eagle3pack.convert.merging import rotary
from eagle3pack.convert.merging.rotary import (
    at_distances,
    averaged_phases,
    complex_parts,
    distance_prior,
    real_matrices,
    rope_spec,
    without_positions,
)
from eagle3pack.draft.rope import RopeConfig
from eagle3pack.errors import InputError, UnsupportedDraftError
from tests.convert.merging.planted import D, rope

SCALINGS: list[tuple[str, dict[str, Any], float]] = [
    ("default", {}, 1.0),
    ("default", {}, 0.5),
    ("linear", {"factor": 4.0}, 1.0),
    ("dynamic", {"factor": 2.0}, 1.0),
    ("proportional", {}, 0.25),
    (
        "llama3",
        {
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 1024,
        },
        1.0,
    ),
    ("yarn", {"factor": 4.0, "original_max_position_embeddings": 512}, 1.0),
    ("yarn", {"factor": 4.0, "original_max_position_embeddings": 512, "truncate": False}, 0.5),
    (
        "yarn",
        {"factor": 40.0, "original_max_position_embeddings": 512, "mscale": 1.0, "mscale_all_dim": 0.7},
        1.0,
    ),
    (
        "yarn",
        {
            "factor": 4.0,
            "original_max_position_embeddings": 512,
            "attention_factor": 1.3,
            "beta_fast": 20.0,
            "beta_slow": 2.0,
        },
        1.0,
    ),
]


@pytest.mark.parametrize(("kind", "scaling", "partial"), SCALINGS, ids=str)
def test_frequencies_are_those_of_transformers(kind: str, scaling: dict[str, Any], partial: float) -> None:
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    spec = rope_spec(RopeConfig(5e4, kind, scaling, partial), 64, 2048)
    parameters = {"rope_type": kind, "rope_theta": 5e4, "partial_rotary_factor": partial, **scaling}
    if kind == "default":
        dim = int(64 * partial)
        expected, factor = 5e4 ** -(torch.arange(0, dim, 2) / dim), 1.0
    else:
        config = LlamaConfig(
            head_dim=64, hidden_size=256, max_position_embeddings=2048, rope_parameters=parameters
        )
        expected, factor = ROPE_INIT_FUNCTIONS[kind](config, "cpu")
    assert spec.frequencies == pytest.approx(expected.tolist(), rel=2e-5)
    assert spec.attention_scale == pytest.approx(factor)


def test_an_unknown_scaling_has_no_frequencies_and_says_why() -> None:
    spec = rope_spec(RopeConfig(1e4, "longrope", {"short_factor": [1.0]}), 8)
    assert spec.frequencies is None
    assert "longrope" in spec.unknown


def test_dimensions_that_do_not_pair_and_parameters_that_are_no_numbers_are_refused() -> None:
    with pytest.raises(UnsupportedDraftError, match="pairs"):
        rope_spec(RopeConfig(partial_rotary_factor=0.4), 8)
    with pytest.raises(UnsupportedDraftError, match="pairs"):
        rope_spec(RopeConfig(), 7)
    for kind, scaling in (("linear", {}), ("llama3", {"factor": 8}), ("yarn", {"factor": "x"})):
        with pytest.raises(InputError, match="positive number"):
            rope_spec(RopeConfig(1e4, kind, scaling), 8)


def rotation(angles: torch.Tensor) -> torch.Tensor:
    """R in canonical order."""
    half = len(angles)
    matrix = torch.zeros(2 * half, 2 * half, dtype=torch.float64)
    index = torch.arange(half)
    matrix[index, index] = matrix[index + half, index + half] = angles.cos()
    matrix[index, index + half], matrix[index + half, index] = -angles.sin(), angles.sin()
    return matrix


@pytest.mark.parametrize(("rotary_dim", "block"), [(D, 32768), (4, 32768), (D, 7)])
def test_averages_over_distances_are_two_elementwise_products(
    rotary_dim: int, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rotary, "DISTANCE_BLOCK", block)
    spec, mass = rope(rotary_dim=rotary_dim), torch.rand(20, dtype=torch.float64)
    frequencies = torch.zeros(D // 2, dtype=torch.float64)
    frequencies[: rotary_dim // 2] = torch.tensor(spec.frequencies, dtype=torch.float64)
    matrix = torch.randn(D, D, dtype=torch.float64)
    turns = [rotation(t * frequencies) for t in range(20)]
    share = mass / mass.sum()
    positions = at_distances(spec, mass)
    expected = sum(w * r.T @ matrix @ r for w, r in zip(share, turns, strict=True))
    torch.testing.assert_close(positions.averaged(matrix), expected)
    expected = sum(w * r @ matrix @ r.T for w, r in zip(share, turns, strict=True))
    torch.testing.assert_close(positions.averaged_back(matrix), expected)


def test_memory_does_not_grow_with_the_distances(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rotary, "DISTANCE_BLOCK", 64)
    polar, seen = torch.polar, []
    monkeypatch.setattr(torch, "polar", lambda size, angles: seen.append(len(size)) or polar(size, angles))
    at_distances(rope(), distance_prior(1000))
    assert max(seen) == 64 and sum(seen) == 1000


@pytest.mark.parametrize("rotary_dim", [D, 4])
def test_averaged_phases_are_the_limit_of_independent_uniform_angles(rotary_dim: int) -> None:
    matrix, steps = torch.randn(D, D, dtype=torch.float64), 3
    positions = averaged_phases(rope(rotary_dim=rotary_dim))
    grid = torch.cartesian_prod(*[torch.arange(steps) * 2 * torch.pi / steps] * (rotary_dim // 2)).double()
    total = torch.zeros(D, D, dtype=torch.float64)
    for angles in grid:  # three equidistant angles average a quadratic form in cos and sin exactly
        full = torch.zeros(D // 2, dtype=torch.float64)
        full[: rotary_dim // 2] = angles
        r = rotation(full)
        total += r.T @ matrix @ r / len(grid)
    torch.testing.assert_close(positions.averaged(matrix), total)


def test_without_positions_nothing_turns_and_parts_add_up() -> None:
    matrix = torch.randn(3, D, D, dtype=torch.float64)
    assert torch.equal(without_positions(D).averaged(matrix), matrix)
    torch.testing.assert_close(real_matrices(*complex_parts(matrix)), matrix)


def test_the_prior_falls_with_distance() -> None:
    assert distance_prior(4).tolist() == pytest.approx([1, 1 / 2, 1 / 3, 1 / 4])
