"""What the smoke test asks of an engine, and what it gets back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from eagle3pack.engine.counters import Counters
from eagle3pack.errors import Eagle3PackError


class EngineError(Eagle3PackError):
    """An engine did not start, or stopped serving; the draft has not passed."""

    exit_code = 3


@dataclass(frozen=True, slots=True)
class Sampling:
    """How tokens are chosen; greedy unless told otherwise.

    Attributes:
        max_tokens: tokens that a completion may have.
        temperature: 0 is greedy.
        top_p: of the nucleus.
        stop_token_ids: end a completion beside the target's own end tokens; not part of its text.
    """

    max_tokens: int
    temperature: float = 0.0
    top_p: float = 1.0
    stop_token_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Conversation:
    """What a user says: one message after another, each answered before the next; or bare tokens.

    Attributes:
        turns: the user's messages; the target's chat template wraps them.
        token_ids: a prompt that is tokens already; then there are no turns.
    """

    turns: tuple[str, ...] = ()
    token_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Completion:
    """An answer.

    Attributes:
        text: without special tokens.
        token_ids: or None from a server that does not tell.
        prompt_token_ids: what the target was given; None from a server that does not tell.
        output_tokens: tokens generated.
        counters: what speculation did in this request, or None where only totals are known.
    """

    text: str
    token_ids: tuple[int, ...] | None
    prompt_token_ids: tuple[int, ...] | None
    output_tokens: int
    counters: Counters | None


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """What is known of a running engine; None for what it does not tell.

    Attributes:
        name: "reference" or "vllm".
        version: of the engine.
        runner: "V1" or "V2", vLLM's model runner.
        backend: attention backend.
        device: "cpu", "cuda", ...
        tensor_parallel_size: None in process.
        tp_source: whether we set that size or the user stated it.
        num_speculative_tokens: 0 without a draft.
        max_model_len: longest prompt and completion together, in tokens.
        enforce_eager: whether graphs and compilation are off.
        dtype: what the weights were run in, where we set it.
        command: what started it.
        notes: what the user should know of how it was started.
    """

    name: Literal["reference", "vllm"]
    version: str | None
    runner: str | None
    backend: str | None
    device: str | None
    tensor_parallel_size: int | None
    tp_source: Literal["measured", "declared"] | None
    num_speculative_tokens: int
    max_model_len: int | None
    enforce_eager: bool | None
    dtype: str | None
    command: tuple[str, ...]
    notes: tuple[str, ...] = ()


class Engine(Protocol):
    """An engine with a target and, unless it is a baseline, a draft."""

    def start(self) -> EngineFacts:
        """Load the models and be ready.

        Raises:
            EngineError: it does not start, with the reason.
        """

    def generate(
        self,
        conversations: Sequence[Conversation],
        sampling: Sampling,
        *,
        max_concurrency: int,
        on_answers: Callable[[int], None] = lambda count: None,
    ) -> list[tuple[Completion, ...]]:
        """Answer every turn of every conversation.

        Args:
            conversations: any number.
            sampling: for all of them.
            max_concurrency: conversations that run at once.
            on_answers: told how many more turns are answered; those of one batch together.

        Returns:
            For each conversation its completions, one a turn.

        Raises:
            EngineError: it stopped serving, or refused a prompt.
        """

    def read_counters(self) -> Counters | None:
        """What speculation did since the engine came up; None where it does not speculate.

        Raises:
            EngineError: it does not answer.
        """

    def stop(self) -> None:
        """End it and free what it holds; does nothing if that is done already."""
