"""K: how the draft's attention meets the target's: tensor parallelism, KV pages, the target's own class."""

from __future__ import annotations

from collections.abc import Iterator

from eagle3pack.draft.target import hands_out_states
from eagle3pack.verify.check import Check, Finding, SetKey, Severity, Undecided, check, not_applicable
from eagle3pack.verify.context import CONFIG_NAME, Context
from eagle3pack.verify.serving import layer_kv_bytes, sizes_that_fit, target_layer_kv_bytes

USUAL_SIZES = (2, 4, 8)
# vLLM 0.32 v1/attention/backends: the sizes that its CPU and FlashAttention backends take alike.
HEAD_SIZES = frozenset({32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512})
PAGE_TOKENS = 128


def _severity(context: Context) -> Severity:
    return "error" if context.options.tensor_parallel_size else "note"


def _sizes(context: Context) -> tuple[int, ...]:
    size = context.options.tensor_parallel_size
    return (size,) if size else USUAL_SIZES


def _models(context: Context) -> Iterator[tuple[str, int, int, bool]]:
    """(name, query heads, key/value heads, has an MLA cache) of draft and target."""
    config = context.config
    yield "the draft", config.num_attention_heads, config.num_key_value_heads, False
    if context.has_target:
        target = context.target
        yield target.name, target.num_attention_heads, target.num_key_value_heads, target.is_mla


def _fitting(context: Context) -> str:
    sizes = sizes_that_fit(context.config, context.target if context.has_target else None)
    return f"Sizes that fit: {', '.join(map(str, sizes))}."


@check(
    "K01",
    "the query heads divide over the ranks",
    engines=("vllm", "sglang"),
    reason="`Total number of attention heads (2) must be divisible by tensor parallel size (4)`, for the "
    "draft too.",
    source="vLLM 0.32 config/model.py (measured)",
)
def query_heads_divide(context: Context) -> Iterator[Finding]:
    for name, heads, _, _ in _models(context):
        bad = [size for size in _sizes(context) if heads % size]
        if bad:
            yield Finding(
                f"{heads} query heads of {name} do not divide over {' or '.join(map(str, bad))} ranks",
                _fitting(context),
                file=CONFIG_NAME,
                key="num_attention_heads",
                found=heads,
                severity=_severity(context),
            )


@check(
    "K02",
    "the key/value heads divide over the ranks, or the ranks over them",
    engines=("vllm", "sglang"),
    reason="A bare assertion in LlamaAttention. Fewer heads than ranks are replicated, which must come out "
    "even.",
    source="vLLM 0.32 model_executor/models/llama.py",
)
def key_value_heads_divide(context: Context) -> Iterator[Finding]:
    for name, _, heads, is_mla in _models(context):
        bad = [size for size in _sizes(context) if max(heads, size) % min(heads, size)]
        if bad and not is_mla:
            yield Finding(
                f"{heads} key/value heads of {name} do not divide over {' or '.join(map(str, bad))} ranks, "
                "nor these over them",
                _fitting(context),
                file=CONFIG_NAME,
                key="num_key_value_heads",
                found=heads,
                severity=_severity(context),
            )


@check(
    "K03",
    "a page of the draft's KV cache is as large as one of the target's",
    severity="warning",
    engines=("vllm", "sglang", "tensorrt-llm"),
    reason="A larger page costs KV pool, pads hybrid targets, and breaks connectors for disaggregated "
    "serving: `assert tensor_size_bytes == curr_tensor_size_bytes`.",
    source="github.com/vllm-project/vllm/issues/22432, 53499, pull/48529; TensorRT-LLM#17406",
)
def pages_are_equal(context: Context) -> Iterator[Finding]:
    config, target = context.config, context.target
    size = context.options.tensor_parallel_size or 1
    theirs = target_layer_kv_bytes(target, size)
    if theirs is None:
        raise Undecided("the target's layers keep caches of several kinds (K05)")
    mine = layer_kv_bytes(config.num_key_value_heads, config.head_dim, size)
    if mine != theirs:
        yield Finding(
            f"a draft layer keeps {mine:,} bytes a token and rank, a target layer {theirs:,}: "
            f"{mine / theirs:.3g} times",
            f"Run `eagle3pack convert --num-kv-heads {target.num_key_value_heads}`."
            if mine > theirs
            and not target.is_mla
            and config.num_attention_heads % target.num_key_value_heads == 0
            else "No change needed on one server with a pool of its own.",
            file=CONFIG_NAME,
            key="num_key_value_heads",
            found=config.num_key_value_heads,
            expected=target.num_key_value_heads if not target.is_mla else None,
        )


