"""What TorchSpec and SpecForge have in common: one EAGLE3 draft model, `midlayer`, and its limits."""

from __future__ import annotations

from typing import Any

from eagle3pack.convert.handoff.draft import ConvertedDraft
from eagle3pack.draft.config import DraftConfig
from eagle3pack.draft.producers import PORTABLE_ARCHITECTURE
from eagle3pack.draft.target import default_aux_layer_ids
from eagle3pack.errors import UnsupportedDraftError

# Keys of the speculators format that a flat config has no place for.
_NESTED = ("transformer_layer_config", "speculators_config", "speculators_model_type", "speculators_version")


def require_one_plain_layer(
    config: DraftConfig, option: str, release: str, rope_types: frozenset[str]
) -> None:
    """Refuse what the EAGLE3 draft model of TorchSpec and SpecForge has no place for.

    Args:
        config: of the draft.
        option: the option that asked for it.
        release: of the framework.
        rope_types: that it computes as transformers does.

    Raises:
        UnsupportedDraftError: the framework would drop a tensor or compute otherwise, mostly in silence.
    """
    reasons = {
        f"it has {config.num_hidden_layers} decoder layers": config.num_hidden_layers != 1,
        "norm_before_residual is true": config.norm_before_residual,
        "norm_before_fc is true": config.norm_before_fc,
        "norm_output is true": config.norm_output,
        "its attention has biases": config.attention_bias,
        f"{config.architecture} norms queries and keys": config.qk_norm,
        f"it reads {config.num_aux_hidden_states} auxiliary hidden states": config.num_aux_hidden_states != 3,
        "it reads no auxiliary hidden states": not config.use_aux_hidden_state,
        f"its rope_type is {config.rope.rope_type}": config.rope.rope_type not in rope_types,
        "only a part of each head is rotated": config.rope.partial_rotary_factor != 1,
        f"it is quantised ({config.quantization})": config.quantization is not None,
    }
    for reason, applies in reasons.items():
        if applies:
            raise UnsupportedDraftError(
                f"{release} cannot train this draft: {reason}",
                where=option,
                hint="See docs/retraining.md for what each framework trains.",
            )


def native_config(config: DraftConfig) -> dict[str, Any]:
    """A flat config.json under the one architecture that TorchSpec and SpecForge know.

    Rotary settings are written in both spellings: TorchSpec runs with transformers 4, which takes 10000 for
    a theta that stands in `rope_parameters` alone.
    """
    raw: dict[str, Any] = dict(config.raw)
    if config.dialect == "speculators":
        raw = {**config.raw["transformer_layer_config"], **config.raw}
        raw = {key: value for key, value in raw.items() if key not in _NESTED and value is not None}
    if config.rope.theta is not None:
        raw |= {**config.rope.as_v4(), "rope_parameters": config.rope.as_v5()}
    return raw | {
        "architectures": [PORTABLE_ARCHITECTURE],
        "model_type": "llama",
        "num_hidden_layers": config.num_hidden_layers,
        "num_key_value_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "draft_vocab_size": config.draft_vocab_size,
        "tie_word_embeddings": False,
    }


def capture_layers(draft: ConvertedDraft) -> tuple[tuple[int, ...] | None, tuple[str, ...]]:
    """The auxiliary layers as TorchSpec and SpecForge number them: i is the state after layer i.

    vLLM's number k is the state after k layers, so that i = k - 1. A config.json does not say which of the
    two it means: the target's default is known in either, anything else is read as vLLM reads it.

    Returns:
        The numbers, None where the draft names none (each framework's default is vLLM's default); and what
        was taken for granted.

    Raises:
        UnsupportedDraftError: vLLM's layer 0, the embedding, which has no number there.
    """
    ids = draft.config.aux_hidden_state_layer_ids
    if ids is None:
        return None, ()
    if draft.target:
        default = default_aux_layer_ids(draft.target.num_hidden_layers)
        after = tuple(k - 1 for k in default)
        if ids in (default, after):
            return after, ()
    if 0 in ids:
        raise UnsupportedDraftError(
            f"eagle_aux_hidden_state_layer_ids {list(ids)} has the embedding (0), which the framework "
            "cannot capture",
            where="config.json",
        )
    layers = tuple(k - 1 for k in ids)
    note = (
        f"auxiliary layers: config.json says {list(ids)}, read as vLLM counts (states after k layers); "
        f"here that is {list(layers)}. If the draft was trained with this framework on {list(ids)}, write "
        "those into run.yaml"
    )
    return layers, (note,)


def midlayer_name(logical: str) -> str:
    """A tensor's name in that model."""
    return "midlayer." + logical.removeprefix("layers.0.") if logical.startswith("layers.0.") else logical
