"""C14 to C16 and C20 to C26: biases, tied embeddings and the norm switches."""

from __future__ import annotations

from collections.abc import Iterator

from eagle3pack.documents import describe
from eagle3pack.verify.check import Check, Finding, SetKey, check
from eagle3pack.verify.checks.tensors import name_in_file
from eagle3pack.verify.context import CONFIG_NAME, Context


@check(
    "C14",
    "attention_bias agrees with the bias tensors",
    reason="Biases without the switch are dropped in silence; the switch without biases leaves "
    "uninitialised memory (3e38 and NaN seen). vLLM 0.32 builds a bias for q, k, v and o alike.",
    source="vLLM 0.32 models/llama_eagle3.py (measured)",
)
def attention_bias_agrees(context: Context) -> Iterator[Finding]:
    declared = context.config.attention_bias
    key = ".".join((*context.layer_path, "attention_bias"))
    found_any = False
    for layer in range(context.num_layers_in_file):
        for projection in "qkvo":
            name = f"layers.{layer}.self_attn.{projection}_proj.bias"
            has = name in context.tensors
            found_any |= has
            if declared and not has:
                yield Finding(
                    f"attention_bias is true, but {name_in_file(context, name)} is not in the weights: vLLM "
                    "adds uninitialised memory",
                    "Write a zero bias, or attention_bias false if the draft has none.",
                    file=CONFIG_NAME,
                    key=key,
                    tensor=name_in_file(context, name),
                    engines=("vllm",) if projection == "o" else (),
                )
            elif has and not declared:
                yield Finding(
                    f"{context.tensors[name].name} is in the weights, but attention_bias is false: it is "
                    "dropped",
                    "Write attention_bias true.",
                    file=CONFIG_NAME,
                    key=key,
                    tensor=context.tensors[name].name,
                    found=False,
                    expected=True,
                )
    if declared and found_any:
        yield Finding(
            "SGLang has no biases on q, k and v and drops them in silence",
            "Serve this draft with vLLM.",
            file=CONFIG_NAME,
            key=key,
            engines=("sglang",),
            only_if_named=True,
        )


@check(
    "C15",
    "no other projection has a bias",
    reason="fc and the MLP are built without one in every engine; the tensor is dropped in silence.",
    source="vLLM 0.32 models/llama_eagle3.py (measured)",
)
def no_other_bias(context: Context) -> Iterator[Finding]:
    for name, entry in context.tensors.items():
        if name.endswith(".bias") and ".self_attn." not in name:
            yield Finding(
                f"{entry.name} is in the weights, and no engine adds it",
                "Retrain without that bias.",
                tensor=entry.name,
                file=entry.path.name,
            )


@check(
    "C16",
    "tie_word_embeddings is false",
    engines=("sglang",),
    reason="SGLang then takes the embedding for the head, whatever lm_head holds. AngelSlim has published "
    "such configs.",
    source="github.com/wejoncy/sfllm/pull/32",
)
def embeddings_not_tied(context: Context) -> Iterator[Finding]:
    for fields in (context.top, context.layer) if context.is_speculators else (context.top,):
        if fields.values.get("tie_word_embeddings") is True:
            path = (
                (*context.layer_path, "tie_word_embeddings")
                if fields is not context.top
                else ("tie_word_embeddings",)
            )
            yield Finding(
                "tie_word_embeddings is true: SGLang computes with the embedding instead of lm_head",
                "Write false; a draft has a head of its own.",
                file=CONFIG_NAME,
                key=".".join(path),
                found=True,
                expected=False,
                mends=(SetKey(path, False),) if "lm_head.weight" in context.tensors else (),
                producer_bug="AngelSlim: tie_word_embeddings true beside a separate lm_head",
            )


