"""Run by speculators' Python: `--from-pretrained` of a hand-off, and save what the model then holds.

python read_speculators.py DRAFT OUT
"""

import sys

from safetensors.torch import save_file
from speculators.models.eagle3 import Eagle3DraftModel

model = Eagle3DraftModel.from_pretrained(sys.argv[1])
assert model.target_layer_ids == [2, 4, 5]
assert not model.lm_head.weight.requires_grad  # docs/retraining.md says so
tensors = {name: x.contiguous() for name, x in model.state_dict().items() if not name.startswith("verifier_")}
save_file({**tensors, "inv_freq": model.rotary_emb.inv_freq.float().clone()}, sys.argv[2])
