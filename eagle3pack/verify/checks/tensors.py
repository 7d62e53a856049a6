"""T01 to T12: which tensors are there and what shape they have; headers only."""

from __future__ import annotations

import re
from collections.abc import Iterator

from eagle3pack.draft.tensors import layer_of
from eagle3pack.verify.check import Check, DropTensor, Finding, RenameTensor, SetKey, Undecided, check
from eagle3pack.verify.checks.settings import QUANTISED_SUFFIXES
from eagle3pack.verify.context import CONFIG_NAME, Context

# Tensors whose presence a check of its own judges: one fault, one finding.
_PRESENCE_JUDGED = re.compile(
    r"lm_head\.|embed_tokens\.|d2t$|t2d$|fc_norm\.|input_norm\.|.*\.[qk]_norm\.|.*\.bias$|.*kv_a_proj|verifier_"
)
# Axes that a check of its own judges (C07, C10, C12, C19, T07, T08, T12, V03), by name without the layer.
_AXES_JUDGED: dict[str, frozenset[int]] = {
    "self_attn.q_proj.weight": frozenset({0, 1}),
    "self_attn.k_proj.weight": frozenset({0, 1}),
    "self_attn.v_proj.weight": frozenset({0, 1}),
    "mlp.gate_proj.weight": frozenset({0}),
    "mlp.up_proj.weight": frozenset({0}),
    "mlp.down_proj.weight": frozenset({1}),
    "fc.weight": frozenset({1}),
    "lm_head.weight": frozenset({0}),
    "embed_tokens.weight": frozenset({0, 1}),
    "d2t": frozenset({0}),
    "t2d": frozenset({0}),
    "input_norm.weight": frozenset({0}),
}
# What SGLang before sgl-project/sglang#24663 wrote, and what it maps it to.
_LEGACY_NORMS = {"aux_norm_low": "fc_norm.0", "aux_norm_mid": "fc_norm.1", "aux_norm_high": "fc_norm.2"}


def _without_layer(name: str) -> str:
    return re.sub(r"^layers\.\d+\.", "", name)


def name_in_file(context: Context, logical: str) -> str:
    """As the file spells it; what is missing, as it spells that layer's other tensors."""
    entry = context.tensors.get(logical)
    if entry is not None:
        return entry.name
    prefix = logical.removesuffix(_without_layer(logical))
    for name, other in context.tensors.items() if prefix else ():
        if name.startswith(prefix) and other.name.endswith(_without_layer(name)):
            return other.name.removesuffix(_without_layer(name)) + _without_layer(logical)
    return logical


@check(
    "T01",
    "every tensor that a draft needs is there",
    reason="vLLM does not check that all weights were loaded: a missing norm becomes ones, a missing "
    "projection uninitialised memory, in silence.",
    source="vLLM 0.32 model_loader/default_loader.py (measured)",
)
def nothing_missing(context: Context) -> Iterator[Finding]:
    for name, spec in context.expected.items():
        here = name in context.tensors or _is_packed(context, name)
        if spec.required and not here and not _PRESENCE_JUDGED.match(name):
            norm = name.endswith("norm.weight") or "layernorm" in name
            yield Finding(
                f"{name_in_file(context, name)} is missing; vLLM computes with "
                f"{'ones' if norm else 'uninitialised memory'} in its place",
                "Export the draft again; if the name differs, rename it.",
                tensor=name_in_file(context, name),
                expected=list(spec.shape),
            )


def _is_packed(context: Context, name: str) -> bool:
    """Whether a quantised draft holds the weight under another name."""
    stem = name.removesuffix("weight")
    packed = any(f"{stem}{suffix}" in context.tensors for suffix in ("weight_packed", "qweight"))
    return packed and context.config.quantization is not None


