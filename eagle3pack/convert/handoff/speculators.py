"""speculators: the draft in its own format, for `--from-pretrained`.

Its trainer takes the whole model from the folder. A vocabulary map that lies in its data folder would be
put over the draft's, unless `--d2t-path` and `--t2d-path` name one: they name the draft's own.

Source: speculators 0.9.0 and c05b95b3, src/speculators/{config,model}.py, models/eagle3/*.py, train/cli.py
    (scripts/train.py before 0.9.0).
"""

from __future__ import annotations

import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

from eagle3pack.checkpoint.header import TensorEntry
from eagle3pack.checkpoint.reading import read_tensor
from eagle3pack.convert.handoff.draft import ConvertedDraft, Written, vocabulary_maps, write_draft
from eagle3pack.draft.config import DraftConfig
from eagle3pack.draft.target import TargetSpec
from eagle3pack.errors import UnsupportedDraftError, UsageError

RELEASE = "speculators 0.9.0"
# It means to take what is missing from the target, and knows it by NaN; under transformers 5.19 such a tensor
# is uninitialised memory instead, with which it then trains. So nothing may be missing.
NEEDS: tuple[str, ...] = ("embed_tokens.weight", "lm_head.weight")
DRAFT = "draft"
FROZEN = f"{RELEASE} keeps embedding and lm_head as they are; the layer, fc and norms are trained"
_OPTION = "--retrain-with speculators"
_SPECULATIVE_TOKENS = 3  # what the format wants said; engines and `--ttt-steps` have their own
_KEPT = ("attention_dropout", "bos_token_id", "eos_token_id", "initializer_range", "pad_token_id")


def require(config: DraftConfig, target: TargetSpec | None) -> None:
    """Refuse a draft that this release cannot train.

    Raises:
        UnsupportedDraftError: it would compute otherwise.
        UsageError: the target is not known.
    """
    reasons = {
        f"it reads states of {config.target_hidden_size} and has {config.hidden_size} of its own": (
            config.target_hidden_size != config.hidden_size
        ),
        "it reads no auxiliary hidden states": not config.use_aux_hidden_state,
        "norm_before_fc and fc_norm are both true": config.norm_before_fc and config.fc_norm,
        f"it is quantised ({config.quantization})": config.quantization is not None,
    }
    for reason, applies in reasons.items():
        if applies:
            raise UnsupportedDraftError(f"{RELEASE} cannot train this draft: {reason}", where=_OPTION)
    if target is None and not _named_target(config):
        raise UsageError("the speculators format names the target", where=_OPTION, hint="Give --target.")


def _named_target(config: DraftConfig) -> str | None:
    """The target that a config of this format names."""
    section = config.raw.get("speculators_config")
    verifier = section.get("verifier") if isinstance(section, dict) else None
    name = verifier.get("name_or_path") if isinstance(verifier, dict) else None
    return name if isinstance(name, str) and name else None


def write(draft: ConvertedDraft, folder: Path, place: Path, on_bytes: Callable[[int], None]) -> Written:
    """Write the draft in the speculators format and, for a smaller vocabulary, its maps.

    Args:
        draft: the converted draft.
        folder: empty.
        place: what the folder will be called.
        on_bytes: told how many more bytes are written.
    """
    config = speculators_config(draft.config, draft.target_reference, _architectures(draft.target))
    tensors = {name: entry for name, entry in draft.tensors.items() if name not in ("d2t", "t2d")}
    maps = ""
    if not draft.config.has_full_vocabulary:
        tensors |= {entry.name: entry for entry in vocabulary_maps(draft)}
        for name in ("d2t", "t2d"):
            _save_npy(folder / f"{name}.npy", tensors[name])
            maps += f" --{name}-path {shlex.quote(str(place / f'{name}.npy'))}"
    write_draft(folder / DRAFT, config, tensors.items(), draft.shard_bytes, on_bytes)
    target = draft.target_reference or _named_target(draft.config) or "TARGET"
    return Written(
        f"speculators train --speculator-type eagle3 --verifier-name-or-path {shlex.quote(target)} "
        f"--from-pretrained {shlex.quote(str(place / DRAFT))}{maps} --data-path DATA --save-path RUN",
        (FROZEN,),
    )


def _architectures(target: TargetSpec | None) -> list[str]:
    return [target.architecture] if target else []


def speculators_config(
    config: DraftConfig, target: str | None, target_architectures: list[str]
) -> dict[str, Any]:
    """A config.json of the speculators format.

    Args:
        config: of the draft; one of this format already is kept but for its target.
        target: a path or ORG/NAME; None keeps the one that the config names.
        target_architectures: of the target's config.json.
    """
    verifier = {"name_or_path": target, "architectures": target_architectures}
    if config.dialect == "speculators" and isinstance(config.raw.get("speculators_config"), dict):
        section = config.raw["speculators_config"]
        return {**config.raw, "speculators_config": {**section, "verifier": verifier} if target else section}
    ids = config.aux_hidden_state_layer_ids
    return {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_version": RELEASE.removeprefix("speculators "),
        "draft_vocab_size": config.draft_vocab_size,
        "eagle_aux_hidden_state_layer_ids": list(ids) if ids else None,
        "norm_before_residual": config.norm_before_residual,
        "norm_before_fc": config.norm_before_fc,
        "fc_norm": config.fc_norm,
        "norm_output": config.norm_output,
        "embed_requires_grad": False,
        "target_hidden_size": None,
        "tie_word_embeddings": False,
        "dtype": config.dtype,
        "transformer_layer_config": _layer_config(config),
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": _SPECULATIVE_TOKENS}],
            "verifier": verifier,
        },
    }


def _layer_config(config: DraftConfig) -> dict[str, Any]:
    layer: dict[str, Any] = {
        "model_type": "qwen3" if config.qk_norm else "llama",
        "hidden_size": config.hidden_size,
        "num_hidden_layers": config.num_hidden_layers,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "intermediate_size": config.intermediate_size,
        "vocab_size": config.vocab_size,
        "hidden_act": config.hidden_act,
        "rms_norm_eps": config.rms_norm_eps,
        "attention_bias": config.attention_bias,
        "max_position_embeddings": config.max_position_embeddings,
        "tie_word_embeddings": False,
        **{key: config.raw.get(key) for key in _KEPT},
    }
    if config.rope.theta is not None:
        layer |= {**config.rope.as_v4(), "rope_parameters": config.rope.as_v5()}
    return {key: value for key, value in layer.items() if value is not None}


def _save_npy(path: Path, entry: TensorEntry) -> None:
    import numpy as np

    np.save(path, np.frombuffer(read_tensor(entry), dtype=np.int64 if entry.dtype == "I64" else np.bool_))
