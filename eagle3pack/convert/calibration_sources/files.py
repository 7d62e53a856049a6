"""Texts and states from the files of a folder: no target runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from eagle3pack.convert.calibration_sources.feature_files import FeatureFolder, answer_of
from eagle3pack.convert.calibration_sources.recording import (
    BATCH_SIZE,
    NUM_SPECULATIVE_TOKENS,
    Opened,
    replay_recorded,
)
from eagle3pack.convert.calibration_sources.tables import load_draft_alone
from eagle3pack.convert.merging.capture import Recorder
from eagle3pack.draft.config import DraftConfig
from eagle3pack.engine.counters import Counters, total
from eagle3pack.engine.draft_model import DraftModel
from eagle3pack.engine.generation import Settings
from eagle3pack.engine.replay import KnownAnswer, replay

SAMPLED_TOKENS = 64  # of an answer, to see whether states tell the draft anything
FEWEST_DRAFTS = 200  # below which a weak draft looks like one that is told nothing
SURE = 2.0  # standard deviations


def open_files(
    folder: Path,
    draft_folder: Path,
    config: DraftConfig,
    target: str | None,
    target_id: str | None,
    say: Callable[[str], None],
) -> Opened:
    """Find the files, and load the draft.

    Args:
        folder: with hidden-state files.
        draft_folder, config: the draft.
        target: as the user gave it: where the draft shares its tables.
        target_id: for the calibration file.
        say: told where files leave something open.

    Raises:
        InputError: no files, or none that the draft can read.
        UsageError: the draft shares the target's tables, and there is no target.
    """
    features = FeatureFolder(folder)
    first = features.read(0)
    # before gigabytes are loaded
    answer_of(first, config, len(first.token_ids), where=str(features.files[0]))
    draft = load_draft_alone(draft_folder, target, first.states.dtype)
    say(f"calibrating: {len(features.files)} files of {features.kind} in {folder}")
    if not features.tells_answers:
        say("calibration: no dataset tells which tokens the target wrote; every token counts as its answer")
    files = Files(features, draft)
    if doubt := doubt_of(draft, files.sample()):
        say(f"calibration: warning: {doubt}")
    about = {
        "target": {"id": target_id},
        "prompts": [{"name": folder.resolve().name, "num_prompts": len(features.files)}],
        "source": {"kind": "files", "format": features.kind},
        "generation": {"dtype": str(draft.norm.weight.dtype).removeprefix("torch.")},
    }
    return Opened(files, about)


def doubt_of(draft: DraftModel, answers: Sequence[KnownAnswer]) -> str:
    """Why states look like none that the draft was trained on; empty where they do not.

    A draft guesses some tokens right from the last token alone, so that noise does not show in how many it
    gets right. It shows in what order is worth: states that tell something tell less at the wrong tokens.

    Args:
        draft: with embeddings and a head.
        answers: some of those to calibrate on; few of them tell nothing.
    """
    if not answers:
        return ""
    settings = Settings(num_speculative_tokens=NUM_SPECULATIVE_TOKENS, batch_size=BATCH_SIZE)
    backwards = [replace(answer, states=answer.states.flip(0)) for answer in answers]
    ours, theirs = (total(replay(draft, given, settings).counters) for given in (answers, backwards))
    if min(ours.drafts, theirs.drafts) < FEWEST_DRAFTS:
        return ""
    right, wrong = ours.accepted_per_position[0], theirs.accepted_per_position[0]
    share = (right + wrong) / (ours.drafts + theirs.drafts)
    deviation = (share * (1 - share) * (1 / ours.drafts + 1 / theirs.drafts)) ** 0.5
    if right / ours.drafts - wrong / theirs.drafts > SURE * deviation:
        return ""
    return (
        f"the draft proposes {right:,} of {ours.drafts:,} tokens right, and with the states of every text in "
        f"reverse order {wrong:,} of {theirs.drafts:,}: they tell it next to nothing. Are they its own "
        "target's, of these texts, of the auxiliary layers that it was trained on?"
    )


class Files:
    """One answer a file; see `recording.Source`."""

    def __init__(self, features: FeatureFolder, draft: DraftModel) -> None:
        self.draft = draft
        self.answers: Sequence[int] = [1] * len(features.files)
        self._features = features

    def sample(self) -> list[KnownAnswer]:
        """The beginnings of answers that lie evenly over all of them."""
        step = max(len(self.answers) // BATCH_SIZE, 1)
        chosen = range(0, len(self.answers), step)[:BATCH_SIZE]
        return [answer for index in chosen if (answer := self._answer(index, SAMPLED_TOKENS))]

    def play(
        self,
        conversations: Sequence[int],
        numbers: Sequence[int],
        max_tokens: int,
        recorder: Recorder,
        on_tokens: Callable[[int], None],
    ) -> Sequence[Counters]:
        """See `recording.Source`; files without an answer are passed over."""
        counters: list[Counters] = []
        for start in range(0, len(numbers), BATCH_SIZE):  # states are large: so many are held at once
            some = slice(start, start + BATCH_SIZE)
            read = [self._answer(index, max_tokens) for index in conversations[some]]
            found = {n: answer for n, answer in zip(numbers[some], read, strict=True) if answer}
            if found:
                counters += replay_recorded(
                    self.draft, list(found.values()), list(found), 0, recorder, on_tokens
                )
        return counters

    def _answer(self, index: int, max_tokens: int) -> KnownAnswer | None:
        where = str(self._features.files[index])
        answer = answer_of(self._features.read(index), self.draft.config, max_tokens, where=where)
        return None if answer is None else answer.to(self.draft.norm.weight)
