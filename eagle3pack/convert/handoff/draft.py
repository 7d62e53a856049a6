"""What every hand-off starts from: the converted draft on disk, its vocabulary maps, its layers' numbers."""

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
from eagle3pack.draft.producers import PORTABLE_ARCHITECTURE
from eagle3pack.draft.target import TargetSpec, default_aux_layer_ids
from eagle3pack.draft.tensors import resolve_names
from eagle3pack.errors import InputError, UnsupportedDraftError

# Keys of the speculators format that a flat config has no place for.
_NESTED = ("transformer_layer_config", "speculators_config", "speculators_model_type", "speculators_version")


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
    """Open a converted draft.

    Args:
        folder: its files.
        config: its config.
        lent: by logical name, tensors of the target that the draft does not bring.
        target: what it drafts for.
        shard_bytes: of the files that are written from it.
    """
    checkpoint = open_checkpoint(folder)
    names = resolve_names(checkpoint.tensors, where=str(folder))
    own = {logical: checkpoint.tensors[actual] for logical, actual in names.items()}
    return ConvertedDraft(config, {**lent, **own}, target, shard_bytes)


def require_one_plain_layer(config: DraftConfig, option: str, release: str) -> None:
    """Refuse what the EAGLE3 draft model of TorchSpec and SpecForge has no place for.

    Args:
        config: of the draft.
        option: the option that asked for it.
        release: of the framework.

    Raises:
        UnsupportedDraftError: the framework would drop a tensor or compute otherwise, mostly in silence.
    """
    reasons = {
        f"it has {config.num_hidden_layers} decoder layers": config.num_hidden_layers != 1,
        "norm_before_residual is true": config.norm_before_residual,
        "norm_before_fc is true": config.norm_before_fc,
        "norm_output is true": config.norm_output,
        "its attention has biases": config.attention_bias,
        f"{config.architecture} norms queries and keys": config.qk_norm,
        f"it reads {config.num_aux_hidden_states} auxiliary hidden states": config.num_aux_hidden_states != 3,
        "it reads no auxiliary hidden states": not config.use_aux_hidden_state,
        f"it is quantised ({config.quantization})": config.quantization is not None,
    }
    for reason, applies in reasons.items():
        if applies:
            raise UnsupportedDraftError(
                f"{release} cannot train this draft: {reason}",
                where=option,
                hint="See docs/retraining.md for what each framework trains.",
            )


def native_config(config: DraftConfig) -> dict[str, Any]:
    """A flat config.json under the one architecture that TorchSpec and SpecForge know."""
    raw: dict[str, Any] = dict(config.raw)
    if config.dialect == "speculators":
        raw = {**config.raw["transformer_layer_config"], **config.raw}
        raw = {key: value for key, value in raw.items() if key not in _NESTED and value is not None}
        raw |= {**config.rope.as_v4(), "rope_parameters": config.rope.as_v5()} if config.rope.theta else {}
    return raw | {
        "architectures": [PORTABLE_ARCHITECTURE],
        "model_type": "llama",
        "num_hidden_layers": config.num_hidden_layers,
        "num_key_value_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "draft_vocab_size": config.draft_vocab_size,
        "tie_word_embeddings": False,
    }


def capture_layers(draft: ConvertedDraft) -> tuple[tuple[int, ...] | None, tuple[str, ...]]:
    """The auxiliary layers as TorchSpec and SpecForge number them: i is the state after layer i.

    vLLM's number k is the state after k layers, so that i = k - 1. A config.json does not say which of the
    two it means: the target's default is known in either, anything else is read as vLLM reads it.

    Returns:
        The numbers, None where the draft names none (each framework's default is vLLM's default); and what
        was taken for granted.

    Raises:
        UnsupportedDraftError: vLLM's layer 0, the embedding, which has no number there.
    """
    ids = draft.config.aux_hidden_state_layer_ids
    if ids is None:
        return None, ()
    if draft.target:
        default = default_aux_layer_ids(draft.target.num_hidden_layers)
        after = tuple(k - 1 for k in default)
        if ids in (default, after):
            return after, ()
    if 0 in ids:
        raise UnsupportedDraftError(
            f"eagle_aux_hidden_state_layer_ids {list(ids)} has the embedding (0), which the framework "
            "cannot capture",
            where="config.json",
        )
    layers = tuple(k - 1 for k in ids)
    note = (
        f"auxiliary layers: config.json says {list(ids)}, read as vLLM counts (states after k layers); "
        f"here that is {list(layers)}. If the draft was trained with this framework on {list(ids)}, write "
        "those into run.yaml"
    )
    return layers, (note,)


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


def layer_zero_as(prefix: str, logical: str) -> str:
    """A tensor's name where the first layer has a prefix of its own."""
    return prefix + logical.removeprefix("layers.0.") if logical.startswith("layers.0.") else logical


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
