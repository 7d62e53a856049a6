"""Weights that torch.save wrote: SafeAILab's first releases, `pytorch_model.bin` and the like.

`torch.load(weights_only=True, mmap=True)` reads them: no code in the pickle runs, and a tensor's pages
come from the file when they are needed. This module is the only one here that imports torch.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from eagle3pack.checkpoint.files import (
    PICKLE_INDEX_FILE,
    Checkpoint,
    merge_tensors,
    read_weight_map,
    require_agreement,
)
from eagle3pack.checkpoint.header import TORCH_DTYPES, Header, TensorEntry, is_tensor_name
from eagle3pack.checkpoint.opening import opened, require_weights
from eagle3pack.documents import describe
from eagle3pack.errors import InputError

if TYPE_CHECKING:
    import torch

_ZIP = b"PK\x03\x04"


def open_pickles(folder: Path, names: list[str]) -> Checkpoint:
    """Open the pickled weights of a folder: one file, or shards that an index lists.

    Args:
        folder: the model.
        names: the pickles in it.

    Raises:
        InputError: several files without an index, or a file that holds anything but tensors.
        PermissionDenied: one may not be read.
    """
    index_path = folder / PICKLE_INDEX_FILE
    if not index_path.exists():
        if len(names) > 1:
            raise InputError(
                f"holds {len(names)} pickles ({', '.join(names)}) and no {PICKLE_INDEX_FILE}",
                where=str(folder),
                hint="Keep the one with the draft's weights.",
            )
        header = _read_pickle(folder / names[0])
        return Checkpoint(folder, (header,), merge_tensors([header]))
    weight_map, total_size = read_weight_map(index_path)
    headers = tuple(_read_pickle(folder / file) for file in sorted(set(weight_map.values())))
    tensors = merge_tensors(headers)
    require_agreement(weight_map, tensors, index_path)
    return Checkpoint(folder, headers, tensors, index_path, total_size)


def _read_pickle(path: Path) -> Header:
    """The tensors of one file, each with a way to its bytes."""
    with opened(path) as descriptor:
        head, file_bytes = os.pread(descriptor, 32, 0), os.fstat(descriptor).st_size
    if not head.startswith(_ZIP):
        require_weights(head, path)
    state = _load(path)
    if not isinstance(state, dict):
        raise InputError(f"holds a {type(state).__name__}, expected tensors by name", where=str(path))
    entries = tuple(_entry(name, value, path) for name, value in state.items())
    return Header(path, entries, {}, 0, file_bytes)


def _load(path: Path) -> object:
    import torch

    try:
        return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except pickle.UnpicklingError:
        raise InputError(
            "holds more than tensors, or is damaged; nothing but tensors is loaded from a pickle",
            where=str(path),
            hint="Save the bare weights, model.state_dict(), with safetensors.",
        ) from None
    except Exception as error:  # a damaged pickle is a damaged program: it can raise anything
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        raise InputError(
            f"cannot be read as weights that torch.save wrote ({reason})",
            where=str(path),
            hint="Download it again; what PyTorch before 1.6 wrote must be loaded and saved again.",
        ) from None


def _entry(name: object, value: object, path: Path) -> TensorEntry:
    import torch

    where = f"{path}: {describe(name)}"
    if not isinstance(name, str) or not is_tensor_name(name) or not isinstance(value, torch.Tensor):
        raise InputError(
            f"is a {type(value).__name__}, expected a tensor under a name",
            where=where,
            hint="A training checkpoint wraps the weights; save the bare state dict, model.state_dict().",
        )
    dtype = str(value.dtype).removeprefix("torch.")
    if value.layout != torch.strided or dtype not in TORCH_DTYPES:
        raise InputError(f"is a {dtype} tensor in {value.layout}, which safetensors cannot hold", where=where)
    return TensorEntry(name, TORCH_DTYPES[dtype], tuple(value.shape), path, 0, value.nbytes, _values(value))


def _values(tensor: torch.Tensor) -> Callable[[], memoryview]:
    """A way to the bytes of a tensor, row-major; strided or tied storages are laid out when asked for."""

    def read() -> memoryview:
        import torch

        flat = tensor.detach().contiguous().view(-1)  # to one dimension: a scalar has none
        return flat.view(torch.uint8).numpy().data

    return read