@check(
    "K04",
    "head_dim is the target's",
    severity="warning",
    reason="Another head_dim is another page layout, and was often a mistake of the export.",
    source="github.com/vllm-project/vllm/issues/23740",
)
def head_dims_are_equal(context: Context) -> Iterator[Finding]:
    mine, theirs = context.config.head_dim, context.target.head_dim
    if context.target.is_mla:
        raise not_applicable("the target keeps one latent, no heads")
    if mine != theirs:
        yield Finding(
            f"head_dim is {mine}, the target's {theirs}",
            "Check it against the training config.",
            file=CONFIG_NAME,
            key="head_dim",
            found=mine,
            expected=theirs,
        )


@check(
    "K05",
    "the draft's pages can be unified with a hybrid target's",
    severity="warning",
    engines=("vllm",),
    reason="vLLM scales every page to the largest, pads what does not divide, and stops where it may not "
    "pad: `page size is not divisible by the maximum page size and cannot be padded`.",
    source="github.com/vllm-project/vllm/issues/22432, 25314, 45207; vLLM 0.32 v1/core/kv_cache_utils.py",
)
def pages_unify(context: Context) -> Iterator[Finding]:
    target = context.target
    if not target.is_hybrid and not target.is_mla:
        raise not_applicable("the target's layers all keep full attention")
    config = context.config
    size = context.options.tensor_parallel_size or 1
    mine = layer_kv_bytes(config.num_key_value_heads, config.head_dim, size)
    theirs = (
        target.mla_latent_size * 2
        if target.mla_latent_size is not None
        else layer_kv_bytes(target.num_key_value_heads, target.head_dim, size)
    )
    large, small = max(mine, theirs), min(mine, theirs)
    if large != small:
        kinds = " and ".join(target.attention_kinds)
        uneven = large % small != 0
        yield Finding(
            f"the target has {kinds} attention; its pages of {theirs:,} bytes a token are unified with the "
            f"draft's of {mine:,}"
            + (
                ", which do not divide" + (": vLLM stops" if target.is_mla else ": every page is padded")
                if uneven
                else ""
            ),
            "Give the draft the target's number of key/value heads."
            if not target.is_mla
            else "Use an MLA draft, or serve without hybrid grouping.",
            file=CONFIG_NAME,
            key="num_key_value_heads",
            found=config.num_key_value_heads,
        )


@check(
    "K06",
    "the attention kernels of GPUs take the draft's heads",
    severity="warning",
    engines=("vllm",),
    reason="FlashInfer has no trtllm-gen kernel for multi-head attention with pages of 128 tokens: `Missing "
    "TRTLLM-GEN kernel (decode)`. MiniMax-M3 demands such pages.",
    source="github.com/flashinfer-ai/flashinfer/issues/4094",
)
def kernels_exist(context: Context) -> Iterator[Finding]:
    if context.config.is_mha and context.config.num_attention_heads > 1:
        yield Finding(
            f"multi-head attention ({context.config.num_attention_heads} key/value heads) at pages "
            f"of {PAGE_TOKENS} tokens has no FlashInfer kernel on Blackwell",
            'Serve with "attention_backend": "FLASH_ATTN" in --speculative-config, or convert the draft.',
            file=CONFIG_NAME,
            key="num_key_value_heads",
            found=context.config.num_key_value_heads,
        )


@check(
    "K07",
    "head_dim is one that attention backends take",
    severity="warning",
    engines=("vllm",),
    reason="Backends refuse others, or fall back to slow kernels.",
    source="vLLM 0.32 v1/attention/backends/cpu_attn.py, flash_attn.py",
)
def head_size_is_supported(context: Context) -> Iterator[Finding]:
    if context.config.head_dim not in HEAD_SIZES:
        yield Finding(
            f"head_dim is {context.config.head_dim}; vLLM's backends take "
            f"{', '.join(map(str, sorted(HEAD_SIZES)))}",
            "No change needed if the engine at hand takes it.",
            file=CONFIG_NAME,
            key="head_dim",
            found=context.config.head_dim,
        )