@check(
    "T02",
    "no tensor name begins with `model.`",
    engines=("vllm",),
    reason="vLLM stops: `There is no module or parameter named 'model' in LlamaModel`.",
    source="github.com/NVIDIA-NeMo/Automodel/pull/2235 (measured)",
)
def no_model_prefix(context: Context) -> Iterator[Finding]:
    prefixed = [entry for entry in context.tensors.values() if entry.name.startswith("model.")]
    if prefixed:
        yield Finding(
            f"{len(prefixed)} tensor names begin with `model.`, such as {prefixed[0].name}",
            "Rename them without that prefix.",
            file=prefixed[0].path.name,
            tensor=prefixed[0].name,
            mends=tuple(RenameTensor(entry.name, entry.name.removeprefix("model.")) for entry in prefixed),
            producer_bug="NeMo AutoModel: names with the prefix `model.`",
        )


@check(
    "T03",
    "no tensor is there that a draft of this config does not have",
    reason="vLLM stops at an unknown name, SGLang skips it in silence: either way it is not what was "
    "trained.",
    source="github.com/vllm-project/vllm/issues/54526 (measured)",
)
def nothing_unknown(context: Context) -> Iterator[Finding]:
    expected, layers = context.expected, context.config.num_hidden_layers
    for name, entry in context.tensors.items():
        layer = layer_of(name)
        beyond = layer is not None and layer >= min(layers, context.num_layers_in_file)  # C06
        if (
            name in expected
            or _PRESENCE_JUDGED.match(name)
            or (beyond and _without_layer(name) in _layer_names(context))
        ):
            continue
        if name.endswith("rotary_emb.inv_freq"):
            yield Finding(
                f"{entry.name} is a buffer that engines compute themselves and skip",
                "Leave it out.",
                file=entry.path.name,
                tensor=entry.name,
                severity="note",
                mends=(DropTensor(entry.name),),
            )
        elif context.config.quantization is not None and name.endswith(QUANTISED_SUFFIXES):
            continue
        else:
            stem = name.removesuffix(".weight")
            yield Finding(
                f"{entry.name} is no tensor of this draft",
                f"Rename it to {_LEGACY_NORMS[stem]}.weight."
                if stem in _LEGACY_NORMS
                else "Leave it out, or set the switch in the config that it belongs to.",
                file=entry.path.name,
                tensor=entry.name,
                mends=(RenameTensor(entry.name, f"{_LEGACY_NORMS[stem]}.weight"),)
                if stem in _LEGACY_NORMS
                else (),
            )


def _layer_names(context: Context) -> set[str]:
    return {_without_layer(name) for name in context.expected if layer_of(name) is not None}


@check(
    "T04",
    "no weight of the training's verifier is left over",
    engines=("vllm",),
    reason="vLLM stops at the unknown module; it is also a copy of the target's weights.",
    source="speculators models/eagle3 (measured)",
)
def no_verifier_weights(context: Context) -> Iterator[Finding]:
    for name, entry in context.tensors.items():
        if name.startswith("verifier_"):
            yield Finding(
                f"{entry.name} belongs to the training, not to the draft",
                "Leave it out.",
                file=entry.path.name,
                tensor=entry.name,
                mends=(DropTensor(entry.name),),
                producer_bug="speculators: verifier weights saved with the draft",
            )


@check(
    "T05",
    "the first layer is named `midlayer.`",
    severity="warning",
    engines=("sglang",),
    reason="SGLang before #24663 drops `layers.0.` in silence and computes with random weights; every "
    "engine reads `midlayer.`.",
    source="github.com/lightseekorg/TorchSpec/issues/63; github.com/sgl-project/sglang/pull/24663",
)
def portable_prefix(context: Context) -> Iterator[Finding]:
    names = [
        entry.name
        for entry in context.tensors.values()
        if entry.name.removeprefix("model.").startswith("layers.0.")
    ]
    if names:
        only_layer = context.num_layers_in_file == 1 and not context.is_speculators
        yield Finding(
            f"{len(names)} tensors are named `layers.0.`, which older SGLang drops in silence",
            "Rename them to `midlayer.`.",
            tensor=names[0],
            mends=tuple(
                RenameTensor(name, "midlayer." + name.removeprefix("model.").removeprefix("layers.0."))
                for name in names
            )
            if only_layer
            else (),
        )


