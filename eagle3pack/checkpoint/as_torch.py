"""Stored tensors as torch's, for those who compute with them."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from eagle3pack.checkpoint.header import TORCH_DTYPES, TensorEntry
from eagle3pack.checkpoint.kernel import DISK_FULL
from eagle3pack.checkpoint.reading import read_tensor
from eagle3pack.errors import InputError, PermissionDenied, TransportError

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


def save_tensors(path: Path, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str]) -> None:
    """Write a safetensors file whole or not at all, its mode by the umask.

    Args:
        path: of the file.
        tensors: by name.
        metadata: of the header.

    Raises:
        PermissionDenied: it cannot be written there.
        TransportError: the disk is full, or broken.
    """
    temporary = path.with_name(f".{path.name}.part")
    try:
        temporary.touch()  # its mode follows the umask, that of the library's file does not
        mode = temporary.stat().st_mode
        _save({name: tensor.contiguous() for name, tensor in tensors.items()}, temporary, dict(metadata))
        temporary.chmod(mode)
        temporary.replace(path)
    except OSError as error:
        kind = TransportError if error.errno in (*DISK_FULL, errno.EIO) else PermissionDenied
        hint = "Check its folder and the disk, or name another file."
        raise kind(f"cannot be written ({error.strerror})", where=str(path), hint=hint) from None
    finally:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)


def _save(tensors: dict[str, torch.Tensor], path: Path, metadata: dict[str, str]) -> None:
    """The library's `save_file`, with what the system says as an OSError."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    try:
        save_file(tensors, path, metadata=metadata)
    except SafetensorError as error:
        code = re.search(r"os error (\d+)", str(error))
        if code is None:
            raise
        raise OSError(int(code[1]), os.strerror(int(code[1]))) from None
