"""Run by SpecForge's Python: build the draft of a hand-off as its trainer does, and save what it holds.

python read_specforge.py RUN_YAML OUT
"""

import sys

import torch
from safetensors.torch import save_file
from specforge.algorithms.eagle3.providers import algorithm_providers
from specforge.config import load_config
from specforge.core.compact_teacher import validate_vocab_mapping_consistency
from specforge.modeling.auto import AutoDraftModel
from specforge.training.model_loading import resolve_draft_config, warm_start_draft_model

config = load_config(sys.argv[1], ["data.hidden_states_path=features", "output_dir=run"])
provider = algorithm_providers().model
draft_config = resolve_draft_config(config, provider=provider.draft_config)
model = AutoDraftModel.from_config(draft_config, attention_backend="sdpa", torch_dtype=torch.bfloat16)
report = warm_start_draft_model(
    model,
    config.model.draft_checkpoint_path,
    draft_config=draft_config,
    strategy=config.training.strategy,
    allow_missing_embedding=provider.allow_missing_warm_start_embedding,
)
assert not report.missing_keys, report
model.load_vocab_mapping(config.model.vocab_mapping_path)
validate_vocab_mapping_consistency(model.t2d, model.d2t)
assert provider.resolve_capture_layers(config, draft_config, None) == [1, 3, 4]
assert model.norm_output
rope = model.midlayer.self_attn.rotary_emb.inv_freq.float()
tensors = {name: x.contiguous() for name, x in model.state_dict().items()}
save_file({**tensors, "inv_freq": rope.clone()}, sys.argv[2])
