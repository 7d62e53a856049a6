"""Texts and states from the files of a folder: no target runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from eagle3pack.convert.calibration_sources.feature_files import FeatureFolder, answer_of
from eagle3pack.convert.calibration_sources.recording import BATCH_SIZE, Opened, replay_recorded
from eagle3pack.convert.calibration_sources.tables import load_draft_alone
from eagle3pack.convert.merging.capture import Recorder
from eagle3pack.draft.config import DraftConfig
from eagle3pack.engine.counters import Counters
from eagle3pack.engine.draft_model import DraftModel
from eagle3pack.engine.replay import KnownAnswer


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
    about = {
        "target": {"id": target_id},
        "prompts": [{"name": folder.resolve().name, "num_prompts": len(features.files)}],
        "source": {"kind": "files", "format": features.kind},
        "generation": {"dtype": str(draft.norm.weight.dtype).removeprefix("torch.")},
    }
    return Opened(Files(features, draft), about)


class Files:
    """One answer a file; see `recording.Source`."""

    def __init__(self, features: FeatureFolder, draft: DraftModel) -> None:
        self.draft = draft
        self.answers: Sequence[int] = [1] * len(features.files)
        self._features = features

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
