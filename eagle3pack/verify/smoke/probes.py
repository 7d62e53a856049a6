"""Requests beside the average ones: each has made some engine or draft fail in public."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from eagle3pack.verify.smoke.metrics import difference
from eagle3pack.verify.smoke.protocol import (
    Completion,
    Conversation,
    Engine,
    EngineError,
    EngineFacts,
    Sampling,
)

Status = Literal["passed", "failed", "not_applicable", "not_run"]

LONGEST_PROBE_TOKENS = 32_768  # a longer prompt is not worth its time in a smoke test
_BEYOND = 16  # tokens past the draft's last position
_LONG_OUTPUT = 32
_SHORT_OUTPUT = 16


@dataclass(frozen=True, slots=True)
class Probe:
    """How one probe went.

    Attributes:
        name: its name in reports.
        status: not_applicable where it says nothing of this draft, not_run after an engine failed.
        message: what happened.
    """

    name: str
    status: Status
    message: str


@dataclass(frozen=True, slots=True)
class _Subject:
    """What the probes look at."""

    engine: Engine
    facts: EngineFacts
    conversation: Conversation  # one turn
    answer: Completion  # to a turn like it
    max_position_embeddings: int | None
    max_concurrency: int

    def ask(self, sampling: Sampling, conversation: Conversation | None = None) -> Completion:
        [[completion, *_]] = self.engine.generate(
            [conversation or self.conversation], sampling, max_concurrency=1
        )
        return completion


def run_probes(
    engine: Engine,
    facts: EngineFacts,
    conversation: Conversation,
    answer: Completion,
    *,
    max_position_embeddings: int | None,
    max_concurrency: int,
) -> tuple[Probe, ...]:
    """Run every probe on an engine that was started.

    Args:
        engine: with the draft.
        facts: what its `start` returned.
        conversation: some question; its first turn is used.
        answer: the engine's answer to that turn.
        max_position_embeddings: of the draft.
        max_concurrency: half of what the burst sends at once.
    """
    one_turn = Conversation(conversation.turns[:1], conversation.token_ids)
    subject = _Subject(engine, facts, one_turn, answer, max_position_embeddings, max_concurrency)
    probes: list[Probe] = []
    broken = ""
    for name, probe in _PROBES.items():
        if broken:
            probes.append(Probe(name, "not_run", f"the engine failed at {broken}"))
            continue
        try:
            status, message = probe(subject)
        except EngineError as error:
            status, message, broken = "failed", str(error), name
        probes.append(Probe(name, status, message))
    return tuple(probes)


def _long_prompt(subject: _Subject) -> tuple[Status, str]:
    """A prompt that ends past the draft's max_position_embeddings: drafting must go on there.

    vLLM's V1 runner stops drafting at the draft's own length, silently.
    """
    limit, served = subject.max_position_embeddings, subject.facts.max_model_len
    if limit is None:
        return "not_applicable", "the draft states no max_position_embeddings"
    length = limit + _BEYOND
    if served is not None and length + _LONG_OUTPUT > served:
        return "not_applicable", f"no prompt reaches position {limit}: the engine serves {served} tokens"
    if length > LONGEST_PROBE_TOKENS:
        return (
            "not_applicable",
            f"a prompt past position {limit} is longer than {LONGEST_PROBE_TOKENS} tokens",
        )
    known = (*(subject.answer.prompt_token_ids or ()), *(subject.answer.token_ids or ())) or tuple(
        range(16, 256)
    )
    prompt = tuple(itertools.islice(itertools.cycle(known), length))
    before = subject.engine.read_counters()
    completion = subject.ask(Sampling(_LONG_OUTPUT), Conversation(token_ids=prompt))
    counters = completion.counters
    if counters is None:
        after = subject.engine.read_counters()
        counters = difference(after, before) if before is not None and after is not None else None
    if completion.output_tokens < 2:
        return "passed", f"{length} tokens in; the answer ended before anything could be drafted"
    if counters is None or not counters.drafts:
        return "failed", (
            f"no draft in {completion.output_tokens} tokens after a prompt of {length}: "
            f"drafting stops at the draft's max_position_embeddings {limit} (check C27)"
        )
    return (
        "passed",
        f"{length} tokens in, {counters.drafts} drafts, {counters.accepted_tokens} tokens accepted",
    )


def _burst(subject: _Subject) -> tuple[Status, str]:
    """Twice the maximal concurrency at once."""
    count = 2 * subject.max_concurrency
    answers = subject.engine.generate(
        [subject.conversation] * count, Sampling(_SHORT_OUTPUT), max_concurrency=count
    )
    empty = sum(not completion.output_tokens for [completion, *_] in answers)
    return ("failed", f"{empty} of {count} answers are empty") if empty else ("passed", f"{count} at once")


def _one_token(subject: _Subject) -> tuple[Status, str]:
    """An answer of one token, which no draft is needed for."""
    count = subject.ask(Sampling(1)).output_tokens
    return ("passed", "") if count == 1 else ("failed", f"{count} tokens instead of one")


def _empty(subject: _Subject) -> tuple[Status, str]:
    """An answer that ends with its first token, so that its text is empty."""
    first = subject.answer.token_ids
    if not first:
        return "not_applicable", "the server does not tell token ids"
    text = subject.ask(Sampling(_SHORT_OUTPUT, stop_token_ids=(first[0],))).text
    return ("failed", f"{text[:40]!r} instead of an empty text") if text.strip() else ("passed", "")


def _sampled(subject: _Subject) -> tuple[Status, str]:
    """Sampling at temperature 0.7 works; what it says is not compared."""
    count = subject.ask(Sampling(_LONG_OUTPUT, temperature=0.7)).output_tokens
    return ("passed", f"{count} tokens") if count else ("failed", "no token")


_PROBES: dict[str, Callable[[_Subject], tuple[Status, str]]] = {
    "long_prompt": _long_prompt,
    "burst": _burst,
    "one_token": _one_token,
    "empty_completion": _empty,
    "temperature_0.7": _sampled,
}