@check(
    "T06",
    "every tensor has exactly the shape that the config gives it",
    reason="vLLM clips a tensor that is too large in silence; one that is too small stops it with a message "
    "about `narrow`.",
    source="vLLM 0.32 model_executor/layers/linear.py, parameter.py (measured)",
)
def exact_shapes(context: Context) -> Iterator[Finding]:
    if context.config.quantization is not None:
        raise Undecided("the draft is quantised: its tensors are packed")
    for name, spec in context.expected.items():
        shape = context.shape(name)
        if shape is None or name.startswith("fc_norm."):
            continue
        judged = _AXES_JUDGED.get(_without_layer(name), frozenset())
        if name.endswith("o_proj.weight") and shape[1:] == (context.rows(name.replace(".o_", ".q_")),):
            judged = frozenset({1})  # as wide as the queries: C07 judges both
        wrong_rank = len(shape) != len(spec.shape)
        if wrong_rank and name in ("d2t", "t2d", "embed_tokens.weight"):
            continue  # V03, V09, T12
        if wrong_rank or any(
            found != wanted
            for axis, (found, wanted) in enumerate(zip(shape, spec.shape, strict=False))
            if axis not in judged
        ):
            yield Finding(
                f"{name_in_file(context, name)} has shape {list(shape)}, the config makes it "
                f"{list(spec.shape)}",
                "Correct the config if the weights are right, else export the draft again.",
                file=context.tensors[name].path.name,
                tensor=context.tensors[name].name,
                found=list(shape),
                expected=list(spec.shape),
            )


@check(
    "T07",
    "the first layer's projections read token and state, the others the state",
    reason="Layer 0 concatenates the token's embedding and the hidden state: 2H columns; a bare assertion "
    "fails else.",
    source="github.com/vllm-project/vllm/pull/26164 (measured)",
)
def attention_inputs(context: Context) -> Iterator[Finding]:
    hidden = context.config.hidden_size
    for layer in range(context.num_layers_in_file):
        expected = 2 * hidden if layer == 0 else hidden
        for projection in "qkv":
            name = f"layers.{layer}.self_attn.{projection}_proj.weight"
            columns = context.columns(name)
            if columns is not None and columns != expected:
                yield Finding(
                    f"{name_in_file(context, name)} reads {columns} values, layer {layer} gives it "
                    f"{expected}",
                    "Export the draft again: this is no EAGLE3 layer of that place.",
                    tensor=name_in_file(context, name),
                    found=columns,
                    expected=expected,
                )


@check(
    "T08",
    "fc reads as many auxiliary states as the config names",
    reason="`Tried to load weights of size torch.Size([256, 1024]) to a parameter of size torch.Size([256, "
    "768])`.",
    source="github.com/vllm-project/vllm/issues/17740, 18906, 19174 (measured)",
)
def fc_width(context: Context) -> Iterator[Finding]:
    config = context.config
    columns = context.columns("fc.weight")
    if columns is None:
        raise Undecided("fc.weight is missing or no matrix (T01)")
    width = config.num_aux_hidden_states * config.target_hidden_size
    if columns == width:
        return
    if context.has_target and columns == config.num_aux_hidden_states * context.target.hidden_size:
        raise Undecided("target_hidden_size is not the target's (T11)")
    states = columns / config.target_hidden_size
    yield Finding(
        f"fc.weight reads {columns} values, {states:g} states of {config.target_hidden_size}; the config "
        f"makes it {config.num_aux_hidden_states} states",
        "Name that many layers in eagle_aux_hidden_state_layer_ids, in eagle_config too."
        if states.is_integer()
        else "Correct target_hidden_size.",
        file=CONFIG_NAME,
        key="num_aux_hidden_states"
        if context.top.has("num_aux_hidden_states")
        else "eagle_aux_hidden_state_layer_ids",
        tensor=name_in_file(context, "fc.weight"),
        found=columns,
        expected=width,
    )


