"""Writing a torch.distributed.checkpoint, one tensor at a time and without a process group.

torch's own writer does it, so that every reader of the format reads it. It is handed tensors without
data; the planner fetches each when the writer asks for it, as pages of the draft's file that the system
can drop again: what stays in memory does not grow with the draft.
"""

from __future__ import annotations

import mmap
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eagle3pack.checkpoint.as_torch import load_tensor, torch_dtype
from eagle3pack.checkpoint.header import TensorEntry
from eagle3pack.checkpoint.opening import opened

if TYPE_CHECKING:
    import torch


def save_distributed(
    folder: Path,
    outer: Sequence[str],
    tensors: Mapping[str, TensorEntry],
    on_bytes: Callable[[int], None],
) -> None:
    """Save tensors as torch.distributed.checkpoint.save does.

    The same tensors make the same bytes: what torch would note of this run (a random id, the folder's
    name) is left out.

    Args:
        folder: to make.
        outer: keys of the nested state dict that the tensors are in.
        tensors: by name in the innermost dict.
        on_bytes: told how many more bytes are about to be written.
    """
    import torch
    from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
    from torch.distributed.checkpoint.filesystem import FileSystemWriter
    from torch.distributed.checkpoint.metadata import StorageMeta
    from torch.distributed.checkpoint.planner import WriteItem
    from torch.distributed.checkpoint.state_dict_saver import save

    class Writer(FileSystemWriter):
        def storage_meta(self) -> StorageMeta:
            return StorageMeta()

    class Planner(DefaultSavePlanner):
        def resolve_data(self, write_item: WriteItem) -> torch.Tensor:
            entry = by_name[write_item.index.fqn]
            on_bytes(entry.nbytes)
            return _tensor(entry)

    by_name = {".".join([*outer, name]): entry for name, entry in tensors.items()}
    state: dict[str, Any] = {
        name: torch.empty(entry.shape, dtype=torch_dtype(entry), device="meta")
        for name, entry in tensors.items()
    }
    for key in reversed(outer):
        state = {key: state}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is")  # uninitialised: that is what we want
        save(state, storage_writer=Writer(folder), planner=Planner())


def _tensor(entry: TensorEntry) -> torch.Tensor:
    """A tensor over the bytes of an entry."""
    import torch

    if entry.values is not None or not entry.nbytes:
        return load_tensor(entry)
    with opened(entry.path) as descriptor:
        # Writable as torch wants it, and private: nothing can get back into the file.
        pages = mmap.mmap(descriptor, 0, access=mmap.ACCESS_COPY)
    count = entry.nbytes // torch_dtype(entry).itemsize
    flat = torch.frombuffer(pages, dtype=torch_dtype(entry), count=count, offset=entry.start)
    return flat.reshape(entry.shape)
