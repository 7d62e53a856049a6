"""A small target with weights, and drafts of every producer that fit it.

The target: 8 layers, hidden 64, 8 heads of 32 of which 4 keys, vocabulary 512. Sizes that vLLM's CPU build
takes, so that its own loader can be shown the same files.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from tests import tiny
from tests.tiny import Tensor

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, VOCAB, DRAFT_VOCAB, LAYERS = 64, 8, 4, 32, 512, 128, 8
DEFAULT_IDS = [2, 4, 5]
THETA = 1e6

Json = dict[str, Any]


@dataclass
class Draft:
    """A draft that is about to be written.

    Attributes:
        raw: config.json.
        tensors: by logical name, in the order of the file.
        prefix: what stands for `layers.0.` in the file.
        name_prefix: stands before every name but lm_head, d2t and t2d.
        metadata: of the weight file.
        shards: number of files.
        target: the target's config.json.
        afterwards: called with the written folder.
    """

    raw: Json
    tensors: dict[str, Tensor]
    prefix: str = "midlayer."
    name_prefix: str = ""
    metadata: dict[str, str] = field(default_factory=lambda: {"format": "pt"})
    shards: int = 1
    target: Json = field(default_factory=lambda: target_config())
    afterwards: list[Callable[[Path], None]] = field(default_factory=list)

    def write(self, folder: Path) -> Path:
        """Write the draft into a folder."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(self.raw, indent=1))
        named = {self.name_in_file(name): tensor for name, tensor in self.tensors.items()}
        if self.shards == 1:
            tiny.write_tensors(folder / "model.safetensors", named, self.metadata)
        else:
            self._write_shards(folder, named)
        for step in self.afterwards:
            step(folder)
        return folder

    def name_in_file(self, name: str) -> str:
        """The name of a tensor as this producer writes it."""
        if name.startswith("layers.0."):
            name = self.prefix + name.removeprefix("layers.0.")
        return name if name in ("lm_head.weight", "d2t", "t2d") else self.name_prefix + name

    def _write_shards(self, folder: Path, named: dict[str, Tensor]) -> None:
        weight_map: dict[str, str] = {}
        for i in range(self.shards):
            file = f"model-{i + 1:05d}-of-{self.shards:05d}.safetensors"
            part = dict(list(named.items())[i :: self.shards])
            tiny.write_tensors(folder / file, part, self.metadata)
            weight_map |= dict.fromkeys(part, file)
        total = sum(len(data) for _, _, data in named.values())
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def target_config(**changes: Any) -> Json:
    """config.json of the target; a change to None removes the key."""
    sizes: Json = {
        "hidden_size": HIDDEN,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "vocab_size": VOCAB,
        "num_hidden_layers": LAYERS,
        "rope_theta": THETA,
    }
    return tiny.target_config(**(sizes | changes))


def target_matrix(seed: int) -> np.ndarray[Any, Any]:
    """The embedding (seed 1) or the head (seed 2) of the target, rounded to bfloat16."""
    values = np.random.default_rng(seed).standard_normal((VOCAB, HIDDEN)).astype(np.float32) / 8
    bits = np.frombuffer(tiny.encode(values, "BF16"), "<u2").astype("<u4") << 16
    return bits.view("<f4").reshape(values.shape)


EMBEDDING, HEAD = target_matrix(1), target_matrix(2)


def write_target(folder: Path, config: Json | None = None) -> Path:
    """Write the target with its embedding and head; the layers between are of no concern here."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config or target_config()))
    tiny.write_tensors(
        folder / "model.safetensors",
        {
            "model.embed_tokens.weight": float_tensor(EMBEDDING),
            "lm_head.weight": float_tensor(HEAD),
        },
    )
    return folder


def float_tensor(values: np.ndarray[Any, Any], dtype: str = "BF16") -> Tensor:
    """Values as a tensor of a file."""
    return dtype, values.shape, tiny.encode(np.ascontiguousarray(values), dtype)


def native(**changes: Any) -> Json:
    """A native config of the tiny target's draft, grouped-query, reduced vocabulary; None removes a key."""
    base: Json = {
        "hidden_size": HIDDEN,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "vocab_size": VOCAB,
        "draft_vocab_size": DRAFT_VOCAB,
        "rope_theta": THETA,
        "eagle_aux_hidden_state_layer_ids": DEFAULT_IDS,
        "eagle_config": {
            "eagle_aux_hidden_state_layer_ids": DEFAULT_IDS,
            "use_aux_hidden_state": True,
        },
    }
    return tiny.native_config(**(base | changes))


