"""C06 to C13: the shape that config.json declares, held against the weights."""

from __future__ import annotations

from collections.abc import Iterator

from eagle3pack.documents import describe
from eagle3pack.verify.check import Check, Finding, SetKey, Undecided, check, not_applicable
from eagle3pack.verify.context import CONFIG_NAME, Context


def _as_integer(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None


@check(
    "C06",
    "num_hidden_layers is the number of layers in the weights",
    reason="vLLM builds layers that nothing fills; llama.cpp no longer takes the draft for EAGLE3. A config "
    "copied from the target says 40 or 80.",
    source="github.com/sgl-project/sglang/pull/33966; vLLM 0.32 (measured)",
)
def layers_agree(context: Context) -> Iterator[Finding]:
    key = ".".join((*context.layer_path, "num_hidden_layers"))
    found = _as_integer(context.layer.values.get("num_hidden_layers"))
    if found is None and context.layer.has("num_hidden_layers"):
        raise Undecided("num_hidden_layers is no number (C05)")
    if found is None and not context.is_speculators:
        yield Finding(
            "num_hidden_layers is absent, and engines take that of a Llama, 32",
            "Write the number of layers that the weights hold, mostly 1.",
            file=CONFIG_NAME,
            key=key,
        )
        return
    actual = context.num_layers_in_file
    if actual == 0:
        raise Undecided("the weights hold no decoder layer (T01)")
    if (found or 1) != actual:
        yield Finding(
            f"num_hidden_layers is {found or 'absent'}, the weights hold {actual} layer{'s' * (actual > 1)}",
            f"Write {actual}.",
            file=CONFIG_NAME,
            key=key,
            found=found,
            expected=actual,
            producer_bug="SafeAILab: num_hidden_layers copied from the target"
            if context.has_target and found == context.target.num_hidden_layers
            else None,
        )


@check(
    "C07",
    "head_dim is explicit and that of the weights",
    reason="Engines take hidden_size / num_attention_heads where it is absent, and then slice the wrong "
    "rows or stop.",
    source="github.com/vllm-project/vllm/issues/23740; github.com/SafeAILab/EAGLE/issues/223",
)
def head_dim_agrees(context: Context) -> Iterator[Finding]:
    config = context.config
    path = (*context.layer_path, "head_dim")
    explicit = context.layer.has("head_dim")
    queries = [f"layers.{layer}.self_attn.q_proj.weight" for layer in range(context.num_layers_in_file)]
    rows_of = {name: rows for name in queries if (rows := context.rows(name)) is not None}
    if not rows_of:
        raise Undecided("q_proj is missing or no matrix (T01)")
    wrong = {
        name: rows for name, rows in rows_of.items() if rows != config.num_attention_heads * config.head_dim
    }
    for name, rows in wrong.items():
        in_file = rows / config.num_attention_heads
        yield Finding(
            f"q_proj has {rows} rows, {in_file:g} for each of {config.num_attention_heads} heads, but "
            "head_dim "
            + (f"is {config.head_dim}" if explicit else f"is absent and becomes {config.head_dim}"),
            "Write the head_dim that the draft was trained with"
            + (f", probably {in_file:g}." if in_file.is_integer() else "."),
            file=CONFIG_NAME,
            key=".".join(path),
            tensor=context.tensors[name].name,
            found=config.head_dim if explicit else None,
            expected=int(in_file) if in_file.is_integer() else None,
            mends=_head_dim_mend(context, rows),
            producer_bug=None if explicit else "head_dim dropped from the exported config",
        )
    if not wrong and not explicit:
        yield Finding(
            f"head_dim is absent; it follows from the other sizes as {config.head_dim}",
            f"Write {config.head_dim}.",
            file=CONFIG_NAME,
            key=".".join(path),
            expected=config.head_dim,
            severity="warning",
            mends=(SetKey(path, config.head_dim),),
        )


def _head_dim_mend(context: Context, rows: int) -> tuple[SetKey, ...]:
    """Safe only where queries, keys and the output projection all say the same width, and it was absent."""
    config = context.config
    head_dim, rest = divmod(rows, config.num_attention_heads)
    agree = (
        not rest
        and context.rows("layers.0.self_attn.k_proj.weight") == config.num_key_value_heads * head_dim
        and context.columns("layers.0.self_attn.o_proj.weight") == rows
    )
    if context.layer.has("head_dim") or not context.layer.has("num_key_value_heads") or not agree:
        return ()
    return (SetKey((*context.layer_path, "head_dim"), head_dim),)


@check(
    "C08",
    "hidden_size is a multiple of num_attention_heads",
    engines=("vllm",),
    reason="transformers 5 refuses the config, even where head_dim is explicit: `The hidden size (256) is "
    "not a multiple of the number of attention heads (9)`.",
    source="transformers 5 LlamaConfig.validate_architecture (measured)",
)
def heads_divide_width(context: Context) -> Iterator[Finding]:
    hidden = _as_integer(context.layer.values.get("hidden_size"))
    heads = _as_integer(context.layer.values.get("num_attention_heads"))
    if hidden is None or heads is None:
        raise Undecided("hidden_size or num_attention_heads is no number (C05)")
    if hidden % heads:
        yield Finding(
            f"hidden_size {hidden} is not a multiple of num_attention_heads {heads}",
            "Correct whichever was written wrongly; a draft of such a shape does not load.",
            file=CONFIG_NAME,
            key=".".join((*context.layer_path, "num_attention_heads")),
            found=heads,
        )


@check(
    "C09",
    "num_attention_heads is a multiple of num_key_value_heads",
    reason="vLLM stops with `num_heads (8) is not divisible by num_kv_heads (3)`.",
    source="vLLM 0.32 model_executor/layers/attention (measured)",
)
def heads_divide(context: Context) -> Iterator[Finding]:
    heads = _as_integer(context.layer.values.get("num_attention_heads"))
    kv_heads = _as_integer(context.layer.values.get("num_key_value_heads"))
    if kv_heads is None and not context.layer.has("num_key_value_heads"):
        raise not_applicable("num_key_value_heads is absent: as many as query heads")
    if heads is None or kv_heads is None:
        raise Undecided("a number of heads is no number (C05)")
    if heads % kv_heads:
        yield Finding(
            f"num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}",
            "Correct whichever was written wrongly.",
            file=CONFIG_NAME,
            key=".".join((*context.layer_path, "num_key_value_heads")),
            found=kv_heads,
        )


@check(
    "C10",
    "num_key_value_heads is that of the weights",
    reason="Too few: vLLM keeps the first heads' rows and drops the rest in silence (MHA weights under a GQA "
    "config). Too many: a narrow error. Absent: multi-head attention.",
    source="vLLM 0.32 model_executor/parameter.py, layers/linear.py (measured)",
)
def key_value_heads_agree(context: Context) -> Iterator[Finding]:
    config = context.config
    path = (*context.layer_path, "num_key_value_heads")
    explicit = context.layer.has("num_key_value_heads")
    judged = False
    for layer in range(context.num_layers_in_file):
        for projection in "kv":
            name = f"layers.{layer}.self_attn.{projection}_proj.weight"
            rows = context.rows(name)
            if rows is None:
                continue
            judged = True
            if rows not in _rows_allowed(context, layer):
                heads = rows / config.head_dim
                fits = heads.is_integer() and heads > 0 and config.num_attention_heads % heads == 0
                yield Finding(
                    f"{projection}_proj has {rows} rows, {heads:g} heads of {config.head_dim}, but "
                    + (
                        f"num_key_value_heads is {config.num_key_value_heads}"
                        if explicit
                        else f"num_key_value_heads is absent, which means {config.num_key_value_heads}"
                    ),
                    f"Write {heads:g} if the weights are right; to have fewer heads run `eagle3pack convert`."
                    if fits
                    else f"Export the draft again: that is no number of heads for "
                    f"{config.num_attention_heads} query heads.",
                    file=CONFIG_NAME,
                    key=".".join(path),
                    tensor=context.tensors[name].name,
                    found=config.num_key_value_heads if explicit else None,
                    expected=int(heads) if fits else None,
                )
    if not judged:
        raise Undecided("k_proj and v_proj are missing or no matrices (T01)")
    if not explicit:
        yield Finding(
            "num_key_value_heads is absent, which every engine reads as multi-head attention",
            f"Write {config.num_key_value_heads}.",
            file=CONFIG_NAME,
            key=".".join(path),
            expected=config.num_key_value_heads,
            severity="warning",
            mends=(SetKey(path, config.num_key_value_heads),) if _kv_rows_are_mha(context) else (),
        )


def _rows_allowed(context: Context, layer: int) -> set[int]:
    """Rows that agree with the config, or with the head width that the file's queries show (C07)."""
    config = context.config
    rows = context.rows(f"layers.{layer}.self_attn.q_proj.weight") or 0
    widths = {config.head_dim, rows // config.num_attention_heads}
    return {config.num_key_value_heads * width for width in widths}


def _kv_rows_are_mha(context: Context) -> bool:
    rows = {context.rows(f"layers.0.self_attn.{projection}_proj.weight") for projection in "qkv"}
    return len(rows) == 1 and None not in rows


@check(
    "C11",
    "a speculators config has its heads in one place",
    reason="Engines read transformer_layer_config; a conversion that edits a copy at the top changes "
    "nothing.",
    source="vLLM 0.32 transformers_utils/configs/speculators/algos.py",
)
def no_conflicting_copy(context: Context) -> Iterator[Finding]:
    if not context.is_speculators:
        raise not_applicable("the config is native")
    for key in ("num_key_value_heads", "num_attention_heads", "head_dim", "hidden_size", "intermediate_size"):
        top, inner = context.top.values.get(key), context.layer.values.get(key)
        if top is not None and top != inner:
            yield Finding(
                f"{key} is {describe(top)} at the top and {describe(inner)} in transformer_layer_config",
                "Remove the one at the top; engines read the other.",
                file=CONFIG_NAME,
                key=key,
                found=top,
                expected=inner,
            )


@check(
    "C12",
    "intermediate_size is that of the weights",
    reason="vLLM clips wider gate, up and down projections in silence and stops at narrower ones.",
    source="vLLM 0.32 model_executor/layers/linear.py (measured)",
)
def intermediate_size_agrees(context: Context) -> Iterator[Finding]:
    declared = context.config.intermediate_size
    for layer in range(context.num_layers_in_file):
        for name, size in _inner_sizes(context, layer):
            if size is not None and size != declared:
                yield Finding(
                    f"{name} is {size} wide, intermediate_size is {declared}",
                    f"Write {size} if the weights are right.",
                    file=CONFIG_NAME,
                    key=".".join((*context.layer_path, "intermediate_size")),
                    tensor=context.tensors[name].name,
                    found=declared,
                    expected=size,
                )


def _inner_sizes(context: Context, layer: int) -> Iterator[tuple[str, int | None]]:
    prefix = f"layers.{layer}.mlp."
    for projection in ("gate", "up"):
        name = f"{prefix}{projection}_proj.weight"
        yield name, context.rows(name)
    yield f"{prefix}down_proj.weight", context.columns(f"{prefix}down_proj.weight")


@check(
    "C13",
    "hidden_act is silu",
    engines=("vllm",),
    reason="vLLM stops with `Unsupported activation`. MiniMax-M3's own config says swigluoai, which a draft "
    "must not inherit.",
    source="vLLM 0.32 models/llama.py LlamaMLP (measured)",
)
def activation_is_silu(context: Context) -> Iterator[Finding]:
    found = context.layer.values.get("hidden_act", "silu")
    if isinstance(found, str) and found != "silu":
        yield Finding(
            f"hidden_act is {found}",
            "Write silu if the draft was trained so; no other activation loads.",
            file=CONFIG_NAME,
            key=".".join((*context.layer_path, "hidden_act")),
            found=found,
            expected="silu",
        )


CHECKS: tuple[Check, ...] = (
    layers_agree,
    head_dim_agrees,
    heads_divide_width,
    heads_divide,
    key_value_heads_agree,
    no_conflicting_copy,
    intermediate_size_agrees,
    activation_is_silu,
)
