"""Chain drafting: the draft proposes k tokens one after another, the target checks them in one forward.

Greedy text is the target's own, token for token. One round of a request:

1. propose: the draft's first token is at hand from the round before; k - 1 more steps feed its own
   hidden state back.
2. check: the target reads the last token and the k proposals; the longest prefix that it would have
   written itself is accepted, and its own next token is added.
3. catch up: the draft reads the accepted tokens again, now with the target's true states, which
   replaces its keys and values of step 1, and yields the first proposal of the next round.

Counting follows vLLM 0.32 (v1/core/sched/scheduler.py): the first token comes from the prompt and is
no draft; accepted tokens beyond a stop token or the length limit count as accepted, but not as output.

Sources: Leviathan et al. 2023, arXiv:2211.17192; EAGLE-3, arXiv:2503.01840; vLLM 0.32
v1/spec_decode/llm_base_proposer.py.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from eagle3pack.engine.counters import Counters
from eagle3pack.engine.draft_model import DraftModel, DraftOutput
from eagle3pack.engine.generation import DraftPass, Generation, Settings
from eagle3pack.engine.kv_cache import KeyValueCache
from eagle3pack.engine.sampling import pick
from eagle3pack.engine.target import Target
from eagle3pack.errors import UsageError

PREFILL_TOKENS = 512  # tokens of a prompt that are read at once: bounds the memory of masks and states


@dataclass(slots=True)
class Request:
    """A request in flight; its place in the batch is its row in both caches."""

    index: int
    prompt: Sequence[int]
    max_tokens: int
    output: list[int] = field(default_factory=list)
    drafts: int = 0
    accepted_per_position: list[int] = field(default_factory=list)
    accepted: int = 0  # in the last round

    @property
    def next_position(self) -> int:
        """Position of the last token, which the target has not read yet."""
        return len(self.prompt) + len(self.output) - 1


@dataclass(slots=True)
class _Clock:
    """Time inside forwards; on a GPU the queue is emptied before each look at the clock."""

    device: torch.device
    target: float = 0.0
    draft: float = 0.0

    def now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()

    @contextmanager
    def of_target(self) -> Iterator[None]:
        start = self.now()
        yield
        self.target += self.now() - start

    @contextmanager
    def of_draft(self) -> Iterator[None]:
        start = self.now()
        yield
        self.draft += self.now() - start


def generate(
    target: Target,
    prompts: Sequence[Sequence[int]],
    settings: Settings,
    *,
    draft: DraftModel | None = None,
    on_answer: Callable[[int, Sequence[int], Counters], None] = lambda index, output, counters: None,
    on_tokens: Callable[[int], None] = lambda count: None,
    on_draft_pass: Callable[[DraftPass], None] | None = None,
) -> Generation:
    """Answer prompts, with a draft or without one.

    Args:
        target: the target; with a draft, it captures that draft's layers from then on.
        prompts: token ids.
        settings: limits and sampling.
        draft: loaded for this target (`load_draft(..., target=target)`).
        on_answer: called when a request ends, with the index of its prompt, its tokens and its counters.
        on_tokens: called with the number of new output tokens.
        on_draft_pass: called with each pass of the draft, for whoever wants its activations; the tensors
            are the engine's own, so copy what is to be kept.

    Raises:
        UsageError: a prompt is empty, holds ids the target does not know, or leaves no room for max_tokens;
            or fewer than one row or speculative token.
        InputError: the draft does not fit the target.
    """
    if settings.batch_size < 1 or settings.num_speculative_tokens < 1:
        raise UsageError("batch_size and num_speculative_tokens must be at least 1")
    _require_room(target, prompts, settings)
    if draft is not None:
        target.capture_for(draft.config, where=draft.where)
    num_rows = min(settings.batch_size, len(prompts))
    run = _TargetRun(target, draft, settings, num_rows, on_answer, on_tokens, on_draft_pass)
    return run.answer((prompt, settings.max_tokens) for prompt in prompts)


class Run:
    """The batch in flight: requests, the draft's cache, and the first proposal of each request.

    What reads tokens in the target's place is left to the kinds of run: see `read`.
    """

    def __init__(
        self,
        device: torch.device,
        dtype: torch.dtype,
        stop_ids: frozenset[int],
        draft: DraftModel | None,
        settings: Settings,
        num_rows: int,
        on_answer: Callable[[int, Sequence[int], Counters], None],
        on_tokens: Callable[[int], None],
        on_draft_pass: Callable[[DraftPass], None] | None,
    ) -> None:
        self.device = device
        self.draft = draft
        self.num_rows = num_rows
        self.num_speculative_tokens = settings.num_speculative_tokens if draft is not None else 0
        self.stop_ids = frozenset[int]() if settings.ignore_stop_ids else stop_ids | settings.stop_ids
        self.clock = _Clock(device)
        self._on_answer = on_answer
        self._on_tokens = on_tokens
        self._on_draft_pass = on_draft_pass
        self._active: list[Request] = []
        self._draft_cache = KeyValueCache(num_rows, device)
        hidden_size = draft.config.hidden_size if draft is not None else 0
        self._first = torch.zeros(num_rows, dtype=torch.long, device=device)
        self._feedback = torch.zeros((num_rows, hidden_size), dtype=dtype, device=device)

    def reserve(self, num_slots: int) -> None:
        """Have room for sequences of that many tokens."""
        self._draft_cache.reserve(num_slots)

    def move_row(self, source: int, to: int) -> None:
        """A request moves to another row."""
        self._draft_cache.move_row(source, to)

    def read(
        self,
        tokens: Tensor,
        first_row: int,
        starts: Sequence[int],
        requests: Sequence[Request],
        kept: slice = slice(None),
    ) -> tuple[Tensor, Tensor]:
        """Read tokens as the target does.

        Args:
            tokens: (B, T).
            first_row: row of the first request.
            starts: position of each row's first token.
            requests: of the rows.
            kept: the tokens after which the next one is wanted.

        Returns:
            The target's next tokens, (B, kept), and its states, (B, T, A * Ht).
        """
        raise NotImplementedError

    @torch.inference_mode()
    def answer(self, prompts: Iterable[tuple[Sequence[int], int]]) -> Generation:
        """Answer all prompts, each with so many tokens at most; free rows are filled in their order."""
        start = self.clock.now()
        requests = [
            Request(index, prompt, max_tokens, accepted_per_position=[0] * self.num_speculative_tokens)
            for index, (prompt, max_tokens) in enumerate(prompts)
        ]
        waiting = deque(request for request in requests if request.max_tokens)
        while waiting or self._active:
            while waiting and len(self._active) < self.num_rows:
                self._admit(waiting.popleft())
            if self._active:
                self._round()
        return Generation(
            outputs=tuple(tuple(request.output) for request in requests),
            counters=tuple(_counters(request, self.num_speculative_tokens) for request in requests),
            seconds=self.clock.now() - start,
            target_seconds=self.clock.target,
            draft_seconds=self.clock.draft,
        )

    def _admit(self, request: Request) -> None:
        """Read a prompt into the next free row."""
        self.reserve(len(request.prompt) + request.max_tokens + self.num_speculative_tokens + 1)
        row = len(self._active)
        tokens = torch.tensor([request.prompt], device=self.device)
        for start in range(0, tokens.shape[1], PREFILL_TOKENS):
            chunk = tokens[:, start : start + PREFILL_TOKENS]
            following = tokens[:, start + 1 : start + 1 + PREFILL_TOKENS]
            picked, states = self.read(chunk, row, [start], [request], kept=slice(-1, None))
            if following.shape[1] < chunk.shape[1]:  # the last chunk: what follows is the first new token
                following = torch.cat((following, picked), dim=1)
                self._keep(request, picked[0].tolist())
            if self.draft is not None:
                width = chunk.shape[1]
                drafted = self._catch_up(states, following, row, [start], [request], [width])
                self._remember(row, drafted, [width - 1])
        if not self._end_if_finished(request):
            self._active.append(request)

    def _round(self) -> None:
        """One round of all requests in flight."""
        requests = self._active
        count = len(requests)
        starts = [request.next_position for request in requests]
        last = torch.tensor([[request.output[-1]] for request in requests], device=self.device)
        proposed = self._propose(starts)
        picked, states = self.read(torch.cat((last, proposed), dim=1), 0, starts, requests)
        agreed = (picked[:, :-1] == proposed).int().cumprod(dim=1).sum(dim=1).tolist()
        for request, accepted, tokens in zip(requests, agreed, picked.tolist(), strict=True):
            request.accepted = accepted
            if self.draft is not None:
                request.drafts += 1
                for position in range(accepted):
                    request.accepted_per_position[position] += 1
            self._keep(request, tokens[: accepted + 1])
        rows = self._drop_finished()
        if self.draft is None or not rows:
            return
        if len(rows) < count:
            picked, states = picked[rows], states[rows]
        ends = [request.accepted for request in self._active]
        width = max(ends) + 1  # what lies beyond was rejected by every request
        starts = [starts[row] for row in rows]
        widths = [end + 1 for end in ends]
        drafted = self._catch_up(states[:, :width], picked[:, :width], 0, starts, self._active, widths)
        self._remember(0, drafted, ends)

    def _propose(self, starts: Sequence[int]) -> Tensor:
        """Draft k tokens a request, (rows, k) in the target's ids."""
        count = len(starts)
        if self.draft is None:
            return torch.empty((count, 0), dtype=torch.long, device=self.device)
        tokens = [self._first[:count, None]]
        hidden = self._feedback[:count, None]
        for step in range(1, self.num_speculative_tokens):
            # entry of the last accepted token stands at starts - 1; step s comes s positions later
            at = [start - 1 + step for start in starts]
            drafted = self._draft_forward(tokens[-1], hidden, 0, at, self._active, step, [1] * count)
            with self.clock.of_draft():
                tokens.append(self.draft.greedy(drafted.normed))
            hidden = drafted.feedback
        return torch.cat(tokens, dim=1)

    def _catch_up(
        self,
        states: Tensor,
        following: Tensor,
        first_row: int,
        starts: Sequence[int],
        requests: Sequence[Request],
        widths: Sequence[int],
    ) -> DraftOutput:
        """Read tokens into the draft with the target's true states."""
        assert self.draft is not None
        with self.clock.of_draft():
            hidden = self.draft.fuse(states)
        return self._draft_forward(following, hidden, first_row, starts, requests, 0, widths)

    def _draft_forward(
        self,
        tokens: Tensor,
        hidden: Tensor,
        first_row: int,
        starts: Sequence[int],
        requests: Sequence[Request],
        step: int,
        widths: Sequence[int],
    ) -> DraftOutput:
        assert self.draft is not None
        positions = self._draft_cache.at(first_row, starts, tokens.shape[1])
        with self.clock.of_draft():
            output: DraftOutput = self.draft(tokens, hidden, positions, self._draft_cache)
        if self._on_draft_pass is not None:
            indices = tuple(request.index for request in requests)
            self._on_draft_pass(DraftPass(step, indices, tokens, positions, hidden, tuple(widths)))
        return output

    def _remember(self, first_row: int, drafted: DraftOutput, ends: Sequence[int]) -> None:
        """Keep the first proposal and the hidden state after each row's last real entry."""
        assert self.draft is not None
        rows = torch.arange(len(ends), device=self.device)
        last = torch.tensor(ends, device=self.device)
        with self.clock.of_draft():
            first = self.draft.greedy(drafted.normed[rows, last])
        self._first[first_row : first_row + len(ends)] = first
        self._feedback[first_row : first_row + len(ends)] = drafted.feedback[rows, last]

    def _keep(self, request: Request, tokens: Sequence[int]) -> None:
        """Append tokens up to the length limit or the first stop token."""
        tokens = tokens[: request.max_tokens - len(request.output)]
        stop = next((i for i, token in enumerate(tokens) if token in self.stop_ids), len(tokens))
        request.output += tokens[: stop + 1]
        self._on_tokens(len(tokens[: stop + 1]))

    def _end_if_finished(self, request: Request) -> bool:
        """Hand out the answer of a request that is complete; tells whether it is."""
        if len(request.output) < request.max_tokens and request.output[-1] not in self.stop_ids:
            return False
        self._on_answer(request.index, request.output, _counters(request, self.num_speculative_tokens))
        return True

    def _drop_finished(self) -> list[int]:
        """Take finished requests out, moving the last row into each gap; returns where each row was."""
        rows = list(range(len(self._active)))
        for row in reversed(range(len(rows))):
            if not self._end_if_finished(self._active[row]):
                continue
            tail, was = self._active.pop(), rows.pop()
            if row < len(rows):
                self._active[row], rows[row] = tail, was
                self.move_row(len(rows), row)
        return rows