@check(
    "T09",
    "another number of auxiliary states than three is said where engines look for it",
    reason="vLLM and SGLang size fc by num_aux_hidden_states or by the ids inside eagle_config, never by "
    "those at the top; else they take three.",
    source="vLLM 0.32 models/llama_eagle3.py (measured)",
)
def aux_count_is_visible(context: Context) -> Iterator[Finding]:
    config = context.config
    ids = config.aux_hidden_state_layer_ids
    if config.num_aux_hidden_states == 3 or ids is None:
        return
    place = context.layer if context.is_speculators else context.top  # vLLM flattens the former's layer
    nested = place.values.get("eagle_config")
    ids_nested = nested.get("eagle_aux_hidden_state_layer_ids") if isinstance(nested, dict) else None
    if place.has("num_aux_hidden_states") or isinstance(ids_nested, list):
        return
    path = (*context.layer_path, "num_aux_hidden_states")
    mend = (
        SetKey(path, config.num_aux_hidden_states)
        if context.is_speculators
        else SetKey(("eagle_config", "eagle_aux_hidden_state_layer_ids"), list(ids))
    )
    yield Finding(
        f"the draft takes {config.num_aux_hidden_states} auxiliary states, but only the ids at the top say "
        "so: engines build an fc for three",
        f"Write {'.'.join(mend.path)} too.",
        file=CONFIG_NAME,
        key=".".join(mend.path),
        expected=mend.value,
        mends=(mend,),
    )


@check(
    "T11",
    "a draft of another width than its target says so and brings its own embedding",
    reason="The target's embedding has the wrong width, and the fused state another size: a crash, or worse.",
    source="github.com/vllm-project/vllm/issues/17957, 18906; yuhuili/EAGLE3-LLaMA3.3-Instruct-70B",
)
def other_width(context: Context) -> Iterator[Finding]:
    config = context.config
    if _names_another_width(context):
        yield Finding(
            f"target_hidden_size is {config.target_hidden_size}, that of {context.target.name} is "
            f"{context.target.hidden_size}",
            "Write the target's hidden_size, or use the target that the draft was trained for.",
            file=CONFIG_NAME,
            key="target_hidden_size",
            found=config.target_hidden_size,
            expected=context.target.hidden_size,
        )
        return
    if config.target_hidden_size != config.hidden_size and "embed_tokens.weight" not in context.tensors:
        if context.shape("fc.weight") == (
            config.hidden_size,
            config.num_aux_hidden_states * config.hidden_size,
        ):
            raise Undecided("target_hidden_size does not fit fc (T08)")
        yield Finding(
            f"the draft is {config.hidden_size} wide, its target {config.target_hidden_size}: it cannot "
            "share the target's embedding and has none of its own",
            "Add the embed_tokens.weight that the draft was trained with.",
            tensor="embed_tokens.weight",
            expected=[config.vocab_size, config.hidden_size],
        )


def _names_another_width(context: Context) -> bool:
    if not context.has_target or not context.top.has("target_hidden_size"):
        return False
    return context.config.target_hidden_size != context.target.hidden_size


@check(
    "T12",
    "embed_tokens covers the vocabulary",
    reason="vLLM stops in a bare assertion.",
    source="vLLM 0.32 layers/vocab_parallel_embedding.py (measured)",
)
def embedding_shape(context: Context) -> Iterator[Finding]:
    shape = context.shape("embed_tokens.weight")
    expected = (context.config.vocab_size, context.config.hidden_size)
    if shape is not None and shape != expected:
        yield Finding(
            f"embed_tokens.weight has shape {list(shape)}, the config makes it {list(expected)}",
            "Correct vocab_size, or leave the tensor out: engines then share the target's.",
            tensor=name_in_file(context, "embed_tokens.weight"),
            found=list(shape),
            expected=list(expected),
        )


CHECKS: tuple[Check, ...] = (
    nothing_missing,
    no_model_prefix,
    nothing_unknown,
    no_verifier_weights,
    portable_prefix,
    exact_shapes,
    attention_inputs,
    fc_width,
    aux_count_is_visible,
    other_width,
    embedding_shape,
)
