"""Drawing tokens."""

from __future__ import annotations

import torch

from eagle3pack.engine.sampling import pick

CHANCES = torch.tensor([0.1, 0.6, 0.05, 0.25])


def drawn(temperature: float, top_p: float) -> dict[int, float]:
    logits = (CHANCES.log() * temperature).expand(50, 100, 4)
    tokens = pick(logits, temperature, top_p, torch.Generator().manual_seed(0))
    assert tokens.shape == (50, 100)
    return {token: float((tokens == token).float().mean()) for token in range(4)}


def test_zero_temperature_takes_the_likeliest() -> None:
    assert pick(CHANCES.log(), 0.0, 1.0, torch.Generator()).item() == 1


def test_draws_follow_the_softmax() -> None:
    shares = drawn(0.7, 1.0)

    assert all(abs(shares[token] - float(CHANCES[token])) < 0.03 for token in range(4))


def test_the_nucleus_is_the_smallest_set_that_holds_top_p() -> None:
    assert set(drawn(1.0, 0.7)) - {token for token, share in drawn(1.0, 0.7).items() if share} == {0, 2}
    assert abs(drawn(1.0, 0.7)[1] - 0.6 / 0.85) < 0.03
    assert drawn(1.0, 0.01)[1] == 1
