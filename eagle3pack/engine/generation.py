"""What a run of the engine is told, and what it gives back."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from eagle3pack.engine.counters import Counters


@dataclass(frozen=True, slots=True)
class Settings:
    """How to generate.

    Attributes:
        max_tokens: tokens a request returns at most.
        num_speculative_tokens: k; without a draft it is not used.
        batch_size: requests in flight at once.
        temperature: 0 is greedy; above it, tokens are drawn from the target's own distribution.
        top_p: of the nucleus that draws come from.
        seed: of the draws.
        stop_ids: tokens that end an answer beside the target's own.
        ignore_stop_ids: generate max_tokens whatever comes.
    """

    max_tokens: int = 128
    num_speculative_tokens: int = 3
    batch_size: int = 16
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0
    stop_ids: frozenset[int] = frozenset()
    ignore_stop_ids: bool = False


@dataclass(frozen=True, slots=True)
class Generation:
    """What a run made, and what it took.

    Attributes:
        outputs: token ids of each prompt's answer, the stop token included where there was one.
        counters: of each prompt.
        seconds: wall time of everything.
        target_seconds: of that, inside the target's forwards.
        draft_seconds: of that, inside the draft's.
    """

    outputs: tuple[tuple[int, ...], ...]
    counters: tuple[Counters, ...]
    seconds: float
    target_seconds: float
    draft_seconds: float

    @property
    def overhead(self) -> float:
        """Share of the wall time that was spent outside the forwards."""
        return 1 - (self.target_seconds + self.draft_seconds) / self.seconds if self.seconds else 0.0


@dataclass(frozen=True, slots=True)
class DraftPass:
    """One pass of the draft, for whoever wants its activations (calibration).

    An entry at position p pairs the state after token p with token p + 1. Entries of step 0 see all
    entries of step 0 before them; entries of step s see those up to position p - s, and the entries of
    steps 1 to s - 1 of the same round in between.

    Attributes:
        step: 0 for true states of the target, s for the s-th fed-back hidden state.
        requests: index of each row's prompt.
        token_ids: (rows, width).
        positions: (rows, width).
        hidden: what the first layer read beside the embeddings, (rows, width, H).
        widths: how many entries of each row are real; the rest are rejected tokens.
    """

    step: int
    requests: tuple[int, ...]
    token_ids: Tensor
    positions: Tensor
    hidden: Tensor
    widths: tuple[int, ...]
