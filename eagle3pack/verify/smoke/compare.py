"""Holding two measurements of the same prompts against each other."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from eagle3pack.engine.statistics import Interval, retention_interval
from eagle3pack.verify.smoke.measure import Measurement
from eagle3pack.verify.smoke.protocol import Completion


@dataclass(frozen=True, slots=True)
class Divergence:
    """Where two greedy answers part.

    Attributes:
        prompt: index of the question.
        turn: of the conversation.
        position: tokens (characters, where a server tells no tokens) that agree.
        ours: what follows with the draft.
        theirs: what follows without.
    """

    prompt: int
    turn: int
    position: int
    ours: str
    theirs: str


@dataclass(frozen=True, slots=True)
class Agreement:
    """How far greedy answers with and without a draft agree.

    Attributes:
        compared: turns that had the same history in both runs.
        identical: of them, those with the same answer.
        divergences: of the others, in order.
    """

    compared: int
    identical: int
    divergences: tuple[Divergence, ...]

    @property
    def share(self) -> float | None:
        """Identical over compared; None where nothing was."""
        return self.identical / self.compared if self.compared else None


def compare_answers(
    ours: Sequence[tuple[Completion, ...]], theirs: Sequence[tuple[Completion, ...]]
) -> Agreement:
    """Compare answers token by token, where tokens are told, else character by character.

    A turn after a divergence has another history and is not compared.
    """
    compared = identical = 0
    divergences = []
    for prompt, (mine, other) in enumerate(zip(ours, theirs, strict=True)):
        for turn, (with_draft, without) in enumerate(zip(mine, other, strict=True)):
            compared += 1
            divergence = _divergence(prompt, turn, with_draft, without)
            if divergence is not None:
                divergences.append(divergence)
                break
            identical += 1
    return Agreement(compared, identical, tuple(divergences))


def retention_between(ours: Measurement, theirs: Measurement) -> Interval | None:
    """The interval of the retention over what both measurements have as units."""
    return retention_interval(
        [unit.counters for unit in ours.units], [unit.counters for unit in theirs.units]
    )


def speedup(ours: Measurement, baseline: Measurement) -> float | None:
    """Output tokens a second with the draft over those without."""
    if not (ours.wall_s and baseline.wall_s and baseline.counters.output_tokens):
        return None
    return (ours.counters.output_tokens / ours.wall_s) / (baseline.counters.output_tokens / baseline.wall_s)


def _divergence(prompt: int, turn: int, ours: Completion, theirs: Completion) -> Divergence | None:
    by_token = ours.token_ids is not None and theirs.token_ids is not None
    mine: Sequence[object] = ours.token_ids or () if by_token else ours.text
    other: Sequence[object] = theirs.token_ids or () if by_token else theirs.text
    if mine == other:
        return None
    position = next(
        (i for i, (a, b) in enumerate(zip(mine, other, strict=False)) if a != b), min(len(mine), len(other))
    )
    same = "".join(
        a
        for a, b in itertools.takewhile(
            lambda pair: pair[0] == pair[1], zip(ours.text, theirs.text, strict=False)
        )
    )
    start = len(same)
    return Divergence(prompt, turn, position, ours.text[start : start + 40], theirs.text[start : start + 40])