def speculators(top: Json | None = None, **layer: Any) -> Json:
    """A config in the speculators format; `layer` goes to transformer_layer_config."""
    shape = {key: value for key, value in native().items() if key in tiny.target_config()}
    config = tiny.speculators_config(
        **(
            {key: shape[key] for key in shape if key not in ("architectures", "bos_token_id", "eos_token_id")}
            | layer
        )
    )
    for key in ("tie_word_embeddings", "torch_dtype"):
        config["transformer_layer_config"].pop(key, None)
    config |= {"draft_vocab_size": DRAFT_VOCAB, "eagle_aux_hidden_state_layer_ids": DEFAULT_IDS}
    config |= top or {}
    return config


def chosen_tokens(count: int = DRAFT_VOCAB, seed: int = 3) -> np.ndarray[Any, Any]:
    """A draft vocabulary: ascending tokens of the target, its special ones among them."""
    others = np.random.default_rng(seed).permutation(np.arange(3, VOCAB))[: count - 3]
    return np.sort(np.concatenate([np.arange(3), others]))


def vocabulary_maps(tokens: np.ndarray[Any, Any], vocab: int = VOCAB) -> dict[str, Tensor]:
    """d2t as offsets and t2d as a mask."""
    mask = np.zeros(vocab, np.uint8)
    mask[tokens] = 1
    offsets = (tokens - np.arange(len(tokens))).astype("<i8")
    return {
        "d2t": ("I64", offsets.shape, offsets.tobytes()),
        "t2d": ("BOOL", mask.shape, mask.tobytes()),
    }


def make(raw: Json | None = None, *, dtype: str = "BF16", seed: int = 0, **settings: Any) -> Draft:
    """A good draft of a config: head and embedding come from the target's, as in training."""
    raw = native() if raw is None else raw
    tensors = tiny.draft_tensors(raw, dtype=dtype, seed=seed)
    rng = np.random.default_rng(seed + 7)
    layer = raw.get("transformer_layer_config", raw)
    vocab, rows = layer["vocab_size"], tensors["lm_head.weight"][1][0]
    full = rows == vocab
    tokens = np.arange(rows) if full else chosen_tokens(rows)
    if not full:
        tensors |= vocabulary_maps(tokens, vocab)
    if tensors["lm_head.weight"][1][1] == HIDDEN:
        head = np.resize(HEAD, (max(vocab, VOCAB), HIDDEN))[tokens]
        head = head + 0.02 * rng.standard_normal(head.shape).astype(np.float32)
        tensors["lm_head.weight"] = float_tensor(head, dtype)
        tensors["embed_tokens.weight"] = float_tensor(np.resize(EMBEDDING, (vocab, HIDDEN)), dtype)
    return Draft(raw, tensors, **settings)


def without(draft: Draft, *names: str) -> Draft:
    """The draft without some tensors."""
    for name in names:
        del draft.tensors[name]
    return draft


def safeailab(**changes: Any) -> Draft:
    """SafeAILab/EAGLE: no head_dim, no layer ids, no embedding, both maps."""
    raw = native(
        architectures=["LlamaForCausalLM"],
        head_dim=None,
        num_attention_heads=8,
        num_key_value_heads=2,
        eagle_aux_hidden_state_layer_ids=None,
        eagle_config=None,
        norm_before_residual=None,
        torch_dtype="float16",
        max_position_embeddings=2048,
        **changes,
    )
    return without(make(raw, dtype="F16"), "embed_tokens.weight")


def specforge(**changes: Any) -> Draft:
    """SpecForge: as its exporter for Hugging Face writes it, both rotary spellings."""
    raw = native(
        norm_before_residual=None,
        rope_parameters={"rope_type": "default", "rope_theta": THETA},
        eagle_aux_hidden_state_layer_ids=None,
        eagle_config=None,
        **changes,
    )
    return make(raw)


def torchspec(**changes: Any) -> Draft:
    """TorchSpec's convert_to_hf: its own metadata, no layer ids, full vocabulary, MHA."""
    raw = native(
        num_key_value_heads=HEADS,
        draft_vocab_size=VOCAB,
        eagle_aux_hidden_state_layer_ids=None,
        eagle_config=None,
        norm_before_residual=None,
        _torchspec_version="0.1.0",
        **changes,
    )
    return make(raw, metadata={"torchspec_version": "0.1.0"})


