from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from eagle3pack.convert.merging.attention import attention_forward, from_matrices, to_matrices
from eagle3pack.convert.merging.rotary import RopeSpec
from eagle3pack.errors import InputError
from tests.convert.merging.planted import (
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
seeds = st.integers(0, 2**31)


def naive_forward(weights, spec: RopeSpec, x):  # type: ignore[no-untyped-def]
    """One query, one head, one pair at a time."""
    outputs = torch.zeros(len(x), len(weights.o), dtype=torch.float64)
    for h in range(weights.num_heads):
        g = h // (weights.num_heads // weights.num_key_value_heads)
        q, k, v = x @ weights.q[h].T, x @ weights.k[g].T, x @ weights.v[g].T
        for heads, bias, index in ((q, weights.q_bias, h), (k, weights.k_bias, g), (v, weights.v_bias, g)):
            if bias is not None:
                heads += bias[index]
        for m in range(len(x)):
            logits = []
            for n in range(m + 1):
                logit = float(q[m, spec.rotary_dim :] @ k[n, spec.rotary_dim :])
                for f, frequency in enumerate(spec.frequencies or ()):
                    a, b = (f, f + spec.rotary_dim // 2) if spec.pairing == "half" else (2 * f, 2 * f + 1)
                    query, key = complex(q[m, a], q[m, b]), complex(k[n, a], k[n, b])
                    turn = complex(math.cos((n - m) * frequency), math.sin((n - m) * frequency))
                    logit += (query.conjugate() * key * turn).real
                logits.append(logit / D**0.5)
            attention = torch.tensor(logits, dtype=torch.float64).softmax(0)
            outputs[m] += weights.o[:, h] @ (attention @ v[: m + 1])
    return outputs


@pytest.mark.parametrize("spec", SPECS, ids=str)
@pytest.mark.parametrize("num_kv", [1, 2, 4])
def test_the_forward_pass_is_rotary_causal_grouped_query_attention(spec, num_kv):  # type: ignore[no-untyped-def]
    weights, x = layer(1, num_kv=num_kv, biases=True), inputs(2, 6)
    assert relative_error(attention_forward(weights, spec, x), naive_forward(weights, spec, x)) < 1e-12


@settings(deadline=None, max_examples=20)
@given(seed=seeds, spec=st.sampled_from(SPECS), biases=st.booleans())
def test_gauges_and_permutations_change_nothing(seed: int, spec: RopeSpec, biases: bool) -> None:
    gqa, x = layer(seed, num_kv=2, biases=biases), inputs(seed + 1)
    expected = attention_forward(gqa, spec, x)
    mha = expanded(gqa)
    assert relative_error(attention_forward(mha, spec, x), expected) < 1e-12
    hidden = disguised(mha, spec, seed + 2)
    assert relative_error(attention_forward(hidden, spec, x), expected) < 1e-9
    order = torch.randperm(4, generator=torch.Generator().manual_seed(seed))
    assert relative_error(attention_forward(permuted(hidden, order), spec, x), expected) < 1e-9


def test_interleaved_rows_are_half_split_rows_in_another_order() -> None:
    weights, x = layer(3), inputs(4)
    order = rope("interleaved").canonical_order()
    turned = replace(weights, q=weights.q[:, order], k=weights.k[:, order])
    half = attention_forward(turned, rope(), x)
    assert relative_error(half, attention_forward(weights, rope("interleaved"), x)) < 1e-12


def test_norms_on_queries_and_keys_let_pairs_turn_only_where_their_weights_agree() -> None:
    x, spec = inputs(6), rope()
    free = torch.rand(D, dtype=torch.float64) + 0.5
    for norm, exact in ((free.reshape(2, -1)[0].repeat(2), True), (free, False)):
        plain = replace(layer(5), q_norm=norm, k_norm=norm)
        turned = disguised(plain, spec, 7, scales=False)
        error = relative_error(attention_forward(turned, spec, x), attention_forward(plain, spec, x))
        assert (error < 1e-5) is exact  # eps under the root is all that is left
    scaled = disguised(replace(layer(5), q_norm=norm * 0 + 1), spec, 7)
    assert (
        relative_error(
            attention_forward(scaled, spec, x),
            attention_forward(replace(layer(5), q_norm=norm * 0 + 1), spec, x),
        )
        > 1e-2
    )


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("biases", [False, True])
def test_matrices_come_back_as_they_were_stored(fused: bool, biases: bool) -> None:
    weights = replace(
        layer(8, num_kv=2, biases=biases),
        o_bias=torch.ones(12, dtype=torch.float64),
        q_norm=torch.ones(D, dtype=torch.float64),
    )
    stored = to_matrices(weights, fused=fused)
    assert ("qkv_proj.weight" in stored) is fused
    back = to_matrices(from_matrices(stored, D), fused=fused)
    assert stored.keys() == back.keys()
    assert all(torch.equal(stored[name], back[name]) for name in stored)


def test_a_layer_that_does_not_fit_is_refused_by_name() -> None:
    stored = to_matrices(layer(9, num_kv=2))
    cases = {
        "k_proj.weight": stored["k_proj.weight"][:-1],
        "v_proj.weight": stored["v_proj.weight"][:D],
        "o_proj.weight": stored["o_proj.weight"][:, :-1],
        "q_proj.weight": stored["q_proj.weight"] * torch.nan,
    }
    for name, broken in cases.items():
        with pytest.raises(InputError, match="proj"):
            from_matrices({**stored, name: broken}, D)
        with pytest.raises(InputError, match=name.replace(".", "\\.")):
            from_matrices({key: tensor for key, tensor in stored.items() if key != name}, D)
    fused = to_matrices(layer(9, num_kv=2), fused=True)
    with pytest.raises(InputError, match="do not split"):
        from_matrices({**fused, "qkv_proj.weight": fused["qkv_proj.weight"][:-1]}, D)
    with pytest.raises(InputError, match="over 3"):
        from_matrices(
            {**stored, "k_proj.weight": torch.ones(3 * D, 24), "v_proj.weight": torch.ones(3 * D, 24)}, D
        )
