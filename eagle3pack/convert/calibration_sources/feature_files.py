"""Hidden states that trainers keep on disk: texts, the target's states, and which part it answered.

    made by                  files                  states               tokens
    speculators since 0.5    hs_*.safetensors       hidden_states        token_ids (T,)
                                                    (T, L, Ht)
    vLLM's own connector     *.safetensors          the same             the same
    speculators 0.3, 0.4     data_*.pt              hidden_states        input_ids, loss_mask (T,)
                                                    L times (T, Ht)
    SpecForge                data_*.ckpt, .ckpt.gz  aux_hidden_state     input_ids, loss_mask (T,)
                                                    (1, T, A * Ht)

State t is the target's after token t in all of them; it is the trainers that shift: speculators drops the
first token (models/eagle3/data.py: shift_batch), SpecForge moves all one to the left (modeling/target/
target_head.py: preprocess). Both end where engines are: state t goes with token t + 1. L is A, or A + 1
where the last layer's state comes last, which no draft reads. Which layers they are no file tells.

Of hs_*.safetensors the loss_mask stands in the dataset beside them.

Sources: speculators 0.9.0 (data_generation, train/data.py) with its hs_connectors (fp8_utils.py), and 0.4.0
(scripts/data_generation_offline.py); SpecForge 0.2.0 (scripts/prepare_hidden_states.py, algorithms/eagle3/
data.py); vLLM 0.32 distributed/kv_transfer/kv_connector/v1/example_hidden_states_connector.py.
"""

from __future__ import annotations

import gzip
import importlib
import io
import pickle
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from eagle3pack.checkpoint.as_torch import load_tensor
from eagle3pack.checkpoint.header import read_header
from eagle3pack.draft.config import DraftConfig
from eagle3pack.engine.replay import KnownAnswer
from eagle3pack.errors import InputError, PermissionDenied, UsageError

_KINDS = {
    ".safetensors": "speculators",
    ".pt": "speculators 0.4",
    ".ckpt": "SpecForge",
    ".ckpt.gz": "SpecForge",
}


@dataclass(frozen=True, slots=True)
class Features:
    """What one file holds.

    Attributes:
        token_ids: int64, (T,).
        states: (T, L * Ht), in the file's dtype.
        answered: whether each token is part of an answer, bool, (T,); None where the file does not say.
    """

    token_ids: Tensor
    states: Tensor
    answered: Tensor | None


class FeatureFolder:
    """The files of a folder and of those in it, in the order of their numbers.

    Args:
        folder: as the user gave it.

    Raises:
        InputError: it holds no such files, or several kinds of them; or the dataset beside them is none.
        UsageError: the dataset beside them cannot be read here.
    """

    def __init__(self, folder: Path) -> None:
        kinds: dict[str, list[Path]] = {}
        for path in folder.rglob("*"):
            if (suffix := _suffix(path)) and path.is_file():
                kinds.setdefault(_KINDS[suffix], []).append(path)
        if not kinds:
            raise InputError(
                "holds no hidden-state files: neither hs_*.safetensors nor data_*.pt nor data_*.ckpt",
                where=str(folder),
                hint="Name the folder that speculators' generate-offline-data or SpecForge's "
                "prepare_hidden_states.py wrote.",
            )
        if len(kinds) > 1:
            raise InputError(
                f"holds files of {' and of '.join(sorted(kinds))}",
                where=str(folder),
                hint="Name a folder with one kind of them.",
            )
        ((self.kind, files),) = kinds.items()
        self.files = sorted(files, key=_natural)
        self._masks = _masks_beside(folder) if self.kind == "speculators" else None
        self.tells_answers = self.kind != "speculators" or self._masks is not None

    def read(self, index: int) -> Features:
        """Read one file.

        Raises:
            InputError: it is not what its name says, or its parts do not fit each other.
            PermissionDenied: it may not be read.
        """
        path = self.files[index]
        if self.kind != "speculators":
            return _from_pickle(path)
        found = from_safetensors(path)
        if self._masks is None:
            return found
        return _fitting(found.token_ids, found.states, self._masks(path), path)


