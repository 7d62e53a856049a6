"""TorchSpec: continual training from a checkpoint of torch.distributed.checkpoint.

`training.load_path` is a folder with `latest_checkpointed_iteration.txt` and `iter_0000000/model`; its
trainer loads every tensor of its own model from there by name, and trains on from random weights, with
one line in the log, where a single one is missing. So all of them are written, the embedding too.

Source: TorchSpec 6f21829 torchspec/training/{checkpoint,eagle3_trainer}.py (ModelState, Eagle3Model),
    models/draft/llama3_eagle.py, config/train_config.py, inference/engine/*.py.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable
from pathlib import Path

from eagle3pack.checkpoint.distributed import MODEL_FOLDER, TRACKER_FILE
from eagle3pack.convert.handoff.distributed import save_distributed
from eagle3pack.convert.handoff.draft import ConvertedDraft, Written, vocabulary_maps
from eagle3pack.convert.handoff.one_layer import (
    capture_layers,
    midlayer_name,
    native_config,
    require_one_plain_layer,
)
from eagle3pack.convert.handoff.yaml import render_yaml
from eagle3pack.documents import to_json
from eagle3pack.draft.config import DraftConfig
from eagle3pack.draft.target import TargetSpec
from eagle3pack.errors import UnsupportedDraftError

RELEASE = "TorchSpec 6f21829"
NEEDS: tuple[str, ...] = (
    "embed_tokens.weight",
    "lm_head.weight",
)  # lent by the target where the draft has none
ITERATION = "iter_0000000"
# {"model_state": ModelState} with ModelState's own {"model": ...}, and Eagle3Model.draft_model within.
PREFIX = ("model_state", "model", "draft_model.")
_ROPE_TYPES = frozenset({"default", "llama3", "yarn"})
_UNFILLED = "???"  # OmegaConf: to be given on the command line

REMAPPED = (
    f"{RELEASE} makes the vocabulary map anew from the training data and puts it over the draft's: retrain "
    "on the data that the draft was trained on, or every row of lm_head comes to stand for another token"
)


def require(config: DraftConfig, target: TargetSpec | None) -> None:
    """Refuse a draft that this release cannot train.

    Raises:
        UnsupportedDraftError: it would compute otherwise.
    """
    option = "--retrain-with torchspec"
    # Its linear and dynamic embeddings take no theta but 10000.
    any_theta = config.rope.theta in (None, 10000.0)
    types = _ROPE_TYPES | ({"linear", "dynamic"} if any_theta else frozenset())
    require_one_plain_layer(config, option, RELEASE, types)
    if config.fc_norm:
        raise UnsupportedDraftError(f"{RELEASE} cannot train this draft: fc_norm is true", where=option)


def write(draft: ConvertedDraft, folder: Path, place: Path, on_bytes: Callable[[int], None]) -> Written:
    """Write the checkpoint, the draft's config and a run configuration.

    Args:
        draft: the converted draft.
        folder: empty.
        place: what the folder will be called.
        on_bytes: told how many more bytes are written.
    """
    iteration = folder / ITERATION
    iteration.mkdir()
    (iteration / "config.json").write_text(to_json(native_config(draft.config)), "utf-8")
    tensors = {name: entry for name, entry in draft.tensors.items() if name not in ("d2t", "t2d")}
    notes: tuple[str, ...] = ()
    if not draft.config.has_full_vocabulary:
        tensors |= {entry.name: entry for entry in vocabulary_maps(draft)}
        notes = (REMAPPED,)
    *outer, inner = PREFIX
    save_distributed(
        iteration / MODEL_FOLDER,
        outer,
        {inner + midlayer_name(name): entry for name, entry in tensors.items()},
        on_bytes,
    )
    (folder / TRACKER_FILE).write_text("0", "utf-8")
    layers, more = capture_layers(draft)
    text = render_yaml(
        {
            "model": {
                "target_model_path": draft.target_reference or _UNFILLED,
                "draft_model_config": str(place / ITERATION / "config.json"),
            },
            "dataset": {"train_data_path": _UNFILLED},
            "training": {"load_path": str(place), "continual_training": True},
            **({"inference": {"aux_hidden_states_layers": list(layers)}} if layers else {}),
            "output_dir": _UNFILLED,
        },
        "TorchSpec: continual training of the converted draft; add engine, GPUs and data of your run.",
    )
    (folder / "run.yaml").write_text(text, "utf-8")
    target = "" if draft.target_reference else " model.target_model_path=TARGET"
    return Written(
        f"python -m torchspec.train_entry --config {shlex.quote(str(place / 'run.yaml'))}{target} "
        "dataset.train_data_path=DATA output_dir=RUN",
        (*notes, *more),
    )
