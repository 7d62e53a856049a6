"""One measurement: an engine answers a set of prompts, and its counters say what the draft was worth."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from eagle3pack.engine.counters import Counters, total
from eagle3pack.verify.smoke.metrics import difference
from eagle3pack.verify.smoke.protocol import (
    Completion,
    Conversation,
    Engine,
    EngineError,
    EngineFacts,
    Sampling,
)

WARM_UP_TOKENS = 8
_SETTLE_S = 0.1
_SETTLE_READS = 10


@dataclass(frozen=True, slots=True)
class Question:
    """A conversation of the prompt set.

    Attributes:
        category: or "" where the set has none.
        conversation: what is asked.
    """

    category: str
    conversation: Conversation


@dataclass(frozen=True, slots=True)
class Unit:
    """What the interval draws: the counters of one prompt, or of a group of them."""

    category: str
    counters: Counters


@dataclass(frozen=True, slots=True)
class Measurement:
    """What came out.

    Attributes:
        facts: of the engine.
        answers: for each question its completions, one a turn.
        counters: of all of them; drafts are 0 without a draft.
        wall_s: from the first request to the last answer, warm-up excluded.
        units: one a prompt where the engine counts requests, else one a category; empty without a draft.
        unit_name: what the units are, for people: "prompts" or "categories".
        notes: what the user should know of the counting.
    """

    facts: EngineFacts
    answers: tuple[tuple[Completion, ...], ...]
    counters: Counters
    wall_s: float
    units: tuple[Unit, ...]
    unit_name: str
    notes: tuple[str, ...] = ()

    @property
    def num_requests(self) -> int:
        """Completions, one for each turn."""
        return sum(map(len, self.answers))


def measure(
    engine: Engine,
    facts: EngineFacts,
    questions: Sequence[Question],
    sampling: Sampling,
    *,
    max_concurrency: int,
    on_answers: Callable[[int], None] = lambda count: None,
) -> Measurement:
    """Let an engine that was started answer the questions.

    Args:
        engine: started.
        facts: what `start` returned; without speculative tokens it is taken for a baseline.
        questions: at least one.
        sampling: for all of them.
        max_concurrency: conversations at once.
        on_answers: told how many more turns are answered; those of one batch together.

    Raises:
        EngineError: the engine fails, or does not speculate although it should.
    """

    def ask(part: Sequence[Question]) -> list[tuple[Completion, ...]]:
        return engine.generate(
            [question.conversation for question in part],
            sampling,
            max_concurrency=max_concurrency,
            on_answers=on_answers,
        )

    warm_up = _warm_up(engine, questions[0].conversation)
    if not facts.num_speculative_tokens:
        start = time.monotonic()
        answers = ask(questions)
        wall_s = time.monotonic() - start
        none = Counters(0, 0, 0, (), _output_tokens(answers))
        return Measurement(facts, tuple(answers), none, wall_s, (), "")

    before = _settled(engine)
    start = time.monotonic()
    if warm_up.counters is not None:
        answers = ask(questions)
        wall_s = time.monotonic() - start
        units = tuple(
            Unit(question.category, total(_counters_of(answer)))
            for question, answer in zip(questions, answers, strict=True)
        )
        counted = difference(_settled(engine), before)
        return _by_request(facts, answers, counted, wall_s, units)
    answers, units, wall_s = _by_category(engine, questions, before, ask)
    counters = total(unit.counters for unit in units)
    note = "this server does not count single requests: the interval is over categories, asked one by one"
    return Measurement(facts, tuple(answers), counters, wall_s, units, "categories", (note,))


def require_counters(engine: Engine) -> Counters:
    """The speculative counters of an engine that was given a draft.

    Raises:
        EngineError: there are none. A run that did not speculate must not pass for one that did.
    """
    counters = engine.read_counters()
    if counters is None:
        raise EngineError(
            "it has no speculative counters: speculation is off, so the draft was not run",
            where="vllm",
            hint="Start the server with --speculative-config, and without --disable-log-stats.",
        )
    return counters


def _warm_up(engine: Engine, conversation: Conversation) -> Completion:
    """One short answer before the clock runs: the first request of a server compiles and allocates."""
    first_turn = replace(conversation, turns=conversation.turns[:1])
    [[completion, *_]] = engine.generate([first_turn], Sampling(WARM_UP_TOKENS), max_concurrency=1)
    return completion


def _by_request(
    facts: EngineFacts,
    answers: list[tuple[Completion, ...]],
    counted: Counters,
    wall_s: float,
    units: tuple[Unit, ...],
) -> Measurement:
    """The server's own totals; the sum over our requests where others used the server meanwhile."""
    summed = total(unit.counters for unit in units)
    counted = replace(counted, output_tokens=_output_tokens(answers))
    if (counted.drafts, counted.accepted_tokens) == (summed.drafts, summed.accepted_tokens):
        return Measurement(facts, tuple(answers), counted, wall_s, units, "prompts")
    note = (
        f"the server counted {counted.drafts} drafts meanwhile, our requests {summed.drafts}: others use it, "
        "so the counters are those of our requests"
    )
    return Measurement(facts, tuple(answers), summed, wall_s, units, "prompts", (note,))


def _by_category(
    engine: Engine,
    questions: Sequence[Question],
    before: Counters,
    ask: Callable[[Sequence[Question]], list[tuple[Completion, ...]]],
) -> tuple[list[tuple[Completion, ...]], tuple[Unit, ...], float]:
    """Ask one category after another, reading the server's counters in between."""
    answers: dict[int, tuple[Completion, ...]] = {}
    units = []
    wall_s = 0.0
    for category in dict.fromkeys(question.category for question in questions):
        indices = [i for i, question in enumerate(questions) if question.category == category]
        start = time.monotonic()
        part = ask([questions[i] for i in indices])
        wall_s += time.monotonic() - start
        after = _settled(engine)
        units.append(Unit(category, replace(difference(after, before), output_tokens=_output_tokens(part))))
        before = after
        answers |= dict(zip(indices, part, strict=True))
    return [answers[i] for i in range(len(questions))], tuple(units), wall_s


def _settled(engine: Engine) -> Counters:
    """The counters once they stand still: a server answers a moment before it counts."""
    counters = require_counters(engine)
    for _ in range(_SETTLE_READS):
        time.sleep(_SETTLE_S)
        last, counters = counters, require_counters(engine)
        if counters == last:
            break
    return counters


def _counters_of(answer: tuple[Completion, ...]) -> list[Counters]:
    return [completion.counters for completion in answer if completion.counters is not None]


def _output_tokens(answers: Sequence[tuple[Completion, ...]]) -> int:
    return sum(completion.output_tokens for answer in answers for completion in answer)
