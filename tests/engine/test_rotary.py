"""Rotary tables against transformers' own, and the rules where vLLM differs from it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from eagle3pack.draft.fields import Fields
from eagle3pack.draft.rope import RopeConfig, parse_rope
from eagle3pack.engine.rotary import rotary_table, rotate
from eagle3pack.errors import InputError, UnsupportedDraftError

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 256,
}
YARN = {"rope_type": "yarn", "factor": 16.0, "original_max_position_embeddings": 256}


@pytest.mark.parametrize(
    "scaling",
    [
        {"rope_type": "default"},
        {"rope_type": "linear", "factor": 4.0},
        LLAMA3,
        YARN,
        YARN | {"attention_factor": 1.5, "beta_fast": 20, "beta_slow": 2},
        YARN | {"mscale": 0.7, "mscale_all_dim": 1.2},
        YARN | {"truncate": False},
        {"rope_type": "default", "partial_rotary_factor": 0.5},
    ],
    ids=str,
)
def test_tables_equal_those_of_transformers(scaling: dict[str, Any]) -> None:
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    theta, both = 5000.0, {"rope_theta": 5000.0, **scaling}
    config = LlamaConfig(
        hidden_size=128,
        num_attention_heads=2,
        head_dim=64,
        max_position_embeddings=4096,
        **({"rope_parameters": dict(both)} if _is_version_5() else _old_spelling(theta, scaling)),
    )
    theirs = LlamaRotaryEmbedding(config)
    rope = parse_rope(Fields({"rope_parameters": both}, "config.json"))

    ours = rotary_table(rope, 64, 4096, where="config.json")

    if "partial_rotary_factor" not in scaling:  # Llama itself ignores the factor; vLLM does not
        torch.testing.assert_close(ours.frequencies, theirs.inv_freq)
        assert ours.magnitude == pytest.approx(theirs.attention_scaling)
    else:
        assert ours.frequencies.shape == (16,)
        torch.testing.assert_close(ours.frequencies, 1 / 5000.0 ** (torch.arange(0, 32, 2) / 32))


def _is_version_5() -> bool:
    import transformers

    return int(transformers.__version__.split(".")[0]) >= 5


def _old_spelling(theta: float, scaling: dict[str, Any]) -> dict[str, Any]:
    rule = None if scaling["rope_type"] == "default" else dict(scaling)
    return {"rope_theta": theta, "rope_scaling": rule}


def test_dynamic_scaling_is_fixed_for_the_longest_position() -> None:
    plain = rotary_table(RopeConfig(theta=1e4), 64, 512, where="")
    rope = RopeConfig(theta=1e4, rope_type="dynamic", scaling={"factor": 2.0})

    # vLLM 0.32 takes the served length for the trained one, unless the config names that
    torch.testing.assert_close(rotary_table(rope, 64, 512, where="").frequencies, plain.frequencies)
    trained = RopeConfig(
        theta=1e4, rope_type="dynamic", scaling={"factor": 2.0, "max_trained_positions": 128}
    )
    theta = 1e4 * (2.0 * 512 / 128 - 1) ** (64 / 62)
    torch.testing.assert_close(
        rotary_table(trained, 64, 512, where="").frequencies, 1 / theta ** (torch.arange(0, 64, 2) / 64)
    )
    alpha = RopeConfig(theta=1e4, rope_type="dynamic", scaling={"alpha": 3.0})
    theta = 1e4 * 3.0 ** (64 / 62)
    torch.testing.assert_close(
        rotary_table(alpha, 64, 512, where="").frequencies, 1 / theta ** (torch.arange(0, 64, 2) / 64)
    )


def test_a_silent_theta_is_ten_thousand() -> None:
    assert torch.equal(
        rotary_table(RopeConfig(), 64, 0, where="").frequencies,
        rotary_table(RopeConfig(theta=1e4), 64, 0, where="").frequencies,
    )


@given(st.integers(0, 5000), st.integers(0, 5000), st.integers(0, 3000))
@settings(deadline=None, max_examples=25)
def test_products_depend_on_the_distance_alone(m: int, n: int, shift: int) -> None:
    table = rotary_table(RopeConfig(theta=1e4, partial_rotary_factor=0.5), 16, 0, where="")
    generator = torch.Generator().manual_seed(m * 7 + n)
    q, k = torch.randn((2, 16), generator=generator, dtype=torch.float64)

    def product(at_q: int, at_k: int) -> float:
        cos, sin = table.cos_sin(torch.tensor([at_q, at_k]), torch.float64)
        return float(rotate(q, cos[0], sin[0]) @ rotate(k, cos[1], sin[1]))

    assert product(m, n) == pytest.approx(product(m + shift, n + shift), abs=2e-2)  # float32 angles
    assert product(m, m) == pytest.approx(float(q @ k), abs=1e-5)


@pytest.mark.parametrize("rope_type", ["longrope", "proportional", "bogus"])
def test_other_scalings_are_refused(rope_type: str) -> None:
    with pytest.raises(UnsupportedDraftError, match=rope_type):
        rotary_table(RopeConfig(rope_type=rope_type), 64, 512, where="config.json")


@pytest.mark.parametrize("scaling", [{}, {"factor": "4"}, {"factor": True}])
def test_a_missing_parameter_is_named(scaling: dict[str, Any]) -> None:
    with pytest.raises(InputError, match="'linear' needs a number factor"):
        rotary_table(RopeConfig(rope_type="linear", scaling=scaling), 64, 512, where="config.json")
