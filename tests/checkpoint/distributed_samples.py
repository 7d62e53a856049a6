"""Checkpoints as TorchSpec's trainer saves them, made by torch.distributed.checkpoint itself."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType


class ShardedPlanner(DefaultSavePlanner):
    """Saves every tensor of two rows or more in pieces, as the ranks of FSDP would.

    Args:
        pieces: how many.
        dim: along which dimension.
    """

    def __init__(self, pieces: int, dim: int = 0) -> None:
        super().__init__()
        self.pieces, self.dim = pieces, dim

    def create_local_plan(self) -> SavePlan:
        """One item a piece instead of one a tensor."""
        plan = super().create_local_plan()
        return replace(plan, items=[piece for item in plan.items for piece in self._cut(item)])

    def _cut(self, item: WriteItem) -> list[WriteItem]:
        tensor = self.state_dict[item.index.fqn]
        if not isinstance(tensor, torch.Tensor) or tensor.dim() <= self.dim:
            return [item]
        cut, start = [], 0
        for part in tensor.tensor_split(self.pieces, self.dim):
            offset = torch.Size(start if d == self.dim else 0 for d in range(tensor.dim()))
            data = TensorWriteData(
                ChunkStorageMetadata(offset, part.size()),
                TensorProperties.create_from_tensor(tensor),
                tensor.size(),
            )
            cut.append(
                WriteItem(MetadataIndex(item.index.fqn, offset), WriteItemType.SHARD, tensor_data=data)
            )
            start += part.size(self.dim)
        return cut

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor:
        """The piece itself."""
        tensor = self.state_dict[write_item.index.fqn]
        assert isinstance(tensor, torch.Tensor)
        chunk = write_item.tensor_data.chunk if write_item.tensor_data else None
        assert chunk is not None
        for dim, (start, size) in enumerate(zip(chunk.offsets, chunk.sizes, strict=True)):
            tensor = tensor.narrow(dim, start, size)
        return tensor.contiguous()


def save_model(
    folder: Path, draft: Mapping[str, torch.Tensor], *, pieces: int = 1, dim: int = 0, files: int = 1
) -> Path:
    """Save the model part of an iteration, and something that is no draft beside it.

    Args:
        folder: of the iteration; its `model` folder is made.
        draft: by name within the draft.
        pieces: that every tensor is cut into.
        dim: along which dimension.
        files: that the pieces are spread over.
    """
    model = {f"draft_model.{name}": tensor for name, tensor in draft.items()}
    state = {"model_state": {"model": {**model, "other.weight": torch.ones(3)}}}
    writer = dcp.FileSystemWriter(folder / "model", single_file_per_rank=files == 1, thread_count=1)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        dcp.save(state, storage_writer=writer, planner=ShardedPlanner(pieces, dim), no_dist=True)
    return folder