class _TargetRun(Run):
    """A run with a target."""

    def __init__(
        self, target: Target, draft: DraftModel | None, settings: Settings, num_rows: int, *told: Any
    ) -> None:
        super().__init__(target.device, target.dtype, target.stop_ids, draft, settings, num_rows, *told)
        self._target = target
        self._settings = settings
        self._target_cache = KeyValueCache(num_rows, target.device)
        self._generator = torch.Generator(target.device).manual_seed(settings.seed)

    def reserve(self, num_slots: int) -> None:
        super().reserve(num_slots)
        self._target_cache.reserve(num_slots)

    def move_row(self, source: int, to: int) -> None:
        super().move_row(source, to)
        self._target_cache.move_row(source, to)

    def read(
        self,
        tokens: Tensor,
        first_row: int,
        starts: Sequence[int],
        requests: Sequence[Request],
        kept: slice = slice(None),
    ) -> tuple[Tensor, Tensor]:
        """See `Run.read`.

        Accepting a proposal exactly where it equals a draw from the target leaves the distribution of
        the text the target's own: it is rejection sampling against a draft that is sure of itself.
        """
        positions = self._target_cache.at(first_row, starts, tokens.shape[1])
        with self.clock.of_target():
            output = self._target.forward(tokens, positions, self._target_cache, kept)
        chosen = self._settings
        picked = pick(output.logits, chosen.temperature, chosen.top_p, self._generator)
        return picked, output.states


def _counters(request: Request, num_speculative_tokens: int) -> Counters:
    return Counters(
        drafts=request.drafts,
        draft_tokens=request.drafts * num_speculative_tokens,
        accepted_tokens=sum(request.accepted_per_position),
        accepted_per_position=tuple(request.accepted_per_position),
        output_tokens=len(request.output),
    )


def _require_room(target: Target, prompts: Sequence[Sequence[int]], settings: Settings) -> None:
    for index, prompt in enumerate(prompts):
        where = f"prompt {index + 1}"
        if not prompt:
            raise UsageError("is empty", where=where)
        if not all(0 <= token < target.spec.vocab_size for token in prompt):
            raise UsageError(
                f"holds a token beyond the target's vocabulary of {target.spec.vocab_size}",
                where=where,
                hint="Is this the target's own tokenizer?",
            )
        if target.max_position and len(prompt) + settings.max_tokens > target.max_position:
            raise UsageError(
                f"has {len(prompt)} tokens; with its answer that is more than the "
                f"{target.max_position} positions of the target",
                where=where,
            )