@check(
    "K08",
    "vLLM's class of the target gives auxiliary hidden states",
    engines=("vllm",),
    reason="`Model does not support EAGLE3 interface but aux_hidden_state_outputs was requested`.",
    source="github.com/vllm-project/vllm/issues/45538, 37512; vLLM 0.32 models/registry.py",
)
def target_gives_states(context: Context) -> Iterator[Finding]:
    name = context.target.architecture
    known = hands_out_states(name)
    if known is False:
        yield Finding(
            f"{name} does not give auxiliary hidden states in vLLM 0.32",
            "Use an engine or a version that supports this target.",
            found=name,
        )
    elif known is None:
        yield Finding(
            f"vLLM 0.32 has no class of its own for {name or 'a target without architectures'}; its "
            "Transformers backend would have to run it",
            "Try it with --engine vllm before you publish.",
            found=name,
            severity="warning",
        )


@check(
    "K09",
    "a multimodal target can be served with a draft",
    severity="warning",
    engines=("vllm",),
    reason="vLLM's V1 runner asks the target's config for image_token_index, which many lack.",
    source="vLLM 0.32 v1/spec_decode/llm_base_proposer.py",
)
def multimodal_target(context: Context) -> Iterator[Finding]:
    target = context.target
    if not target.is_multimodal:
        raise not_applicable("the target is a text model")
    if target.bundled:
        raise Undecided("only the bundled text shape of the target is known")
    if not any(
        key in target.raw for key in ("image_token_index", "image_token_id", "media_placeholder_token_id")
    ):
        yield Finding(
            f"the config of {target.name} names no image token",
            "If vLLM fails at image_token_index, serve with --language-model-only.",
        )


@check(
    "K10",
    "pipeline parallelism is not needed",
    severity="note",
    engines=("vllm",),
    reason="`{Model} does not support eagle3 with pipeline parallelism`; MiniMax-M3 on NVIDIA does.",
    source="vLLM 0.32 v1/worker/gpu/spec_decode, models/minimax_m3/nvidia/model.py",
)
def no_pipeline(context: Context) -> Iterator[Finding]:
    if not context.target.architecture.startswith("MiniMaxM3"):
        yield Finding(
            "vLLM's V2 runner drafts over pipeline stages for few targets, and this is none of them",
            "Use tensor parallelism.",
            found=context.target.architecture,
        )


@check(
    "K11",
    "the draft is as wide as its target, or says otherwise",
    reason="`assert combined hidden dim`, or the target's embedding in a draft of another width.",
    source="github.com/vllm-project/vllm/issues/17957, 18906, 19174",
)
def widths_are_equal(context: Context) -> Iterator[Finding]:
    config, target = context.config, context.target
    if context.top.has("target_hidden_size") or config.hidden_size == target.hidden_size:
        return
    fits = context.shape("fc.weight") == (
        config.hidden_size,
        config.num_aux_hidden_states * target.hidden_size,
    )
    yield Finding(
        f"hidden_size is {config.hidden_size}, the target's {target.hidden_size}, and there is no "
        "target_hidden_size",
        f"Write target_hidden_size {target.hidden_size}."
        if fits
        else f"{target.name} is not the target that this draft was trained for.",
        file=CONFIG_NAME,
        key="target_hidden_size",
        expected=target.hidden_size,
        mends=(SetKey(("target_hidden_size",), target.hidden_size),)
        if fits and not context.is_speculators
        else (),
    )


@check(
    "K12",
    "the draft's KV cache takes a small share of the pool",
    severity="note",
    engines=("vllm", "sglang"),
    reason="Every draft layer takes its page out of the pool: one MHA layer beside 30 GQA layers took 12 % "
    "of the tokens.",
    source="vLLM 0.32 v1/core/kv_cache_utils.py (measured)",
)
def pool_share_is_small(context: Context) -> Iterator[Finding]:
    config, target = context.config, context.target
    size = context.options.tensor_parallel_size or 1
    theirs = target_layer_kv_bytes(target, size)
    if theirs is None:
        raise Undecided("the target's layers keep caches of several kinds")
    mine = layer_kv_bytes(config.num_key_value_heads, config.head_dim, size) * config.num_hidden_layers
    share = mine / (mine + theirs * target.num_hidden_layers)
    if share > 2 * config.num_hidden_layers / target.num_hidden_layers:
        yield Finding(
            f"the draft takes {share:.1%} of the KV pool at {size} rank{'s' if size > 1 else ''}",
            "Convert it to fewer key/value heads.",
            file=CONFIG_NAME,
            key="num_key_value_heads",
            found=round(share, 4),
        )


CHECKS: tuple[Check, ...] = (
    query_heads_divide,
    key_value_heads_divide,
    pages_are_equal,
    head_dims_are_equal,
    pages_unify,
    kernels_exist,
    head_size_is_supported,
    target_gives_states,
    multimodal_target,
    no_pipeline,
    widths_are_equal,
    pool_share_is_small,
)