def modelopt(**changes: Any) -> Draft:
    """NVIDIA ModelOpt: ids in eagle_config alone, `layers.0.`, neither embedding nor t2d."""
    raw = native(
        eagle_aux_hidden_state_layer_ids=None,
        norm_before_residual=None,
        eagle_config={
            "eagle_aux_hidden_state_layer_ids": DEFAULT_IDS,
            "use_aux_hidden_state": True,
            "use_input_layernorm_in_first_layer": True,
            "use_last_layernorm": True,
            "use_mtp_layernorm": False,
            "next_layer_regular": True,
            "parallel_draft_step": 1,
        },
        **changes,
    )
    return without(make(raw, prefix="layers.0."), "embed_tokens.weight", "t2d")


def angelslim(**changes: Any) -> Draft:
    """Tencent AngelSlim: its own architecture, theta of its own, both maps."""
    raw = native(
        architectures=["Eagle3LlamaForCausalLM"],
        target_model_type="llama",
        rope_theta=10000.0,
        eagle_aux_hidden_state_layer_ids=None,
        eagle_config=None,
        norm_before_residual=None,
        **changes,
    )
    return without(make(raw), "embed_tokens.weight")


def nemo(**changes: Any) -> Draft:
    """NeMo AutoModel after a rename of its names; with its fc_norm."""
    return make(native(fc_norm=True, norm_output=False, **changes), prefix="layers.0.")


def speculators_draft(top: Json | None = None, **layer: Any) -> Draft:
    """speculators: nested config, `layers.0.`, maps only where the vocabulary is reduced."""
    return make(speculators(top, **layer), prefix="layers.0.")


def speculators_qwen3() -> Draft:
    """speculators with qwen3 layers: norms of queries and keys."""
    return speculators_draft(model_type="qwen3")


def qwen3(**changes: Any) -> Draft:
    """A native draft with norms of queries and keys."""
    return make(native(architectures=["Eagle3Qwen3ForCausalLM"], model_type="qwen3", **changes))


def canonical(**changes: Any) -> Draft:
    """The portable form, with everything written out."""
    raw = native(
        rope_parameters={"rope_type": "default", "rope_theta": THETA},
        norm_output=False,
        fc_norm=False,
        norm_before_fc=False,
        **changes,
    )
    return make(raw)


def other_width() -> Draft:
    """A draft of another width than its target, with an embedding of its own (EAGLE3 for Llama 3.3 70B)."""
    return make(native(hidden_size=48, target_hidden_size=HIDDEN, num_key_value_heads=2))


def four_states(nested: bool = True) -> Draft:
    """A draft of four auxiliary states."""
    ids = [1, 2, 4, 5]
    eagle = {"eagle_aux_hidden_state_layer_ids": ids, "use_aux_hidden_state": True}
    raw = native(num_aux_hidden_states=4, eagle_aux_hidden_state_layer_ids=ids, eagle_config=eagle)
    if not nested:
        del raw["num_aux_hidden_states"]
        del raw["eagle_config"]
    return make(raw)


def scaled(kind: str) -> Draft:
    """A draft whose positions are scaled, as its target's are."""
    scaling: Json = {
        "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128},
        "llama3": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 128,
        },
        "linear": {"type": "linear", "factor": 2.0},
    }[kind]
    draft = make(native(rope_scaling=scaling))
    draft.target = target_config(rope_scaling=scaling)
    return draft


