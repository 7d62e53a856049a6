"""Speculation on answers that are known, with the target's states beside them: no target is needed.

The draft lives through what it would live through while the target wrote these texts: its own proposals
are fed back, compared with the text, and the next round starts behind the accepted ones. On a target's own
greedy text these are the very rounds of `speculate.generate`, pass for pass.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from eagle3pack.engine.draft_model import DraftModel
from eagle3pack.engine.generation import DraftPass, Generation, Settings
from eagle3pack.engine.speculate import Request, Run


@dataclass(frozen=True, slots=True)
class KnownAnswer:
    """An answer and the states in which the target was while it wrote it.

    Attributes:
        token_ids: of prompt and answer, int64, (T,).
        prompt_tokens: how many are the prompt; at least one, and at least one token is the answer.
        states: after each token, as `DraftModel.fuse` takes them, (T or T - 1, A * Ht): the last one is
            not needed.
    """

    token_ids: Tensor
    prompt_tokens: int
    states: Tensor

    def to(self, like: Tensor) -> KnownAnswer:
        """The same on the device of a draft's weight, states in its dtype."""
        return replace(
            self, token_ids=self.token_ids.to(like.device), states=self.states.to(like.device, like.dtype)
        )


def replay(
    draft: DraftModel,
    answers: Sequence[KnownAnswer],
    settings: Settings,
    *,
    on_tokens: Callable[[int], None] = lambda count: None,
    on_draft_pass: Callable[[DraftPass], None] | None = None,
) -> Generation:
    """Let a draft speculate on known answers.

    Args:
        draft: with embeddings and a head.
        answers: on the draft's device, states in its dtype.
        settings: batch size and speculative tokens; the answers end where they end.
        on_tokens, on_draft_pass: as `speculate.generate`.
    """
    run = _Replay(draft, answers, settings, on_tokens, on_draft_pass)
    return run.answer(
        (answer.token_ids[: answer.prompt_tokens].tolist(), len(answer.token_ids) - answer.prompt_tokens)
        for answer in answers
    )


class _Replay(Run):
    """A run whose target is the text itself."""

    def __init__(
        self,
        draft: DraftModel,
        answers: Sequence[KnownAnswer],
        settings: Settings,
        on_tokens: Callable[[int], None],
        on_draft_pass: Callable[[DraftPass], None] | None,
    ) -> None:
        like = draft.norm.weight
        super().__init__(
            like.device,
            like.dtype,
            frozenset(),
            draft,
            settings,
            min(settings.batch_size, len(answers)),
            lambda index, output, counters: None,
            on_tokens,
            on_draft_pass,
        )
        self._answers = answers
        self._vocab_size = draft.config.vocab_size

    def read(
        self,
        tokens: Tensor,
        first_row: int,
        starts: Sequence[int],
        requests: Sequence[Request],
        kept: slice = slice(None),
    ) -> tuple[Tensor, Tensor]:
        """See `Run.read`; behind the text's end stands another token than the proposed one."""
        width = tokens.shape[1]
        following = (tokens.roll(-1, dims=1) + 1) % self._vocab_size
        states = []
        for row, (start, request) in enumerate(zip(starts, requests, strict=True)):
            answer = self._answers[request.index]
            found = answer.token_ids[start + 1 : start + 1 + width]
            following[row, : len(found)] = found
            at = torch.arange(start, start + width, device=tokens.device)
            states.append(answer.states[at.clamp_max(len(answer.states) - 1)])
        return following[:, kept], torch.stack(states)
