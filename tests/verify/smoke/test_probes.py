"""The requests beside the average ones."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from eagle3pack.engine.counters import Counters
from eagle3pack.verify.smoke.probes import LONGEST_PROBE_TOKENS, Probe, run_probes
from eagle3pack.verify.smoke.protocol import Completion, Conversation, EngineError, Sampling
from tests.verify.smoke.support import ScriptedEngine, scripted_facts

CONVERSATION = Conversation(("a question", "a second turn"))


def probe(
    engine: Any, *, max_position_embeddings: int | None = 512, max_model_len: int | None = 4096
) -> dict[str, Probe]:
    [[answer, *_]] = engine.generate([Conversation(("hi",))], Sampling(8), max_concurrency=1)
    probes = run_probes(
        engine,
        scripted_facts(max_model_len=max_model_len),
        CONVERSATION,
        answer,
        max_position_embeddings=max_position_embeddings,
        max_concurrency=4,
    )
    return {probe.name: probe for probe in probes}


@pytest.mark.parametrize("counts_requests", [True, False])
def test_a_sound_engine_passes_all(counts_requests: bool) -> None:
    engine = ScriptedEngine(lambda turn: 2, counts_requests=counts_requests)
    assert {found.status for found in probe(engine).values()} == {"passed"}
    asked = {len(conversation.token_ids): sampling for conversation, sampling in engine.asked}
    assert asked[512 + 16].max_tokens == 32
    assert all(len(conversation.turns) <= 1 for conversation, _ in engine.asked)
    assert sum(conversation.turns == ("a question",) for conversation, _ in engine.asked) == 8 + 3


def test_drafting_that_stops_at_the_drafts_length_fails() -> None:
    engine = ScriptedEngine(lambda turn: 2)
    usual = engine._answer

    def without_drafts(turn: str, sampling: Sampling) -> Completion:
        answer = usual(turn, sampling)
        return replace(answer, counters=Counters(0, 0, 0, (0, 0, 0), 32)) if turn == "tokens" else answer

    engine._answer = without_drafts  # type: ignore[method-assign]
    found = probe(engine)["long_prompt"]
    assert found.status == "failed"
    assert "C27" in found.message


@pytest.mark.parametrize(
    ("limit", "served", "words"),
    [
        (None, 4096, "states no max_position_embeddings"),
        (2048, 2048, "the engine serves 2048 tokens"),
        (LONGEST_PROBE_TOKENS, None, "longer than"),
    ],
)
def test_a_long_prompt_that_says_nothing(limit: int | None, served: int | None, words: str) -> None:
    found = probe(ScriptedEngine(lambda turn: 2), max_position_embeddings=limit, max_model_len=served)
    assert found["long_prompt"].status == "not_applicable"
    assert words in found["long_prompt"].message


def test_after_an_engine_has_failed_nothing_more_is_asked() -> None:
    engine = ScriptedEngine(lambda turn: 2)
    usual = engine.generate

    def burst_kills(conversations: Any, sampling: Any, **rest: Any) -> Any:
        if len(conversations) > 1:
            raise EngineError("died", where="vllm")
        return usual(conversations, sampling, **rest)

    engine.generate = burst_kills  # type: ignore[method-assign]
    found = probe(engine)
    assert (found["burst"].status, found["burst"].message) == ("failed", "vllm: died")
    assert [name for name, one in found.items() if one.status == "not_run"] == [
        "one_token",
        "empty_completion",
        "temperature_0.7",
    ]


def test_a_server_that_tells_no_tokens_is_not_asked_for_an_empty_answer() -> None:
    engine = ScriptedEngine(lambda turn: 2)
    usual = engine._answer

    def untold(turn: str, sampling: Sampling) -> Completion:
        answer = usual(turn, sampling)
        return Completion(answer.text, None, None, answer.output_tokens, answer.counters)

    engine._answer = untold  # type: ignore[method-assign]
    found = probe(engine)
    assert found["empty_completion"].status == "not_applicable"
    assert found["long_prompt"].status == "passed"
