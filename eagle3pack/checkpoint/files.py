"""A folder of weights: one file, or shards that an index lists; every tensor found once.

Engines differ in what they do with a shard too many or too few (vLLM loads files that no index
lists; most leave a missing tensor at its random values), so that here each of these is an error.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from eagle3pack.checkpoint.header import Header, TensorEntry, read_header
from eagle3pack.documents import describe, read_json_object
from eagle3pack.errors import InputError, PermissionDenied

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
PICKLE_INDEX_FILE = "pytorch_model.bin.index.json"
_CONVERT = (
    "`eagle3pack convert SOURCE OUT --num-kv-heads K`, K being the draft's own number of key/value heads, "
    "reads it and writes safetensors."
)
_SHARD = re.compile(r"-\d+-of-(?!0*1\.)\d+\.safetensors$")  # of more than one
PICKLE_SUFFIXES = (".bin", ".pt", ".pth")
# What Hugging Face's Trainer and accelerate leave beside the weights.
_TRAINER_STATE = ("training_args", "optimizer", "scheduler", "scaler", "rng_state", "random_states")


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """The weights in a folder.

    Attributes:
        folder: where they are.
        headers: one a file, in the order of the files' names.
        tensors: by name in the file; in the order of the files and of their bytes.
        index_path: the index, where there is one.
        index_total_size: what the index says all tensors have in bytes; None where it says nothing.
    """

    folder: Path
    headers: tuple[Header, ...]
    tensors: Mapping[str, TensorEntry]
    index_path: Path | None = None
    index_total_size: int | None = None

    @property
    def total_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(entry.nbytes for entry in self.tensors.values())


def open_checkpoint(folder: Path, *, partial: bool = False, pickles: bool = False) -> Checkpoint:
    """Read the headers of all weight files of a folder.

    Args:
        folder: the model.
        partial: shards may be missing; their tensors are then left out (a target of which only some
            files were fetched).
        pickles: read `.bin` and `.pt` files too, where there are no safetensors (this imports torch), and
            the folders that a trainer saved with torch.distributed.checkpoint.

    Raises:
        InputError: no weights, a file that breaks its format, or files and index that do not agree.
        PermissionDenied: something may not be read.
    """
    names = list_files(folder)
    weights = [name for name in names if name.endswith(".safetensors")]
    if INDEX_FILE in names:
        return _open_shards(folder, weights, partial)
    if not weights:
        from eagle3pack.checkpoint.distributed import model_folder, open_distributed

        if model := model_folder(folder):
            if pickles:
                return open_distributed(model)
            raise InputError(
                "is a training checkpoint",
                where=str(folder),
                hint=_CONVERT,
            )
        return _open_pickles(folder, names, pickles)
    if len(weights) > 1:
        raise InputError(
            f"holds {len(weights)} weight files ({_some(weights)}) and no {INDEX_FILE}",
            where=str(folder),
            hint="Download the index too, or delete the files that do not belong to this model.",
        )
    if _SHARD.search(weights[0]) and not partial:
        raise InputError(
            f"holds the shard {weights[0]} and no {INDEX_FILE}",
            where=str(folder),
            hint="Download the other shards and the index.",
        )
    header = read_header(folder / weights[0])
    return Checkpoint(folder, (header,), merge_tensors([header]))


def list_files(folder: Path) -> list[str]:
    """Names in a folder, sorted, hidden ones left out.

    Raises:
        InputError: there is no such folder.
        PermissionDenied: it may not be read.
    """
    try:
        return sorted(path.name for path in folder.iterdir() if not path.name.startswith("."))
    except (FileNotFoundError, NotADirectoryError):
        problem = "is no folder" if os.path.lexists(folder) else "does not exist"
        raise InputError(problem, where=str(folder), hint="SOURCE is a folder with config.json.") from None
    except PermissionError:
        raise PermissionDenied("may not be read", where=str(folder), hint="Check its mode.") from None
    except OSError as error:
        raise InputError(f"cannot be read ({error.strerror})", where=str(folder)) from None


def merge_tensors(headers: Iterable[Header]) -> dict[str, TensorEntry]:
    """All tensors of several files by name.

    Raises:
        InputError: two files hold a tensor of one name.
    """
    tensors: dict[str, TensorEntry] = {}
    for header in headers:
        for entry in header.tensors:
            if entry.name in tensors:
                raise InputError(
                    f"the tensor {describe(entry.name)} is in {tensors[entry.name].path.name} too",
                    where=str(header.path),
                    hint="Keep the shard that the index means and delete it from the other.",
                )
            tensors[entry.name] = entry
    return tensors


def read_weight_map(path: Path) -> tuple[dict[str, str], int | None]:
    """Read an index: tensor name -> file name, and the total size that it states.

    Raises:
        InputError: not such a document, or a file name that leads out of the folder.
        PermissionDenied: it may not be read.
    """
    raw = read_json_object(path)
    weight_map = raw.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise InputError(
            f"weight_map is {describe(weight_map)}, expected file names by tensor", where=str(path)
        )
    for name, file in weight_map.items():
        if not isinstance(file, str) or not file or file.startswith(".") or "/" in file or "\\" in file:
            raise InputError(
                f"weight_map[{describe(name)}] is {describe(file)}, expected the name of a file beside it",
                where=str(path),
            )
    metadata = raw.get("metadata")
    total = metadata.get("total_size") if isinstance(metadata, dict) else None
    return weight_map, total if type(total) is int else None


def _open_shards(folder: Path, weights: list[str], partial: bool) -> Checkpoint:
    """Open what an index lists."""
    index_path = folder / INDEX_FILE
    weight_map, total_size = read_weight_map(index_path)
    listed = sorted(set(weight_map.values()))
    missing = [file for file in listed if file not in weights]
    if missing and (not partial or len(missing) == len(listed)):
        raise InputError(
            f"lists {len(missing)} of {len(listed)} files that are not there ({_some(missing)})",
            where=str(index_path),
            hint="Download the missing shards.",
        )
    orphans = sorted(set(weights) - set(listed))
    if orphans and not partial:
        raise InputError(
            f"holds weight files that {INDEX_FILE} does not list ({_some(orphans)})",
            where=str(folder),
            hint="Delete them if they are left over from another save; engines may load them as well.",
        )
    headers = tuple(read_header(folder / file) for file in listed if file not in missing)
    tensors = merge_tensors(headers)
    found = {name: file for name, file in weight_map.items() if file not in missing}
    require_agreement(found, tensors, index_path)
    return Checkpoint(folder, headers, tensors, index_path, total_size)


def require_agreement(
    weight_map: Mapping[str, str], tensors: Mapping[str, TensorEntry], index_path: Path
) -> None:
    """Raise unless an index and its files name the same tensors at the same places.

    Raises:
        InputError: a tensor is only in one of them, or in another file than the index says.
    """
    for name, file in weight_map.items():
        found = tensors[name].path.name if name in tensors else "no file"
        if found != file:
            raise InputError(
                f"says that {describe(name)} is in {file}, but it is in {found}", where=str(index_path)
            )
    if unlisted := [name for name in tensors if name not in weight_map]:
        raise InputError(f"does not list {_some(unlisted)}", where=str(index_path))


def weight_pickles(names: Iterable[str]) -> list[str]:
    """Of the names in a folder, those of weights that torch.save wrote, trainer state left out."""
    return [name for name in names if name.endswith(PICKLE_SUFFIXES) and not name.startswith(_TRAINER_STATE)]


def _open_pickles(folder: Path, names: list[str], allowed: bool) -> Checkpoint:
    files = weight_pickles(names)
    if not files:
        raise InputError(
            "holds no weights (no *.safetensors)",
            where=str(folder),
            hint="Give the folder that the draft's config.json and weights are in.",
        )
    if not allowed:
        raise InputError(
            f"holds its weights as pickles ({_some(files)})",
            where=str(folder),
            hint=_CONVERT,
        )
    from eagle3pack.checkpoint.pickles import open_pickles

    return open_pickles(folder, files)


def _some(names: list[str]) -> str:
    """The first names of a list, for a message."""
    return ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
