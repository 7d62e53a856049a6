"""Run by TorchSpec's Python: load a hand-off as its trainer does, and save what the model then holds.

python read_torchspec.py RUN_YAML OUT
"""

import sys
from types import SimpleNamespace

import torch
from safetensors.torch import save_file
from torchspec import AutoDraftModelConfig, AutoEagle3DraftModel, Eagle3Model
from torchspec.config.train_config import config_to_flat_args, load_config
from torchspec.training import checkpoint

config = load_config(sys.argv[1], ["dataset.train_data_path=data", "output_dir=run"])
arguments = config_to_flat_args(config)
assert arguments.continual_training
draft = AutoEagle3DraftModel.from_config(
    AutoDraftModelConfig.from_file(arguments.draft_model_config),
    attention_backend="sdpa",
    torch_dtype=torch.bfloat16,
)
model = Eagle3Model(draft, length=7, attention_backend="sdpa")
loaded = checkpoint.load(SimpleNamespace(args=arguments, model=model))
assert loaded is not None and loaded["iteration"] == 0
tensors = {name.removeprefix("draft_model."): x.contiguous() for name, x in model.state_dict().items()}
rope = draft.midlayer.self_attn.rotary_emb.inv_freq.float()
save_file({**tensors, "inv_freq": rope.clone()}, sys.argv[2])
