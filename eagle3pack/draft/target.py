"""What a draft must know of its target, read out of the target's config.json alone.

Multimodal targets keep the language model's shape under `text_config` (or a cousin of it); a draft
fits that inner model, so everything here is unwrapped first.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

from eagle3pack.checkpoint.files import PICKLE_SUFFIXES
from eagle3pack.documents import MAX_JSON_BYTES, parse_json_object, read_file, read_json_object
from eagle3pack.draft.fields import Fields
from eagle3pack.draft.rope import RopeConfig, parse_rope
from eagle3pack.errors import InputError, UsageError

AttentionKind = Literal["full", "sliding", "chunked", "linear", "sparse", "mla"]

# Where multimodal configs keep the language model: most, NVIDIA and InternVL, DeepSeek-VL, Qwen-Omni.
_TEXT_PATHS = (("text_config",), ("llm_config",), ("language_config",), ("thinker_config", "text_config"))

_LAYER_TYPES: Mapping[str, AttentionKind] = {
    "full_attention": "full",
    "attention": "full",
    "sliding_attention": "sliding",
    "chunked_attention": "chunked",
    "linear_attention": "linear",
    "mamba": "linear",
    "mamba2": "linear",
}

_WEIGHT_SUFFIXES = (".safetensors", ".gguf", ".ckpt", *PICKLE_SUFFIXES)


@dataclass(frozen=True, slots=True)
class TargetSpec:
    """The shape of a target's language model.

    Attributes:
        name: the target as the user gave it.
        architecture: the first of `architectures`, or "" where the config does not say.
        model_type: of the whole model.
        hidden_size: width of the hidden states that a draft is given.
        vocab_size: rows of the embedding and of the head, padding included.
        num_hidden_layers: decoder layers.
        num_attention_heads: query heads.
        num_key_value_heads: key/value heads; equal to the query heads where the config is silent.
        head_dim: width of one head; for MLA the width of a value head.
        max_position_embeddings: positions, or None where the config is silent.
        rope: rotary settings; theta None where the config is silent or uses a form of its own.
        dtype: "bfloat16" and the like, or None.
        bos_token_id: or None.
        eos_token_ids: every id that ends a text; empty where the config is silent.
        attention_kinds: what kinds of attention its layers use, in no order that means anything.
        mla_latent_size: values cached a token and layer by multi-head latent attention, or None.
        is_multimodal: the language model stood inside another config.
        tie_word_embeddings: the head is the embedding.
        quantization: the quantisation method, or None.
        raw: the whole JSON object.
        text: the language model's part of it; `raw` itself for a text model.
        config_sha256: of the bytes of config.json; None for a bundled shape.
        bundled_from: the public source of a shape that came with this package, or None.
        revision: the commit of a hub that it was read at; None elsewhere.
    """

    name: str
    architecture: str
    model_type: str
    hidden_size: int
    vocab_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int | None
    rope: RopeConfig
    dtype: str | None
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    attention_kinds: tuple[AttentionKind, ...]
    mla_latent_size: int | None
    is_multimodal: bool
    tie_word_embeddings: bool
    quantization: str | None
    raw: Mapping[str, Any] = field(repr=False, compare=False)
    text: Mapping[str, Any] = field(repr=False, compare=False)
    config_sha256: str | None = None
    bundled_from: str | None = None
    revision: str | None = None

    @property
    def bundled(self) -> bool:
        """The shape came with this package; nothing was read."""
        return self.bundled_from is not None

    @property
    def is_mla(self) -> bool:
        """Keys and values are one compressed latent, shared by all heads."""
        return self.mla_latent_size is not None

    @property
    def is_hybrid(self) -> bool:
        """Its layers do not all keep the same kind of KV cache."""
        return len(self.attention_kinds) > 1


def default_aux_layer_ids(num_hidden_layers: int) -> tuple[int, int, int]:
    """The auxiliary layers that engines take where a draft's config is silent.

    Ids count as vLLM does: k is the hidden state after k layers.

    Source: vLLM 0.32 model_executor/models/interfaces.py, SafeAILab/EAGLE modeling_llama_kv.py.
    """
    return (2, num_hidden_layers // 2, num_hidden_layers - 3)


def parse_target_config(
    raw: Mapping[str, Any], *, where: str, name: str, config_sha256: str | None = None
) -> TargetSpec:
    """Read a target's config.json.

    Args:
        raw: the JSON object.
        where: its file, as messages show it.
        name: the target as the user gave it.
        config_sha256: of the file's bytes, where it was a file.

    Raises:
        InputError: a key that a draft depends on is missing or has a wrong type.
    """
    top = Fields(raw, where)
    text = _text_part(top)
    hidden = text.integer("hidden_size")
    heads = text.integer("num_attention_heads")
    latent = _latent_size(text)
    head_dim = _head_dim(text, hidden, heads)
    return TargetSpec(
        name=name,
        architecture=next(iter(top.strings("architectures")), ""),
        model_type=top.string("model_type", ""),
        hidden_size=hidden,
        vocab_size=text.integer("vocab_size", _optional_integer(top, "vocab_size")),
        num_hidden_layers=text.integer("num_hidden_layers"),
        num_attention_heads=heads,
        num_key_value_heads=text.integer("num_key_value_heads", heads),
        head_dim=head_dim,
        max_position_embeddings=_optional_integer(text, "max_position_embeddings"),
        rope=_rope(text, head_dim),
        dtype=_dtype(text, top),
        bos_token_id=next(iter(_token_ids(text, top, "bos_token_id")), None),
        eos_token_ids=_token_ids(text, top, "eos_token_id"),
        attention_kinds=_attention_kinds(text, is_mla=latent is not None),
        mla_latent_size=latent,
        is_multimodal=text.values is not raw,
        tie_word_embeddings=text.boolean("tie_word_embeddings", top.boolean("tie_word_embeddings", False)),
        quantization=_quantization(top),
        raw=raw,
        text=text.values,
        config_sha256=config_sha256,
    )


def read_target(path: Path, *, name: str = "", revision: str | None = None) -> TargetSpec:
    """Read the target in a folder, or its config.json.

    Args:
        path: the folder or the file.
        name: what to call it; the path without one.
        revision: the commit that the file is of.

    Raises:
        InputError: there is no such file, or it is not the config of a target.
        UsageError: it is a file of weights, or the config of a draft, which is easily taken for its target.
        PermissionDenied: the file may not be read.
    """
    import hashlib

    if path.suffix in _WEIGHT_SUFFIXES and path.is_file():
        raise UsageError(
            "is a file of weights", where=f"--target {path}", hint="Give the folder, or its config.json."
        )
    file = path / "config.json" if path.is_dir() else path
    data = read_file(file, most=MAX_JSON_BYTES)
    raw = parse_json_object(data, where=str(file))
    _require_no_draft(raw, name or str(path))
    digest = hashlib.sha256(data).hexdigest()
    spec = parse_target_config(raw, where=str(file), name=name or str(path), config_sha256=digest)
    return replace(spec, revision=revision)


def _require_no_draft(raw: Mapping[str, Any], name: str) -> None:
    names = raw.get("architectures")
    said = isinstance(names, list) and any("eagle3" in str(one).lower() for one in names)
    keys = {"draft_vocab_size", "eagle_config"} & set(raw)
    if said or "speculators_model_type" in raw or (keys and raw.get("num_hidden_layers") == 1):
        raise UsageError(
            "is an EAGLE3 draft, not the model that it drafts for",
            where=f"--target {name}",
            hint="Give the target model; SOURCE is the draft.",
        )


def bundled_target(name: str) -> TargetSpec | None:
    """The shape of a well-known target that comes with this package, or None.

    Hub names are matched without regard to case, as both hubs resolve them.
    """
    for known, entry in _bundled().items():
        if known.lower() == name.lower():
            spec = parse_target_config(entry["config"], where=f"bundled shape of {known}", name=known)
            return replace(spec, bundled_from=entry["source"])
    return None


def bundled_target_names() -> tuple[str, ...]:
    """The hub names of the bundled shapes."""
    return tuple(_bundled())


def hands_out_states(architecture: str) -> bool | None:
    """Whether vLLM's class of this architecture gives auxiliary hidden states; None where it has none.

    Source: the class list of vLLM 0.32, bundled as data/vllm-targets.json. An architecture that is not in it
    may run through the Transformers backend, which gives them.
    """
    known = _data("vllm-targets.json")
    if architecture in known["supports_eagle3"]:
        return True
    return False if architecture in known["without"] else None


def _bundled() -> dict[str, Any]:
    return _data("targets.json")


@lru_cache(maxsize=2)
def _data(name: str) -> dict[str, Any]:
    # Beside this module: importlib.resources would cost a fifth of the time that `verify --quick` may take.
    return read_json_object(Path(__file__).with_name("data") / name)


def _text_part(top: Fields) -> Fields:
    for path in _TEXT_PATHS:
        fields = top
        for key in path:
            fields = fields.object(key)
        if fields.has("hidden_size"):
            return fields
    return top


def _optional_integer(fields: Fields, key: str) -> int | None:
    return fields.integer(key) if fields.has(key) else None


def _latent_size(text: Fields) -> int | None:
    if not text.has("kv_lora_rank"):
        return None
    return text.integer("kv_lora_rank") + text.integer("qk_rope_head_dim", 0, minimum=0)


def _head_dim(text: Fields, hidden: int, heads: int) -> int:
    for key in ("head_dim", "attention_head_dim", "v_head_dim"):
        if text.has(key):
            return text.integer(key)
    if hidden % heads:
        raise text.wrong("head_dim", f"a whole number, since hidden_size {hidden} / {heads} heads is none")
    return hidden // heads


def _rope(text: Fields, head_dim: int) -> RopeConfig:
    try:
        rope = parse_rope(text)
        if rope.partial_rotary_factor == 1.0 and text.has("rotary_dim"):  # MiniMax
            return replace(rope, partial_rotary_factor=text.integer("rotary_dim") / head_dim)
    except (
        InputError
    ):  # some targets write a base for every layer, or a form of their own; no draft depends on it
        return RopeConfig()
    return rope


def _dtype(*places: Fields) -> str | None:
    for fields in places:
        for key in ("dtype", "torch_dtype"):
            if fields.has(key):
                return fields.string(key).removeprefix("torch.")
    return None


def _token_ids(text: Fields, top: Fields, key: str) -> tuple[int, ...]:
    for fields in (text, top):
        value = fields.values.get(key)
        if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
            return (value,)
        if isinstance(value, list):
            return fields.integers(key) or ()
    return ()


def _quantization(top: Fields) -> str | None:
    fields = top.object("quantization_config")
    return fields.string("quant_method", "unnamed") if fields.values else None


def _attention_kinds(text: Fields, *, is_mla: bool) -> tuple[AttentionKind, ...]:
    """What kinds of KV cache the layers keep.

    Source: vLLM 0.32 v1/core/kv_cache_utils.py groups layers by these kinds.
    """
    base: AttentionKind = "mla" if is_mla else "full"
    layer_types = text.values.get("layer_types")
    kinds: set[AttentionKind] = set()
    if isinstance(layer_types, list) and layer_types:
        kinds = {_LAYER_TYPES.get(str(kind), "full") for kind in layer_types}
        kinds = {base if kind == "full" else kind for kind in kinds}
    elif text.has("sliding_window") and text.values.get("use_sliding_window") is not False:
        kinds = {base, "sliding"} if text.has("sliding_window_pattern") else {"sliding"}
    else:
        kinds = {base}
    linear = ("full_attention_interval", "hybrid_override_pattern", "linear_attn_config", "attn_type_list")
    if any(text.has(key) for key in linear):
        kinds |= {base, "linear"} if not _all_full(text) else set()
    if text.has("sparse_attention_config") or text.has("index_topk"):
        kinds.add("sparse")  # an indexer keeps keys of its own beside the layer's
    return tuple(sorted(kinds))


def _all_full(text: Fields) -> bool:
    """MiniMax-M2 writes attn_type_list with 1 (softmax attention) for every layer."""
    kinds = text.values.get("attn_type_list")
    return isinstance(kinds, list) and set(map(str, kinds)) == {"1"}