@check(
    "C20",
    "norm_before_residual is written",
    severity="warning",
    reason="vLLM reads an absent one as false in a native config and as true in the speculators format, "
    "whose own writer means false.",
    source="vLLM 0.32 configs/speculators/algos.py; github.com/vllm-project/speculators/issues/337",
)
def residual_norm_given(context: Context) -> Iterator[Finding]:
    if context.top.has("norm_before_residual"):
        return
    speculators = context.is_speculators
    yield Finding(
        "norm_before_residual is absent: speculators trained with false, vLLM reads true"
        if speculators
        else "norm_before_residual is absent, engines read false",
        "Write the one that the draft was trained with." if speculators else "Write false.",
        file=CONFIG_NAME,
        key="norm_before_residual",
        expected=None if speculators else False,
        severity="error" if speculators else "warning",
        mends=() if speculators else (SetKey(("norm_before_residual",), False),),
        producer_bug="speculators: norm switches lost on export (337, 610, 670)" if speculators else None,
    )


@check(
    "C21",
    "norm_before_residual is false, as every engine computes",
    severity="warning",
    engines=("sglang", "tensorrt-llm"),
    reason="SGLang and TensorRT-LLM do not know the switch and compute as if it were false: a draft trained "
    "with true loses acceptance there in silence.",
    source="SGLang models/llama_eagle3.py; TensorRT-LLM _torch/models/modeling_speculative.py",
)
def residual_norm_portable(context: Context) -> Iterator[Finding]:
    if context.config.norm_before_residual:
        yield Finding(
            "norm_before_residual is true, which only vLLM and llama.cpp honour",
            "Serve this draft with vLLM or llama.cpp.",
            file=CONFIG_NAME,
            key="norm_before_residual",
            found=True,
        )


@check(
    "C22",
    "fc_norm agrees with the fc_norm tensors",
    reason="Norms without the switch stop vLLM; the switch without norms leaves ones in silence.",
    source="github.com/vllm-project/vllm/pull/42764 (measured)",
)
def fc_norm_agrees(context: Context) -> Iterator[Finding]:
    config = context.config
    held = {name for name in context.tensors if name.startswith("fc_norm.")}
    wanted = {f"fc_norm.{i}.weight" for i in range(config.num_aux_hidden_states)} if config.fc_norm else set()
    for name in sorted(wanted - held):
        yield Finding(
            f"fc_norm is true, but {name} is not in the weights",
            "Export the draft again, or write fc_norm false if it was trained without.",
            file=CONFIG_NAME,
            key="fc_norm",
            tensor=name,
        )
    for name in sorted(held - wanted):
        yield Finding(
            f"{context.tensors[name].name} is in the weights, but "
            + (
                f"there are {config.num_aux_hidden_states} auxiliary states"
                if wanted
                else "fc_norm is not set"
            ),
            "Write fc_norm true." if not wanted else "Correct the auxiliary layer ids.",
            file=CONFIG_NAME,
            key="fc_norm",
            tensor=context.tensors[name].name,
        )
    for name in sorted(held & wanted):
        shape = context.shape(name)
        if shape != (config.target_hidden_size,):
            yield Finding(
                f"{name} has shape {list(shape or ())}, expected [{config.target_hidden_size}]",
                "Export the draft again.",
                tensor=context.tensors[name].name,
                found=list(shape or ()),
                expected=[config.target_hidden_size],
            )


@check(
    "C23",
    "norm_before_fc agrees with input_norm, in both of its places",
    reason="vLLM discards input_norm in silence where the switch is false, and takes ones where the norm is "
    "missing.",
    source="vLLM 0.32 models/llama_eagle3.py; github.com/sgl-project/sglang/pull/32334",
)
def norm_before_fc_agrees(context: Context) -> Iterator[Finding]:
    config = context.config
    top, nested = context.top.values.get("norm_before_fc"), context.eagle.values.get("norm_before_fc")
    if top is not None and nested is not None and top != nested:
        yield Finding(
            f"norm_before_fc is {describe(top)} at the top and {describe(nested)} in eagle_config",
            "Write the same in both places.",
            file=CONFIG_NAME,
            key="norm_before_fc",
            found=top,
            expected=nested,
        )
    shape = context.shape("input_norm.weight")
    width = config.num_aux_hidden_states * config.target_hidden_size
    if config.norm_before_fc and shape is None:
        yield Finding(
            "norm_before_fc is true, but input_norm.weight is not in the weights",
            "Export the draft again, or write false if it was trained without.",
            file=CONFIG_NAME,
            key="norm_before_fc",
            tensor="input_norm.weight",
        )
    elif shape is not None and not config.norm_before_fc:
        yield Finding(
            "input_norm.weight is in the weights, but norm_before_fc is not set: vLLM drops it in silence",
            "Write norm_before_fc true, at the top and in eagle_config.",
            file=CONFIG_NAME,
            key="norm_before_fc",
            tensor=context.tensors["input_norm.weight"].name,
        )
    elif shape is not None and shape != (width,):
        yield Finding(
            f"input_norm.weight has shape {list(shape)}, expected [{width}]",
            "Export the draft again.",
            tensor=context.tensors["input_norm.weight"].name,
            found=list(shape),
            expected=[width],
        )