def answer_of(features: Features, config: DraftConfig, max_tokens: int, *, where: str) -> KnownAnswer | None:
    """The longest answer of a text, what stands before it being its prompt; of equal ones the first.

    Args:
        features: of one file.
        config: of the draft.
        max_tokens: of the answer; the rest is cut off.
        where: the file.

    Returns:
        None where the text has no answer of two tokens or more, so that nothing would be drafted.

    Raises:
        InputError: as `states_for`, of what is kept.
    """
    answered = features.answered
    if answered is None:
        answered = torch.ones(len(features.token_ids), dtype=torch.bool)
    start, end = _longest_run(answered, max_tokens)
    if end - start < 2:
        return None
    kept = Features(features.token_ids[:end], features.states[:end], None)
    return KnownAnswer(kept.token_ids, start, states_for(kept, config, where=where))


def states_for(features: Features, config: DraftConfig, *, where: str) -> Tensor:
    """The states that a draft reads, (T, A * Ht).

    Raises:
        InputError: there are others, or they are not finite, or the draft does not know a token.
    """
    aux, width = config.num_aux_hidden_states * config.target_hidden_size, features.states.shape[1]
    if width not in (aux, aux + config.target_hidden_size):
        raise InputError(
            f"holds {width} numbers a token; the draft reads {config.num_aux_hidden_states} states of "
            f"{config.target_hidden_size}, and the last layer's may come behind them",
            where=where,
            hint="It must be made with the draft's own target and auxiliary layers.",
        )
    token_ids = features.token_ids
    outside = token_ids[(token_ids < 0) | (token_ids >= config.vocab_size)]
    if len(outside):
        raise InputError(
            f"holds token {int(outside[0])}, the draft's vocabulary has {config.vocab_size}", where=where
        )
    states = features.states[:, :aux]
    if not bool(torch.isfinite(states.float()).all()):
        raise InputError("holds NaN or infinity", where=where)
    return states


def _longest_run(answered: Tensor, max_tokens: int) -> tuple[int, int]:
    """Start and end of the first of the longest runs of answered tokens, cut at max_tokens; never at 0."""
    marks = torch.nn.functional.pad(answered[1:].int(), (1, 1))
    edges = marks.diff()
    starts, ends = (edges == 1).nonzero()[:, 0] + 1, (edges == -1).nonzero()[:, 0] + 1
    if not len(starts):
        return 0, 0
    ends = torch.minimum(ends, starts + max_tokens)
    best = int((ends - starts).argmax())
    return int(starts[best]), int(ends[best])


def from_safetensors(path: Path) -> Features:
    """Read what vLLM's connector wrote, or its sibling that stores float8 with a scale a token.

    Raises:
        InputError: it is something else.
        PermissionDenied: it may not be read.
    """
    entries = {entry.name: entry for entry in read_header(path).tensors}
    _require_named(entries, {"token_ids", "hidden_states"}, path)
    states = load_tensor(entries["hidden_states"])
    if "hidden_states_scales" in entries:
        states = (states.float() * load_tensor(entries["hidden_states_scales"]).float()).bfloat16()
    if states.ndim != 3:
        raise InputError(
            f"hidden_states is {list(states.shape)}, expected (tokens, layers, width)", where=str(path)
        )
    return _fitting(load_tensor(entries["token_ids"]), states.flatten(1), None, path)


def _from_pickle(path: Path) -> Features:
    """Read what torch.save wrote for speculators or SpecForge."""
    held = _load(path)
    if not isinstance(held, dict):
        raise InputError(f"holds a {type(held).__name__}, expected tensors by name", where=str(path))
    name = "aux_hidden_state" if "aux_hidden_state" in held else "hidden_states"
    _require_named(held, {"input_ids", "loss_mask", name}, path)
    token_ids, mask = (_numbers(held[key], f"{path}: {key}") for key in ("input_ids", "loss_mask"))
    layers = held[name] if isinstance(held[name], list) and held[name] else [held[name]]
    parts = [_numbers(part, f"{path}: {name}") for part in layers]
    if len({part.shape[:-1] for part in parts}) > 1 or parts[0].ndim not in (2, 3):
        shapes = ", ".join(str(list(part.shape)) for part in parts)
        raise InputError(f"{name} is {shapes}, expected (tokens, width)", where=str(path))
    return _fitting(token_ids, torch.cat(parts, dim=-1).flatten(0, -2), mask.reshape(-1) != 0, path)


