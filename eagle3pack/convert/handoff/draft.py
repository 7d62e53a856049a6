"""What every hand-off starts from: the converted draft on disk and its vocabulary maps."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eagle3pack.checkpoint.files import INDEX_FILE, open_checkpoint
from eagle3pack.checkpoint.header import TensorEntry
from eagle3pack.checkpoint.reading import read_tensor
from eagle3pack.checkpoint.writer import PlannedTensor, index_json, plan_files, verify_written, write_file
from eagle3pack.documents import to_json
from eagle3pack.draft.config import DraftConfig
from eagle3pack.draft.target import TargetSpec
from eagle3pack.draft.tensors import expected_tensors, resolve_names
from eagle3pack.errors import InputError


@dataclass(frozen=True, slots=True)
class ConvertedDraft:
    """A converted draft.

    Attributes:
        config: its config.json.
        tensors: by logical name; those that the target lends included.
        target: what it drafts for, where that is known.
        shard_bytes: weight files are split above this size.
    """

    config: DraftConfig
    tensors: Mapping[str, TensorEntry]
    target: TargetSpec | None
    shard_bytes: int

    @property
    def target_reference(self) -> str | None:
        """The target as another program on this machine finds it: an absolute path or ORG/NAME."""
        if self.target is None:
            return None
        path = Path(self.target.name)
        if not path.exists():
            return self.target.name
        return str((path if path.is_dir() else path.parent).resolve())


@dataclass(frozen=True, slots=True)
class Written:
    """What a framework's module leaves.

    Attributes:
        command: the command line that starts the retraining; upper-case words are the user's to fill in.
        notes: what the user must know of this framework's release.
    """

    command: str
    notes: tuple[str, ...] = ()


def read_converted(
    folder: Path,
    config: DraftConfig,
    lent: Mapping[str, TensorEntry],
    target: TargetSpec | None,
    shard_bytes: int,
) -> ConvertedDraft:
    """Open a converted draft; tensors that are no part of an EAGLE3 draft are left out.

    Args:
        folder: its files.
        config: its config.
        lent: by logical name, tensors of the target that the draft does not bring.
        target: what it drafts for.
        shard_bytes: of the files that are written from it.
    """
    checkpoint = open_checkpoint(folder)
    names = resolve_names(checkpoint.tensors, where=str(folder))
    known = expected_tensors(config)
    own = {logical: checkpoint.tensors[actual] for logical, actual in names.items() if logical in known}
    return ConvertedDraft(config, {**lent, **own}, target, shard_bytes)


def vocabulary_maps(draft: ConvertedDraft) -> tuple[TensorEntry, TensorEntry]:
    """d2t (int64 offsets) and t2d (booleans) of a draft, the identity where its vocabulary is the whole one.

    t2d is made of d2t, so that the two agree whatever the draft's files hold.

    Raises:
        InputError: d2t does not name tokens of the target in ascending order.
    """
    size, target_size = draft.config.draft_vocab_size, draft.config.vocab_size
    offsets = array("q", bytes(8 * size))
    if "d2t" in draft.tensors:
        entry = draft.tensors["d2t"]
        code = {"I64": "q", "I32": "i"}.get(entry.dtype)
        if code is None or entry.shape != (size,):
            raise InputError(f"is {entry.dtype} of shape {list(entry.shape)}", where=f"{entry.path}: d2t")
        offsets = array("q", array(code, bytes(read_tensor(entry))))
    tokens = [token + offset for token, offset in enumerate(offsets)]
    if any(b <= a for a, b in zip([-1, *tokens], [*tokens, target_size], strict=True)):
        raise InputError(
            f"does not name {size} of {target_size} tokens in ascending order",
            where=str(draft.tensors["d2t"].path) + ": d2t",
            hint="See `eagle3pack verify`, vocabulary.",
        )
    chosen = bytearray(target_size)
    for token in tokens:
        chosen[token] = 1
    return (
        in_memory("d2t", "I64", (size,), offsets.tobytes()),
        in_memory("t2d", "BOOL", (target_size,), bytes(chosen)),
    )


def in_memory(name: str, dtype: str, shape: tuple[int, ...], data: bytes) -> TensorEntry:
    """A tensor whose bytes are at hand, as if it were in a file."""
    return TensorEntry(name, dtype, shape, Path(name), 0, len(data), lambda: memoryview(data))


def write_draft(
    folder: Path,
    config: Mapping[str, Any],
    tensors: Iterable[tuple[str, TensorEntry]],
    shard_bytes: int,
    on_bytes: Callable[[int], None],
) -> None:
    """Write a draft as engines read it: config.json, weights, and an index where there are several files.

    Args:
        folder: to make.
        config: config.json.
        tensors: (name, what it is copied from).
        shard_bytes: files are split above this size.
        on_bytes: told how many more bytes are written.
    """
    folder.mkdir()
    (folder / "config.json").write_text(to_json(config), "utf-8")
    files = plan_files(
        [PlannedTensor(name, entry.dtype, entry.shape, entry) for name, entry in tensors], shard_bytes
    )
    for planned in files:
        write_file(planned, folder, lambda _: (), on_bytes=on_bytes, hashing=False)
    if len(files) > 1:
        (folder / INDEX_FILE).write_bytes(index_json(files))
    verify_written(files, folder)
