"""Choosing tokens from logits."""

from __future__ import annotations

import torch
from torch import Tensor


def pick(logits: Tensor, temperature: float, top_p: float, generator: torch.Generator) -> Tensor:
    """Choose a token at every position: the likeliest, or a draw.

    Args:
        logits: (..., V).
        temperature: 0 takes the likeliest.
        top_p: draws come from the smallest set of tokens that holds this much probability.
        generator: of the draws.

    Returns:
        Token ids, int64, (...).

    Source: nucleus sampling, Holtzman et al. 2020, arXiv:1904.09751.
    """
    if temperature == 0:
        return logits.argmax(dim=-1)
    chances = torch.softmax(logits.float() / temperature, dim=-1)
    if top_p < 1:
        sorted_chances, order = chances.sort(dim=-1, descending=True)
        before = (
            sorted_chances.cumsum(dim=-1) - sorted_chances
        )  # of the likelier tokens; the first is always in
        chances = torch.zeros_like(chances).scatter(-1, order, sorted_chances.masked_fill(before >= top_p, 0))
    drawn = torch.multinomial(chances.flatten(0, -2), 1, generator=generator)
    return drawn.view(logits.shape[:-1])
