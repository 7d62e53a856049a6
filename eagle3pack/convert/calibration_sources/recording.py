"""What all sources have in common: conversations are gone through, some at a time, until there is enough."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Protocol

from eagle3pack.convert.merging.capture import Recorder
from eagle3pack.engine.counters import Counters, total
from eagle3pack.engine.draft_model import DraftModel
from eagle3pack.engine.generation import Settings
from eagle3pack.engine.prompts import PromptSet
from eagle3pack.engine.replay import KnownAnswer, replay

NUM_SPECULATIVE_TOKENS = 3
BATCH_SIZE = 16
CONVERSATIONS = 32  # gone through between two looks at whether there is enough
FEWEST_ANSWERS = 20  # that a limit is spread over: a single long one tells of itself alone
FEWEST_TOKENS = 16  # of an answer
ENOUGH_INPUTS = 11  # a dimension: ten for the averages, and the held-out ones


class Source(Protocol):
    """Where texts come from.

    Attributes:
        draft: that is calibrated.
        answers: how many answers each conversation has.
    """

    draft: DraftModel
    answers: Sequence[int]

    def play(
        self,
        conversations: Sequence[int],
        numbers: Sequence[int],
        max_tokens: int,
        recorder: Recorder,
        on_tokens: Callable[[int], None],
    ) -> Sequence[Counters]:
        """Go through some conversations, and let the recorder hear the draft's passes.

        Args:
            conversations: by their place in `answers`.
            numbers: what the recorder calls them.
            max_tokens: of an answer.
            recorder: of the draft's passes.
            on_tokens: told of tokens of answers.

        Returns:
            What speculation did, answer by answer.
        """


@dataclass(frozen=True, slots=True)
class Opened:
    """A source that is ready, and what a calibration file says of it.

    Attributes:
        source: of texts.
        about: `target`, `prompts` and `source`, and `generation` but for `max_tokens`, as in the schema.
    """

    source: Source
    about: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Extent:
    """How much of a source is gone through.

    Attributes:
        order: of its conversations.
        max_tokens: of an answer.
        limit: tokens of answers in all; None for no limit.
        tokens: that it comes to at most.
    """

    order: tuple[int, ...]
    max_tokens: int
    limit: int | None
    tokens: int


def about_prompts(prompts: PromptSet) -> list[dict[str, Any]]:
    """What a calibration file says of a prompt file."""
    return [{"name": prompts.name, "sha256": prompts.sha256, "num_prompts": len(prompts.prompts)}]


def plan_extent(answers: Sequence[int], max_tokens: int, limit: int | None, most: int) -> Extent:
    """Decide in which order conversations are taken, and how long answers may be.

    Files are often sorted by kind: where not every conversation is needed, those come first that lie
    evenly over the whole.

    Args:
        answers: of each conversation.
        max_tokens: of an answer, where no limit asks for less.
        limit: tokens of answers in all.
        most: activations that can be used.
    """
    count, num_answers = len(answers), sum(answers)
    if limit is not None:
        max_tokens = min(max(limit // min(FEWEST_ANSWERS, num_answers), FEWEST_TOKENS), max_tokens)
    wanted = most if limit is None else limit  # a token of an answer is at least one activation
    needed = min(-(-wanted * count // (max_tokens * num_answers)), count)
    order = sorted(range(count), key=lambda i: (i * needed % count >= needed, i))
    tokens = num_answers * max_tokens
    return Extent(tuple(order), max_tokens, limit, tokens if limit is None else min(limit, tokens))


def record(
    source: Source, extent: Extent, most: int, on_tokens: Callable[[int], None]
) -> tuple[Recorder, Counters, int]:
    """Go through a source until its end, the limit, or all that averages and refits can use.

    Args:
        source: of texts.
        extent: how much of it.
        most: activations to keep.
        on_tokens: told of tokens of answers.

    Returns:
        What was recorded, what speculation did, and how many conversations were gone through.
    """
    recorder = Recorder(source.draft, len(extent.order), most)
    enough = ENOUGH_INPUTS * 2 * source.draft.config.hidden_size
    counters: list[Counters] = []
    start, room = 0, extent.limit
    while taken := _next(source.answers, extent, start, room):
        numbers = range(start, start + len(taken))
        made = source.play(taken, numbers, extent.max_tokens, recorder, on_tokens)
        counters += made
        start += len(taken)
        if room is not None:
            room -= total(made).output_tokens
        if recorder.is_full and sum(recorder.by_step) >= enough:
            break
    return recorder, total(counters), start


def _next(answers: Sequence[int], extent: Extent, start: int, room: int | None) -> tuple[int, ...]:
    """The conversations that come next; at first two at least, since one is held out."""
    coming = extent.order[start : start + CONVERSATIONS]
    if room is None:
        return coming
    ends = accumulate(answers[i] * extent.max_tokens for i in coming)
    fitting = sum(end <= room for end in ends)
    return coming[: max(fitting, 0 if start else 2)]


def replay_recorded(
    draft: DraftModel,
    answers: Sequence[KnownAnswer],
    numbers: Sequence[int],
    turn: int,
    recorder: Recorder,
    on_tokens: Callable[[int], None] = lambda count: None,
) -> Sequence[Counters]:
    """Speculate on known answers, and let the recorder hear it.

    Args:
        draft: that is calibrated.
        answers: at least one.
        numbers: of their conversations.
        turn: which answer of its conversation each is.
        recorder, on_tokens: as `Source.play`.
    """
    settings = Settings(num_speculative_tokens=NUM_SPECULATIVE_TOKENS, batch_size=BATCH_SIZE)
    recorder.start(turn, numbers, [[range(answer.prompt_tokens - 1, sys.maxsize)] for answer in answers])
    return replay(draft, answers, settings, on_tokens=on_tokens, on_draft_pass=recorder).counters