GOOD: dict[str, Callable[[], Draft]] = {
    "plain": make,
    "full vocabulary": lambda: make(native(draft_vocab_size=VOCAB)),
    "full vocabulary without head": lambda: without(make(native(draft_vocab_size=VOCAB)), "lm_head.weight"),
    "full vocabulary, draft_vocab_size absent": lambda: make(native(draft_vocab_size=None)),
    "full vocabulary, draft_vocab_size null": lambda: make(
        native(draft_vocab_size=VOCAB) | {"draft_vocab_size": None}
    ),
    "multi-head": lambda: make(native(num_key_value_heads=HEADS)),
    "multi-head, heads absent": lambda: make(native(num_key_value_heads=None)),
    "multi-head, heads null": lambda: make(native(num_key_value_heads=HEADS) | {"num_key_value_heads": None}),
    "multi-query": lambda: make(native(num_key_value_heads=1)),
    "safeailab": safeailab,
    "safeailab full": lambda: safeailab(draft_vocab_size=VOCAB),
    "specforge": specforge,
    "specforge MHA": lambda: specforge(num_key_value_heads=HEADS),
    "torchspec": torchspec,
    "torchspec --vllm": lambda: make(
        torchspec().raw, prefix="layers.0.", metadata={"torchspec_version": "0.1.0"}
    ),
    "torchspec pruned": lambda: make(
        native(_torchspec_version="0.1.0"), metadata={"torchspec_version": "0.1.0"}
    ),
    "modelopt": modelopt,
    "modelopt full": lambda: without(
        make(native(draft_vocab_size=VOCAB), prefix="layers.0."), "embed_tokens.weight"
    ),
    "angelslim": angelslim,
    "nemo renamed": nemo,
    "speculators": speculators_draft,
    "speculators MHA": lambda: speculators_draft(num_key_value_heads=HEADS),
    "speculators full": lambda: speculators_draft({"draft_vocab_size": VOCAB}),
    "speculators, norm_before_residual": lambda: speculators_draft({"norm_before_residual": True}),
    "speculators, other aux ids": lambda: speculators_draft({"eagle_aux_hidden_state_layer_ids": [1, 3, 6]}),
    "speculators, rope_parameters": lambda: speculators_draft(
        rope_theta=None, rope_parameters={"rope_type": "default", "rope_theta": THETA}
    ),
    "speculators qwen3": speculators_qwen3,
    "qwen3": qwen3,
    "qwen3 full": lambda: qwen3(draft_vocab_size=VOCAB),
    "canonical": canonical,
    "canonical MHA full": lambda: canonical(num_key_value_heads=HEADS, draft_vocab_size=VOCAB),
    "two layers": lambda: make(native(num_hidden_layers=2)),
    "four layers": lambda: make(native(num_hidden_layers=4)),
    "fc_norm": lambda: make(native(fc_norm=True, norm_output=True)),
    "norm_before_fc": lambda: make(
        native(
            norm_before_fc=True,
            eagle_config={
                "eagle_aux_hidden_state_layer_ids": DEFAULT_IDS,
                "use_aux_hidden_state": True,
                "norm_before_fc": True,
            },
        )
    ),
    "norm_before_fc at the top alone": lambda: make(native(norm_before_fc=True)),
    "four auxiliary states": four_states,
    "attention biases": lambda: make(native(attention_bias=True)),
    "other width": other_width,
    "other width than hidden/heads": lambda: make(native(num_attention_heads=4, num_key_value_heads=2)),
    "sharded": lambda: make(shards=3),
    "sharded full": lambda: make(native(draft_vocab_size=VOCAB), shards=2),
    "float16": lambda: make(native(torch_dtype="float16"), dtype="F16"),
    "float32": lambda: make(native(torch_dtype="float32"), dtype="F32"),
    "dtype in place of torch_dtype": lambda: make(native(torch_dtype=None, dtype="bfloat16")),
    "no embedding": lambda: without(make(), "embed_tokens.weight"),
    "no t2d": lambda: without(make(), "t2d"),
    "yarn": lambda: scaled("yarn"),
    "llama3 rope": lambda: scaled("llama3"),
    "linear rope, old spelling": lambda: scaled("linear"),
    "rope_parameters alone": lambda: make(
        {k: v for k, v in native().items() if k not in ("rope_theta", "rope_scaling")}
        | {"rope_parameters": {"rope_type": "default", "rope_theta": THETA}}
    ),
    "layer_types": lambda: make(native(layer_types=["full_attention"])),
    "sliding window off": lambda: make(native(sliding_window=4096, use_sliding_window=False)),
    "no aux layers written": lambda: make(native(eagle_aux_hidden_state_layer_ids=None, eagle_config=None)),
    "no aux state, no fc": lambda: without(
        make(
            native(
                eagle_aux_hidden_state_layer_ids=None,
                eagle_config={"use_aux_hidden_state": False},
            )
        ),
        "fc.weight",
    ),
    "list of eos": lambda: make(native() | {"eos_token_id": [2, 1]}),
    "extra keys": lambda: make(
        native(eagle3pack={"version": "0"}, pretraining_tp=1, transformers_version="4.51.0")
    ),
}
