"""What speculative decoding counts, and the rates that follow, with vLLM's definitions.

vLLM 0.32 (v1/spec_decode/metrics.py): one draft is one verification step of one request; every
token the target then looked at is a draft token; an accepted token is one that the target kept.
The token that the target adds itself after them is in no counter but `output_tokens`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Counters:
    """Raw counts of one or more requests.

    Attributes:
        drafts: verification steps that had draft tokens to look at.
        draft_tokens: tokens that the draft proposed in them.
        accepted_tokens: of those, the ones that the target kept.
        accepted_per_position: the same by position in the draft; never increasing.
        output_tokens: tokens that the request returned.
    """

    drafts: int
    draft_tokens: int
    accepted_tokens: int
    accepted_per_position: tuple[int, ...]
    output_tokens: int


def total(counters: Iterable[Counters]) -> Counters:
    """The sum; positions that one of them lacks count as zero."""
    parts = list(counters)
    positions = max((len(part.accepted_per_position) for part in parts), default=0)
    return Counters(
        drafts=sum(part.drafts for part in parts),
        draft_tokens=sum(part.draft_tokens for part in parts),
        accepted_tokens=sum(part.accepted_tokens for part in parts),
        accepted_per_position=tuple(
            sum(part.accepted_per_position[i] for part in parts if i < len(part.accepted_per_position))
            for i in range(positions)
        ),
        output_tokens=sum(part.output_tokens for part in parts),
    )


def mean_accepted_length(counters: Counters) -> float | None:
    """Tokens a verification step yields, 1 + accepted / drafts; None where nothing was drafted."""
    return 1 + counters.accepted_tokens / counters.drafts if counters.drafts else None


def draft_accept_rate(counters: Counters) -> float | None:
    """Accepted tokens over draft tokens, a fraction; None where nothing was drafted."""
    return counters.accepted_tokens / counters.draft_tokens if counters.draft_tokens else None


def per_position_accept_rate(counters: Counters) -> tuple[float, ...] | None:
    """Accepted at position i over drafts, unconditional; None where nothing was drafted."""
    if not counters.drafts:
        return None
    return tuple(accepted / counters.drafts for accepted in counters.accepted_per_position)


def retention(ours: Counters, theirs: Counters) -> float | None:
    """Accepted tokens a draft over the other's; None where the other accepts nothing or drafts nothing."""
    if not (ours.drafts and theirs.drafts and theirs.accepted_tokens):
        return None
    return (ours.accepted_tokens / ours.drafts) / (theirs.accepted_tokens / theirs.drafts)
