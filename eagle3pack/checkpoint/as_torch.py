"""Stored tensors as torch's, for those who compute with them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from eagle3pack.checkpoint.header import TORCH_DTYPES, TensorEntry
from eagle3pack.checkpoint.reading import read_tensor
from eagle3pack.errors import InputError

if TYPE_CHECKING:
    import torch

_NAMES = {stored: name for name, stored in TORCH_DTYPES.items()}


def torch_dtype(entry: TensorEntry) -> torch.dtype:
    """What torch calls the dtype of a stored tensor.

    Raises:
        InputError: torch has no such dtype.
    """
    import torch

    if entry.dtype not in _NAMES:
        raise InputError(f"the tensor {entry.name} is stored as {entry.dtype}", where=str(entry.path))
    dtype = getattr(torch, _NAMES[entry.dtype])
    assert isinstance(dtype, torch.dtype)
    return dtype


def load_tensor(entry: TensorEntry) -> torch.Tensor:
    """Read a tensor, in its own dtype and shape.

    Raises:
        InputError: torch has no such dtype, or the file ends before the tensor does.
        PermissionDenied: the file may not be read.
    """
    import torch

    dtype = torch_dtype(entry)
    if not entry.nbytes:
        return torch.empty(entry.shape, dtype=dtype)
    return torch.frombuffer(read_tensor(entry), dtype=dtype).reshape(entry.shape)
