"""A trainer's model sharded over processes of this machine: FSDP2 on gloo, state as TorchSpec keeps it.

python fsdp.py RANK WORLD WEIGHTS save|load CHECKPOINT
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path


def run_ranks(world: int, weights: Path, *, save: Path | None = None, load: Path | None = None) -> None:
    """Shard a draft over processes, and save it or load a checkpoint over it.

    Args:
        world: number of processes.
        weights: safetensors file with the draft's tensors.
        save: folder to save to.
        load: folder to load from; what the model then holds replaces `weights`.
    """
    arguments = [str(world), str(weights), "save" if save else "load", str(save or load)]
    ranks = [
        subprocess.Popen([sys.executable, "-W", "ignore", __file__, str(rank), *arguments])
        for rank in range(world)
    ]
    assert [rank.wait(timeout=300) for rank in ranks] == [0] * world


def main(rank: int, world: int, weights: str, action: str, folder: str) -> None:
    """What one process does."""
    import torch
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    from safetensors.torch import load_file, save_file
    from torch.distributed.checkpoint.state_dict import (
        StateDictOptions,
        get_model_state_dict,
        get_state_dict,
        set_state_dict,
    )
    from torch.distributed.checkpoint.stateful import Stateful
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    dist.init_process_group("gloo", init_method=f"file://{weights}.meet", rank=rank, world_size=world)
    model = torch.nn.Module()
    model.draft_model = torch.nn.Module()
    for name, tensor in load_file(weights).items():
        place, *outer = model.draft_model, *name.split(".")
        inner = outer.pop()
        for part in outer:
            if not hasattr(place, part):
                place.add_module(part, torch.nn.Module())
            place = getattr(place, part)
        if tensor.is_floating_point():
            frozen = name == "embed_tokens.weight"
            place.register_parameter(inner, torch.nn.Parameter(tensor, requires_grad=not frozen))
        else:
            place.register_buffer(inner, tensor)
    fully_shard(model, mesh=init_device_mesh("cpu", (world,)))

    class ModelState(Stateful):
        def state_dict(self) -> dict[str, object]:
            return {"model": get_state_dict(model, optimizers=[])[0]}

        def load_state_dict(self, state: dict[str, object]) -> None:
            set_state_dict(model, optimizers=[], model_state_dict=state["model"], optim_state_dict=None)

    if action == "save":
        dcp.save({"model_state": ModelState()}, checkpoint_id=folder)
    else:
        dcp.load({"model_state": ModelState()}, checkpoint_id=folder)
        whole = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
        if rank == 0:
            save_file({name.removeprefix("draft_model."): x for name, x in whole.items()}, weights)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:])
