"""SpecForge: a run that starts from the converted draft's weights.

`model.draft_checkpoint_path` is a folder as transformers reads it. Its loader wants every buffer of its
model, so that t2d and d2t are written for a whole vocabulary too; and where `model.vocab_mapping_path`
is silent it makes a map of the training data and puts it over the draft's, so that this is written too.

Source: SpecForge 0.2.0 and a6b6b023, specforge/training/{model_loading,assembly}.py,
    algorithms/{model_providers,eagle3/providers}.py, modeling/draft/{base,llama3_eagle}.py, config/schema.py.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable
from pathlib import Path

from eagle3pack.checkpoint.as_torch import load_tensor
from eagle3pack.checkpoint.header import TensorEntry
from eagle3pack.convert.handoff.draft import ConvertedDraft, Written, vocabulary_maps, write_draft
from eagle3pack.convert.handoff.one_layer import (
    capture_layers,
    midlayer_name,
    native_config,
    require_one_plain_layer,
)
from eagle3pack.convert.handoff.yaml import render_yaml
from eagle3pack.draft.config import DraftConfig
from eagle3pack.draft.target import TargetSpec
from eagle3pack.errors import UsageError

RELEASE = "SpecForge 0.2.0"
NEEDS: tuple[str, ...] = ("lm_head.weight",)  # its loader takes a missing embedding, and the target's instead
MAPS = "vocab_mapping.pt"
DRAFT = "draft"
_ROPE_TYPES = frozenset({"default", "linear", "dynamic", "llama3", "yarn"})
OFFLINE = (
    "run.yaml is for precomputed hidden states; to capture them from a server while training, put its "
    "`model` section into the recipe that trained the draft"
)


def require(config: DraftConfig, target: TargetSpec | None) -> None:
    """Refuse a draft that this release cannot train.

    Raises:
        UnsupportedDraftError: it would compute otherwise.
        UsageError: the target is not known.
    """
    option = "--retrain-with specforge"
    require_one_plain_layer(config, option, RELEASE, _ROPE_TYPES)
    if target is None:
        raise UsageError("SpecForge's configuration names the target", where=option, hint="Give --target.")


def write(draft: ConvertedDraft, folder: Path, place: Path, on_bytes: Callable[[int], None]) -> Written:
    """Write the draft as SpecForge names it, its vocabulary map and a run configuration.

    Args:
        draft: the converted draft.
        folder: empty.
        place: what the folder will be called.
        on_bytes: told how many more bytes are written.
    """
    config = native_config(draft.config)
    # SpecForge's norm_output is another: whether `norm` stands before lm_head; true where the key is absent.
    config.pop("norm_output", None)
    d2t, t2d = vocabulary_maps(draft)
    tensors = {name: entry for name, entry in draft.tensors.items() if name not in ("d2t", "t2d")}
    named = [(midlayer_name(name), entry) for name, entry in tensors.items()]
    named += [("d2t", d2t), ("t2d", t2d)]
    write_draft(folder / DRAFT, config, named, draft.shard_bytes, on_bytes)
    _save_maps(folder / MAPS, d2t, t2d)
    layers, notes = capture_layers(draft)
    text = render_yaml(
        {
            "model": {
                "target_model_path": draft.target_reference,
                "draft_checkpoint_path": str(place / DRAFT),
                "vocab_mapping_path": str(place / MAPS),
                "load_target_embedding": "embed_tokens.weight" not in draft.tensors,
                "aux_hidden_state_layer_ids": list(layers) if layers else None,
            },
            "data": {"hidden_states_path": "hidden_states"},
            "training": {"strategy": "eagle3"},
            "deployment": {"mode": "local_colocated"},
            "output_dir": "retrained",
        },
        "SpecForge: training from the converted draft's weights; add data, steps and GPUs of your run.",
    )
    (folder / "run.yaml").write_text(text, "utf-8")
    return Written(
        f"specforge train --config {shlex.quote(str(place / 'run.yaml'))} "
        "data.hidden_states_path=FEATURES output_dir=RUN",
        (*notes, OFFLINE),
    )


def _save_maps(path: Path, d2t: TensorEntry, t2d: TensorEntry) -> None:
    """The file of `model.vocab_mapping_path`: torch.save of both tensors by name."""
    import torch

    torch.save({"d2t": load_tensor(d2t), "t2d": load_tensor(t2d)}, path)
