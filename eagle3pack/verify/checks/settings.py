"""C17 to C19 and C27 to C32: vocabularies, positions, quantisation and what else a config carries."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from eagle3pack.documents import describe
from eagle3pack.verify.check import Check, Finding, SetKey, Undecided, check
from eagle3pack.verify.context import CONFIG_NAME, Context

# What a quantised checkpoint holds beside its weights.
QUANTISED_SUFFIXES = (
    *("_scale", "_scale_inv", "_zero_point", "_packed", "_shape", "_g_idx"),
    *(".scales", ".qweight", ".qzeros", ".g_idx"),
)
FLOAT8_DTYPES = {"F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2"}
QUANTISED_DTYPES = frozenset({*FLOAT8_DTYPES, "I8", "U8", "I32", "F4"})

# Keys that mean something in a target and mislead an engine in a draft.
_TARGET_KEYS = (
    "n_predict",
    "num_nextn_predict_layers",
    "num_mtp_modules",
    "num_experts",
    "num_local_experts",
    "n_routed_experts",
    "sparse_attention_config",
    "text_config",
    "vision_config",
)
_LATENT_KEYS = ("kv_lora_rank", "q_lora_rank")  # of MLA


@check(
    "C17",
    "rms_norm_eps is written",
    severity="warning",
    reason="Engines take 1e-6 where it is absent; a draft trained with 1e-5 drifts.",
    source="transformers LlamaConfig",
)
def norm_epsilon_given(context: Context) -> Iterator[Finding]:
    if not context.layer.has("rms_norm_eps"):
        yield Finding(
            "rms_norm_eps is absent, engines take 1e-6",
            "Write the one that the draft was trained with.",
            file=CONFIG_NAME,
            key=".".join((*context.layer_path, "rms_norm_eps")),
        )


@check(
    "C18",
    "vocab_size is the target's",
    reason="vLLM does not compare them: an id past the smaller one is an IndexError, on CUDA a device "
    "assert.",
    source="github.com/vllm-project/vllm/issues/34583, 34722, 43369",
)
def vocabulary_is_the_targets(context: Context) -> Iterator[Finding]:
    found, expected = context.config.vocab_size, context.target.vocab_size
    if found != expected:
        yield Finding(
            f"vocab_size is {found}, that of {context.target.name} is {expected}",
            "Use the target that the draft was trained for, or write its padded vocabulary size.",
            file=CONFIG_NAME,
            key=".".join((*context.layer_path, "vocab_size")),
            found=found,
            expected=expected,
        )


@check(
    "C19",
    "draft_vocab_size is written and is the number of rows of lm_head",
    reason="vLLM stops in a bare assertion or at draft_id_to_target_id, SGLang at a missing attribute; "
    "llama.cpp does not see an EAGLE3 draft at all.",
    source="vLLM 0.32 (measured); SGLang models/llama_eagle3.py; llama.cpp conversion/llama.py",
)
def draft_vocabulary_agrees(context: Context) -> Iterator[Finding]:
    declared = context.top.values.get("draft_vocab_size")
    vocab = context.layer.integer("vocab_size")
    rows = context.rows("lm_head.weight")
    size = vocab if declared is None else declared
    if not isinstance(size, int) or isinstance(size, bool):
        raise Undecided("draft_vocab_size is no number (C05)")
    if size > vocab:
        yield Finding(
            f"draft_vocab_size {size} is larger than vocab_size {vocab}",
            "Correct whichever was written wrongly.",
            file=CONFIG_NAME,
            key="draft_vocab_size",
            found=size,
        )
    elif rows is not None and rows != size:
        mapped = context.shape("d2t") or ()
        yield Finding(
            f"lm_head has {rows} rows, draft_vocab_size is "
            + (f"absent, which means {vocab}" if declared is None else str(declared)),
            f"Write {rows} if the weights are right." if rows <= vocab else "Export the draft again.",
            file=CONFIG_NAME,
            key="draft_vocab_size",
            tensor=context.tensors["lm_head.weight"].name,
            found=declared,
            expected=rows,
            mends=(SetKey(("draft_vocab_size",), rows),) if declared is None and mapped == (rows,) else (),
            producer_bug="TorchSpec: tokens dropped after the most frequent were chosen"
            if declared is not None and mapped == (rows,) and rows < size
            else None,
        )
    elif declared is None:
        yield Finding(
            "draft_vocab_size is absent: SGLang stops, llama.cpp takes the draft for a plain Llama",
            f"Write {vocab}.",
            file=CONFIG_NAME,
            key="draft_vocab_size",
            expected=vocab,
            engines=("sglang", "llama.cpp"),
            only_if_named=True,
            mends=(SetKey(("draft_vocab_size",), vocab),),
        )


@check(
    "C27",
    "max_position_embeddings reaches as far as the target's",
    severity="warning",
    engines=("vllm", "sglang"),
    reason="vLLM's V1 runner stops drafting past the draft's length: acceptance falls to nothing on long "
    "contexts, in silence. Older versions read out of bounds.",
    source="github.com/vllm-project/vllm/issues/48894, 49343, 23072; "
    "github.com/sgl-project/sglang/issues/10713",
)
def positions_reach(context: Context) -> Iterator[Finding]:
    found, expected = context.config.max_position_embeddings, context.target.max_position_embeddings
    if expected is None:
        raise Undecided("the target does not say its max_position_embeddings")
    if found is None or found < expected:
        yield Finding(
            f"max_position_embeddings is {'absent' if found is None else found}, the target's is {expected}: "
            "beyond it nothing is drafted",
            f"Write {expected}; the draft's rotary embedding has no limit of its own.",
            file=CONFIG_NAME,
            key=".".join((*context.layer_path, "max_position_embeddings")),
            found=found,
            expected=expected,
        )


@check(
    "C28",
    "a quantisation is declared and in the weights, or neither",
    reason="A quantization_config inherited from the target makes vLLM quantise the draft anew at load, in "
    "silence, or look for scales that are not there; weights without their scales it casts as they are.",
    source="github.com/vllm-project/vllm/pull/25883, issues/25882 (measured); "
    "vLLM 0.32 model_loader/weight_utils.py",
)
def quantisation_is_real(context: Context) -> Iterator[Finding]:
    yield from _unscaled_weights(context)
    if context.config.quantization is None:
        return
    real = any(
        (entry.dtype in QUANTISED_DTYPES and name not in ("d2t", "t2d")) or name.endswith(QUANTISED_SUFFIXES)
        for name, entry in context.tensors.items()
    )
    if not real:
        yield Finding(
            f"quantization_config says {context.config.quantization}, the weights are not quantised",
            "Remove quantization_config.",
            file=CONFIG_NAME,
            key="quantization_config",
            found=context.config.quantization,
        )


def _unscaled_weights(context: Context) -> Iterator[Finding]:
    """Weights in a quantised dtype that nothing says how to scale."""
    declared = context.config.quantization is not None
    unscaled = [
        entry
        for name, entry in context.tensors.items()
        if (entry.dtype in FLOAT8_DTYPES or (entry.dtype in QUANTISED_DTYPES and not declared))
        and name in context.expected
        and name not in ("d2t", "t2d")
        and not any(f"{name}{suffix}" in context.tensors for suffix in ("_scale", "_scale_inv"))
    ]
    if unscaled:
        first = unscaled[0]
        yield Finding(
            f"{len(unscaled)} weight{'s are' if len(unscaled) > 1 else ' is'} stored quantised without a "
            f"scale, such as {first.name} as {first.dtype}: engines cast the bare numbers",
            "Export the draft in bfloat16, or with its scales and quantization_config.",
            file=first.path.name,
            tensor=first.name,
            found=first.dtype,
        )


@check(
    "C29",
    "layer_types and sliding_window fit a draft of full attention",
    severity="warning",
    reason="A list of another length stops transformers 5; a sliding window puts the draft in a KV group of "
    "its own.",
    source="transformers 5 configuration_utils.layer_type_validation; vLLM 0.32 v1/core/kv_cache_utils.py",
)
def attention_is_full(context: Context) -> Iterator[Finding]:
    values = context.layer.values
    kinds, layers = values.get("layer_types"), context.config.num_hidden_layers
    key = ".".join((*context.layer_path, "layer_types"))
    if isinstance(kinds, list) and len(kinds) != layers:
        yield Finding(
            f"layer_types lists {len(kinds)} layers, num_hidden_layers is {layers}",
            "Remove layer_types.",
            file=CONFIG_NAME,
            key=key,
            found=len(kinds),
            expected=layers,
            severity="error",
            engines=("vllm",),
        )
    elif isinstance(kinds, list) and any(kind != "full_attention" for kind in kinds):
        yield Finding(
            f"layer_types is {describe(kinds)}",
            "Write full_attention, if it was trained so.",
            file=CONFIG_NAME,
            key=key,
        )
    elif values.get("sliding_window") is not None and values.get("use_sliding_window") is not False:
        yield Finding(
            f"sliding_window is {describe(values['sliding_window'])}",
            "Write null, if the draft was trained with full attention.",
            file=CONFIG_NAME,
            key=".".join((*context.layer_path, "sliding_window")),
            found=values["sliding_window"],
        )


@check(
    "C30",
    "no remote code is needed",
    severity="warning",
    reason="Some loaders refuse a config with auto_map without --trust-remote-code, though no engine needs "
    "its code.",
    source="transformers dynamic_module_utils.resolve_trust_remote_code",
)
def no_remote_code(context: Context) -> Iterator[Finding]:
    if context.top.has("auto_map"):
        yield Finding(
            "auto_map is set", "Remove it; engines bring the model's code.", file=CONFIG_NAME, key="auto_map"
        )


@check(
    "C31",
    "no key of the target has leaked into the draft",
    severity="warning",
    reason="n_predict makes vLLM demand `num_speculative_tokens must be divisible`; others confuse tools "
    "that look at the config.",
    source="vLLM 0.32 config/speculative.py (measured)",
)
def no_target_keys(context: Context) -> Iterator[Finding]:
    for key in _TARGET_KEYS:
        if context.top.has(key):
            yield Finding(
                f"{key} is a target's key",
                "Remove it.",
                file=CONFIG_NAME,
                key=key,
                found=_short(context.top.values[key]),
                severity="error" if key == "n_predict" else "warning",
            )
    if "layers.0.self_attn.k_proj.weight" not in context.headers.tensors:
        return  # an MLA draft, or none that can be read
    for key in filter(context.top.has, _LATENT_KEYS):
        yield Finding(
            f"{key} is a key of MLA, the weights are of plain attention: engines ignore it",
            "Remove it.",
            file=CONFIG_NAME,
            key=key,
            found=_short(context.top.values[key]),
            severity="note",
        )


def _short(value: Any) -> Any:
    return value if isinstance(value, (int, str)) else describe(value)


@check(
    "C32",
    "the special token ids are the target's",
    severity="warning",
    reason="Tools that stop on the draft's eos stop elsewhere than the target.",
    source="vLLM 0.32 transformers_utils/config.py",
)
def special_tokens_agree(context: Context) -> Iterator[Finding]:
    target = context.target
    wanted = {
        "bos_token_id": {target.bos_token_id} if target.bos_token_id is not None else set(),
        "eos_token_id": set(target.eos_token_ids),
    }
    if not any(wanted.values()):
        raise Undecided("the target's config names no special tokens")
    for key, ids in wanted.items():
        value = context.layer.values.get(key, context.top.values.get(key))
        found = value if isinstance(value, list) else [value]
        if ids and all(isinstance(token, int) for token in found) and not ids.issuperset(found):
            yield Finding(
                f"{key} is {describe(value)}, the target's is {describe(sorted(ids))}",
                "Write the target's.",
                file=CONFIG_NAME,
                key=key,
                found=value,
                expected=sorted(ids),
            )


CHECKS: tuple[Check, ...] = (
    norm_epsilon_given,
    vocabulary_is_the_targets,
    draft_vocabulary_agrees,
    positions_reach,
    quantisation_is_real,
    attention_is_full,
    no_remote_code,
    no_target_keys,
    special_tokens_agree,
)
