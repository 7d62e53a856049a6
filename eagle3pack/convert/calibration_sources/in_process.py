"""Texts that the target writes in this process while the draft speculates."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from eagle3pack.convert.calibration_sources.recording import (
    BATCH_SIZE,
    NUM_SPECULATIVE_TOKENS,
    Opened,
    about_prompts,
)
from eagle3pack.convert.merging.capture import Recorder
from eagle3pack.draft.target import read_target
from eagle3pack.engine.chat import Chat, load_chat
from eagle3pack.engine.counters import Counters
from eagle3pack.engine.draft_model import DraftModel
from eagle3pack.engine.generation import Settings
from eagle3pack.engine.loading import load_draft
from eagle3pack.engine.prompts import Prompt, PromptSet, rounds
from eagle3pack.engine.speculate import generate
from eagle3pack.engine.target import Target, load_target


def open_in_process(target_folder: Path, target_id: str, draft_folder: Path, prompts: PromptSet) -> Opened:
    """Load target and draft, on a GPU if there is one.

    Raises:
        InputError, UsageError: one of them cannot be loaded, or they do not fit each other.
    """
    device = "cuda" if torch.cuda.is_available() else "cpu"
    target = load_target(target_folder, dtype=_served_dtype(target_folder, device), device=device)
    chat = load_chat(target_folder)
    draft = load_draft(draft_folder, target=target)
    settings = Settings(
        num_speculative_tokens=NUM_SPECULATIVE_TOKENS, batch_size=BATCH_SIZE, stop_ids=chat.stop_ids
    )
    about = {
        "target": {"id": target_id},
        "prompts": about_prompts(prompts),
        "source": {"kind": "in process"},
        "generation": {"dtype": str(target.dtype).removeprefix("torch.")},
    }
    return Opened(InProcess(target, draft, chat, prompts.prompts, settings), about)


def _served_dtype(folder: Path, device: str) -> torch.dtype:
    """The weights' own, as engines serve them; a CPU computes float16 as float32."""
    own = {"float32": torch.float32, "float16": torch.float16}.get(
        read_target(folder).dtype or "", torch.bfloat16
    )
    return torch.float32 if own == torch.float16 and device == "cpu" else own


class InProcess:
    """Target and draft answer prompts, every turn of them; see `recording.Source`.

    Args:
        target: loaded.
        draft: loaded for it; one decoder layer.
        chat: the target's tokenizer.
        prompts: at least one.
        settings: greedy; batch size and speculative tokens.
    """

    def __init__(
        self, target: Target, draft: DraftModel, chat: Chat, prompts: Sequence[Prompt], settings: Settings
    ) -> None:
        self.draft = draft
        self.answers: Sequence[int] = [prompt.num_answers for prompt in prompts]
        self._target = target
        self._chat = chat
        self._prompts = prompts
        self._settings = settings

    def play(
        self,
        conversations: Sequence[int],
        numbers: Sequence[int],
        max_tokens: int,
        recorder: Recorder,
        on_tokens: Callable[[int], None],
    ) -> Sequence[Counters]:
        """See `recording.Source`; raises what `generate` raises."""
        prompts = [self._prompts[i] for i in conversations]
        answers: list[list[str]] = [[] for _ in prompts]
        settings = replace(self._settings, max_tokens=max_tokens)
        counters: list[Counters] = []
        for turn, going_on in enumerate(rounds([prompt.num_answers for prompt in prompts])):
            asked = [
                prompts[i].token_ids or self._chat.prompt(prompts[i].turns[: turn + 1], answers[i])
                for i in going_on
            ]
            told = [[range(len(prompt) - 1, sys.maxsize)] for prompt in asked]
            recorder.start(turn, [numbers[i] for i in going_on], told)
            made = generate(
                self._target,
                asked,
                settings,
                draft=self.draft,
                on_tokens=on_tokens,
                on_draft_pass=recorder,
            )
            counters += made.counters
            for i, output in zip(going_on, made.outputs, strict=True):
                answers[i].append(self._chat.text(output))
        return counters
