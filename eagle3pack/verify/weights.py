"""Which files of a folder hold its weights, and what their headers say, told rather than raised.

`checkpoint.files` opens what is sound and raises on the rest; a verifier must go on and say all that
is wrong at once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from eagle3pack.checkpoint.header import Header, TensorEntry, read_header
from eagle3pack.documents import read_json_object
from eagle3pack.draft.tensors import logical_name
from eagle3pack.errors import Eagle3PackError

SINGLE_NAME = "model.safetensors"
INDEX_NAME = "model.safetensors.index.json"
PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt")


@dataclass(frozen=True, slots=True)
class WeightFiles:
    """The files of a draft's folder that hold weights.

    Attributes:
        has_single: model.safetensors is there.
        index: the index file's JSON; None where there is none or it cannot be read.
        has_index: the index file is there.
        index_problem: why the index cannot be read, or "".
        index_is_stale: model.safetensors is there and not one shard of the index.
        used: the safetensors files that engines load, sorted by name.
        missing: shards of the index that are not there.
        orphans: safetensors files that the index does not name.
        pickles: .bin and .pt files.
    """

    has_single: bool
    has_index: bool
    index: Mapping[str, Any] | None
    index_problem: str
    index_is_stale: bool
    used: tuple[Path, ...]
    missing: tuple[str, ...]
    orphans: tuple[str, ...]
    pickles: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Headers:
    """The headers of the used files.

    Attributes:
        headers: those that can be read.
        problems: file name -> what is wrong with its header.
        tensors: logical name -> entry; the last one where two spellings collide.
        duplicates: logical name -> every (file name, tensor name), where there are several.
        hints: file name -> what to do about its problem, where the problem tells.
    """

    headers: tuple[Header, ...]
    problems: Mapping[str, str]
    tensors: Mapping[str, TensorEntry] = field(repr=False)
    duplicates: Mapping[str, tuple[tuple[str, str], ...]]
    hints: Mapping[str, str]


def find_weight_files(folder: Path) -> WeightFiles:
    """List the weight files of a folder. A folder that cannot be listed has none."""
    try:
        names = sorted(path.name for path in folder.iterdir() if not path.is_dir())
    except OSError:
        names = []
    safetensors = [name for name in names if name.endswith(".safetensors")]
    has_single, has_index = SINGLE_NAME in names, INDEX_NAME in names
    index, problem = _read_index(folder / INDEX_NAME) if has_index else (None, "")
    named = sorted(set(index["weight_map"].values())) if index is not None else []
    shards = [name for name in named if name in safetensors]
    stale = index is not None and has_single and not shards
    loose = [SINGLE_NAME] if has_single else safetensors
    used = loose if index is None or stale else shards
    return WeightFiles(
        has_single,
        has_index,
        index,
        problem,
        stale,
        used=tuple(folder / name for name in used),
        missing=tuple(name for name in named if name not in safetensors),
        orphans=tuple(name for name in safetensors if name not in used),
        pickles=tuple(name for name in names if name.endswith(PICKLE_SUFFIXES)),
    )


def _read_index(path: Path) -> tuple[Mapping[str, Any] | None, str]:
    try:
        index = read_json_object(path)
    except Eagle3PackError as error:
        return None, error.problem
    weight_map = index.get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
        return None, "weight_map is no object of tensor names and file names"
    return index, ""


def read_headers(files: WeightFiles) -> Headers:
    """Read the header of every used file; the cost does not depend on the size of the files."""
    headers, problems, hints = [], {}, {}
    for path in files.used:
        try:
            headers.append(read_header(path))
        except Eagle3PackError as error:
            problems[path.name] = error.problem
            hints[path.name] = error.hint
    spellings: dict[str, list[tuple[str, str]]] = {}
    tensors: dict[str, TensorEntry] = {}
    for header in headers:
        for entry in header.tensors:
            logical = logical_name(entry.name)
            tensors[logical] = entry
            spellings.setdefault(logical, []).append((entry.path.name, entry.name))
    duplicates = {name: tuple(places) for name, places in spellings.items() if len(places) > 1}
    return Headers(tuple(headers), problems, tensors, duplicates, hints)