@check(
    "C24",
    "fc_norm and norm_before_fc are not both set",
    severity="warning",
    reason="They norm the same states twice; speculators refuses the pair.",
    source="speculators models/eagle3 config",
)
def one_norm_before_fc(context: Context) -> Iterator[Finding]:
    if context.config.fc_norm and context.config.norm_before_fc:
        yield Finding(
            "fc_norm and norm_before_fc are both true",
            "Keep the one that was trained.",
            file=CONFIG_NAME,
            key="fc_norm",
        )


@check(
    "C25",
    "norm_output is written, and means what engines mean by it",
    severity="warning",
    reason="To SpecForge it says that the final norm stands before the head, which it always does; to vLLM "
    "and SGLang that the normed state is fed back, which SpecForge never trained.",
    source="SpecForge modeling/draft/llama3_eagle.py; github.com/vllm-project/vllm/pull/42764, issues/46488",
)
def norm_output_means_the_same(context: Context) -> Iterator[Finding]:
    if context.config.norm_output and not context.is_speculators:
        yield Finding(
            "norm_output is true: engines feed the normed state back, a draft that SpecForge trained did not",
            "Write false if SpecForge trained it.",
            file=CONFIG_NAME,
            key="norm_output",
            found=True,
            producer_bug="SpecForge: norm_output with another meaning than the engines'"
            if {"d2t", "t2d"} <= set(context.tensors) and context.config.fc_norm
            else None,
        )
    elif context.config.fc_norm and not context.top.has("norm_output"):
        yield Finding(
            "norm_output is absent in a draft with fc_norm, engines read false",
            "Write the one that the draft was trained with.",
            file=CONFIG_NAME,
            key="norm_output",
        )


@check(
    "C26",
    "use_aux_hidden_state is not false beside an fc",
    engines=("vllm",),
    reason="vLLM's V1 runner then drops fc in silence and feeds the last hidden state; its V2 runner "
    "ignores the switch.",
    source="vLLM 0.32 models/llama_eagle3.py, v1/worker/gpu/spec_decode/eagle/eagle3_utils.py",
)
def aux_states_are_used(context: Context) -> Iterator[Finding]:
    if context.config.use_aux_hidden_state:
        return
    has_fc = "fc.weight" in context.tensors
    yield Finding(
        "use_aux_hidden_state is false, and fc.weight in the weights is dropped in silence"
        if has_fc
        else "use_aux_hidden_state is false, which vLLM's V2 runner, the default on GPUs, ignores",
        "Write true." if has_fc else "Serve with VLLM_USE_V2_MODEL_RUNNER=0.",
        file=CONFIG_NAME,
        key="eagle_config.use_aux_hidden_state",
        found=False,
        severity="error" if has_fc else "warning",
    )


CHECKS: tuple[Check, ...] = (
    attention_bias_agrees,
    no_other_bias,
    embeddings_not_tied,
    residual_norm_given,
    residual_norm_portable,
    fc_norm_agrees,
    norm_before_fc_agrees,
    one_norm_before_fc,
    norm_output_means_the_same,
    aux_states_are_used,
)