def _load(path: Path) -> object:
    """Tensors and plain containers of them: no code in a pickle runs."""
    try:
        if path.suffix == ".gz":
            packed = io.BytesIO(gzip.decompress(path.read_bytes()))
            return torch.load(packed, map_location="cpu", weights_only=True)
        return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except PermissionError:
        raise PermissionDenied("may not be read", where=str(path)) from None
    except pickle.UnpicklingError:
        raise InputError(
            "holds more than tensors, or is damaged; nothing but tensors is loaded from a pickle",
            where=str(path),
        ) from None
    except Exception as error:  # a damaged pickle is a damaged program: it can raise anything
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        raise InputError(f"cannot be read as what torch.save wrote ({reason})", where=str(path)) from None


def _numbers(value: Any, where: str) -> Tensor:
    """A tensor, or a list of whole numbers, as some versions wrote tokens."""
    if isinstance(value, list) and all(isinstance(item, int) for item in value):
        return torch.tensor(value, dtype=torch.int64)
    if not isinstance(value, Tensor):
        raise InputError(f"is a {type(value).__name__}, expected a tensor", where=where)
    return value


def _require_named(found: Iterable[object], expected: set[str], path: Path) -> None:
    if not expected <= set(found):
        raise InputError(
            f"is no hidden-state file: it holds {', '.join(sorted(map(str, found))[:5]) or 'nothing'}; "
            f"expected {', '.join(sorted(expected))}",
            where=str(path),
        )


def _fitting(token_ids: Tensor, states: Tensor, answered: Tensor | None, path: Path) -> Features:
    """The parts of a file, which must be about the same tokens."""
    token_ids = token_ids.reshape(-1)
    if token_ids.is_floating_point() or not states.is_floating_point():
        raise InputError(f"its tokens are {token_ids.dtype}, its states {states.dtype}", where=str(path))
    if len(token_ids) != len(states) or (answered is not None and len(answered) != len(token_ids)):
        mask = "" if answered is None else f", and a loss_mask of {len(answered)}"
        raise InputError(f"holds {len(token_ids)} tokens, the states of {len(states)}{mask}", where=str(path))
    return Features(token_ids.long(), states, answered)


def _masks_beside(folder: Path) -> Callable[[Path], Tensor] | None:
    """The column loss_mask of the dataset that files were made from: hs_7.safetensors is its row 7."""
    place = next((p for p in (folder, folder.parent) if (p / "dataset_info.json").exists()), None)
    if place is None:
        return None
    try:
        arrow: Any = importlib.import_module("pyarrow")
        ipc: Any = importlib.import_module("pyarrow.ipc")
    except ImportError:
        raise UsageError(
            "this dataset tells which tokens are answers, and reading it needs pyarrow",
            where=str(place),
            hint="pip install pyarrow; or move the hs_*.safetensors elsewhere, and every token is an answer.",
        ) from None
    try:
        files = sorted(place.glob("*.arrow"), key=_natural)
        tables = [ipc.open_stream(arrow.memory_map(str(path))).read_all() for path in files]
        rows = arrow.concat_tables(tables)["loss_mask"]
    except (OSError, ValueError, KeyError, arrow.ArrowException) as error:
        raise InputError(f"is no dataset with a column loss_mask ({error})", where=str(place)) from None

    def mask_of(path: Path) -> Tensor:
        number = re.fullmatch(r"hs_(\d+)", path.stem)
        if number is None or int(number[1]) >= len(rows):
            raise InputError(f"is of none of the {len(rows)} rows of {place}", where=str(path))
        return torch.tensor(rows[int(number[1])].as_py()) != 0

    return mask_of


def _suffix(path: Path) -> str | None:
    """The kind of file that a name tells; None for what else stands in such folders (token_freq.pt)."""
    if path.suffix == ".safetensors":
        return None if path.name.startswith(".") else path.suffix
    found = re.fullmatch(r"data_\d+(\.pt|\.ckpt|\.ckpt\.gz)", path.name)
    return found[1] if found else None


def _natural(path: Path) -> tuple[list[int], str]:
    return [int(number) for number in re.findall(r"\d+", path.name)], str(path)
