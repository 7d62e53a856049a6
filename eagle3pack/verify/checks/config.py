"""C01 to C05: the dialect, the architecture and the types of config.json."""

from __future__ import annotations

from collections.abc import Iterator

from eagle3pack.documents import describe, load_schema
from eagle3pack.draft.config import LLAMA_ARCHITECTURES, SPECULATORS_ARCHITECTURES, parse_draft_config
from eagle3pack.draft.producers import PORTABLE_ARCHITECTURE
from eagle3pack.errors import InputError, UnsupportedDraftError
from eagle3pack.verify.check import Check, Finding, RemoveKey, SetKey, Undecided, check
from eagle3pack.verify.checks.tensors import name_in_file
from eagle3pack.verify.context import CONFIG_NAME, Context
from eagle3pack.verify.schema import Problem, problems, without_key

# Keys that a check of its own judges whole (C01, C02, R03, A02), so that one fault is told once.
_JUDGED_ELSEWHERE = frozenset(
    {
        *("architectures", "model_type", "speculators_model_type"),
        *("rope_theta", "eagle_aux_hidden_state_layer_ids"),
    }
)

# What vLLM 0.32 makes of `architectures` (transformers_utils/configs/eagle.py, models/registry.py).
_VLLM_ARCHITECTURES = frozenset(
    {
        "Eagle3LlamaForCausalLM",
        "LlamaForCausalLMEagle3",
        "Eagle3MiniMaxM2ForCausalLM",
        "Eagle3Qwen2_5vlForCausalLM",
        "Eagle3Qwen3vlForCausalLM",
        "Eagle3Qwen3ForCausalLM",
        "Eagle3DeepseekV2ForCausalLM",
        "Eagle3DeepseekV3ForCausalLM",
        "PEagleDraftModel",
        "PeagleLlamaForCausalLM",
        "PeagleQwen3ForCausalLM",
    }
)
_SAME_LAYERS_AS_PORTABLE = frozenset({"LlamaForCausalLM", "Eagle3LlamaForCausalLM", "EAGLE3LlamaForCausalLM"})


@check(
    "C01",
    "the config is in one recognised format",
    reason="vLLM stops with `Should have a model_type key` or `Invalid speculators config structure`.",
    source="vLLM 0.32 transformers_utils/config.py, configs/speculators (measured)",
)
def recognised_format(context: Context) -> Iterator[Finding]:
    top = context.top
    if not context.is_speculators:
        if not isinstance(top.values.get("model_type"), str):
            yield Finding(
                "model_type is missing, so vLLM does not know how to read the config"
                if "model_type" not in top.values
                else f"model_type is {describe(top.values['model_type'])}, expected a text",
                "Write model_type llama (qwen3 for a draft with q/k norms).",
                file=CONFIG_NAME,
                key="model_type",
                found=top.values.get("model_type"),
                expected="llama",
                mends=_model_type_mend(context),
            )
    else:
        kind = top.values.get("speculators_model_type")
        if kind != "eagle3":
            yield Finding(
                f"the speculators format needs speculators_model_type eagle3, found {describe(kind)}",
                "Export the draft again with speculators' EAGLE3 model.",
                file=CONFIG_NAME,
                key="speculators_model_type",
                found=kind,
                expected="eagle3",
            )
        if not isinstance(top.values.get("transformer_layer_config"), dict):
            yield Finding(
                "the speculators format needs the object transformer_layer_config",
                "Export the draft again; the decoder layer's shape stands there.",
                file=CONFIG_NAME,
                key="transformer_layer_config",
                found=top.values.get("transformer_layer_config"),
            )
        elif not isinstance(top.values.get("speculators_config"), dict):
            yield Finding(
                "the speculators format needs the object speculators_config",
                "Export the draft again; the target and the proposal method stand there.",
                file=CONFIG_NAME,
                key="speculators_config",
                found=top.values.get("speculators_config"),
            )


def _model_type_mend(context: Context) -> tuple[SetKey, ...]:
    name = _first_architecture(context)
    if "model_type" in context.top.values or name not in LLAMA_ARCHITECTURES:
        return ()
    return (SetKey(("model_type",), "llama"),)


def _first_architecture(context: Context) -> str:
    names = context.top.values.get("architectures")
    return names[0] if isinstance(names, list) and names and isinstance(names[0], str) else ""


def vllm_architecture(name: str) -> str:
    """The name that vLLM looks up for a draft's architecture."""
    return name if name.startswith("Eagle3") or name.endswith("Eagle3") else f"Eagle3{name}"


@check(
    "C02",
    "architectures names one class that the engines load",
    reason="vLLM says `Model architectures [...] are not supported`; SGLang and SpecForge want the one "
    "exact name.",
    source="vLLM 0.32 models/registry.py (measured); github.com/sgl-project/sglang/pull/33966",
)
def one_known_architecture(context: Context) -> Iterator[Finding]:
    names = context.top.values.get("architectures")
    if not isinstance(names, list) or not names or not all(isinstance(name, str) for name in names):
        yield Finding(
            "architectures is missing" if names is None else f"architectures is {describe(names)}",
            f"Write ['{PORTABLE_ARCHITECTURE}'].",
            file=CONFIG_NAME,
            key="architectures",
            found=names,
            expected=[PORTABLE_ARCHITECTURE],
        )
        return
    if len(names) > 1:
        yield Finding(
            f"architectures lists {len(names)} names; vLLM takes the first it knows, others refuse",
            "Keep one.",
            file=CONFIG_NAME,
            key="architectures",
            found=names,
            severity="warning",
        )
    name = names[0]
    if context.is_speculators:
        yield from _speculators_architecture(context, name)
        return
    if vllm_architecture(name) not in _VLLM_ARCHITECTURES:
        yield Finding(
            f"architectures is {name}, which vLLM does not load as an EAGLE3 draft",
            "Export in the speculators format as a whole, or write the name of a native draft."
            if name in SPECULATORS_ARCHITECTURES
            else f"Write {PORTABLE_ARCHITECTURE}, if its layers are Llama's.",
            file=CONFIG_NAME,
            key="architectures",
            found=names,
            expected=[PORTABLE_ARCHITECTURE],
            engines=("vllm",),
            mends=_portable_name(name),
        )
    if name != PORTABLE_ARCHITECTURE:
        yield Finding(
            f"architectures is {name}; SGLang loads {PORTABLE_ARCHITECTURE} alone",
            "Write that name if its layers are Llama's.",
            file=CONFIG_NAME,
            key="architectures",
            found=names,
            expected=[PORTABLE_ARCHITECTURE],
            engines=("sglang",),
            only_if_named=True,
            mends=_portable_name(name),
        )


def _portable_name(name: str) -> tuple[SetKey, ...]:
    if name not in _SAME_LAYERS_AS_PORTABLE:
        return ()
    return (SetKey(("architectures",), [PORTABLE_ARCHITECTURE]),)


def _speculators_architecture(context: Context, name: str) -> Iterator[Finding]:
    kind = context.layer.values.get("model_type", "llama")
    if kind not in ("llama", "qwen3"):
        yield Finding(
            f"transformer_layer_config.model_type is {describe(kind)}; vLLM builds llama and qwen3 layers",
            "Only those two load in this format.",
            file=CONFIG_NAME,
            key="transformer_layer_config.model_type",
            found=kind,
            expected="llama",
            engines=("vllm",),
        )
    yield Finding(
        f"architectures is {name}, in the speculators format, which SGLang does not read",
        "Run `eagle3pack convert --canonical` for a draft that every engine loads.",
        file=CONFIG_NAME,
        key="architectures",
        found=name,
        expected=[PORTABLE_ARCHITECTURE],
        engines=("sglang",),
        only_if_named=True,
    )


@check(
    "C03",
    "the architecture agrees with the tensors",
    reason="Missing q/k norms become ones in silence; norms that the architecture does not have stop vLLM.",
    source="vLLM 0.32 models/qwen3_eagle3.py, llama_eagle3.py (measured)",
)
def architecture_agrees(context: Context) -> Iterator[Finding]:
    wants = context.config.qk_norm
    for layer in range(context.num_layers_in_file):
        for projection in "qk":
            name = f"layers.{layer}.self_attn.{projection}_norm.weight"
            has = name in context.tensors
            if wants and not has:
                yield Finding(
                    f"{context.config.architecture} norms queries and keys, but "
                    f"{name_in_file(context, name)} is not in the weights",
                    "Export the draft again, or write a Llama architecture if it has no such norm.",
                    tensor=name_in_file(context, name),
                    engines=("vllm",),
                )
            elif has and not wants:
                yield Finding(
                    f"{name_in_file(context, name)} is in the weights, but {context.config.architecture} "
                    "has no q/k norms",
                    "Write Eagle3Qwen3ForCausalLM (qwen3 layers in the speculators format).",
                    file=CONFIG_NAME,
                    key="architectures",
                    tensor=context.tensors[name].name,
                )


@check(
    "C04",
    "the draft has plain attention, which these checks know",
    severity="warning",
    reason="An MLA or parallel draft is another model: its tensors are not checked here, and its keys and "
    "values cannot be merged.",
    source="TorchSpec configs/draft_models/kimi_k25_eagle3_mla.json; "
    "vLLM 0.32 transformers_utils/model_arch_config_convertor.py",
)
def plain_attention(context: Context) -> Iterator[Finding]:
    try:
        parse_draft_config(context.raw, where=CONFIG_NAME)
        kind = context.top.values.get("model_type")
        if not context.is_speculators and str(kind).startswith("deepseek_v"):
            yield Finding(
                f"model_type is {describe(kind)}, of MLA, though {_first_architecture(context)} is not: "
                "engines read a latent width from it that the draft does not have",
                "Write llama (qwen3 for a draft with q/k norms), if the weights are of plain attention.",
                file=CONFIG_NAME,
                key="model_type",
                found=kind,
                expected="llama",
            )
    except UnsupportedDraftError as error:
        if "layers.0.self_attn.k_proj.weight" in context.headers.tensors:
            yield Finding(
                f"the weights are of plain attention, {_first_architecture(context)} is not",
                "Write the architecture that the draft was trained with, LlamaForCausalLMEagle3 for most.",
                file=CONFIG_NAME,
                key="architectures",
                severity="error",
            )
            return
        yield Finding(
            error.problem,
            "vLLM may well load it; its shape, tensors and vocabulary were not checked.",
            file=CONFIG_NAME,
            key="architectures",
            severity="warning"
            if vllm_architecture(_first_architecture(context)) in _VLLM_ARCHITECTURES
            else "error",
        )
    except InputError as error:
        raise Undecided(str(error)) from None


@check(
    "C05",
    "every value has the type that transformers 5 accepts",
    reason="vLLM reads configs through strict dataclasses: `StrictDataclassFieldValidationError: Field "
    "'use_cache' expected bool, got NoneType`. ModelOpt exports such nulls.",
    source="huggingface_hub dataclasses; vLLM 0.32 (measured)",
)
def types_are_right(context: Context) -> Iterator[Finding]:
    told: set[tuple[str, ...]] = set()
    for problem in problems(context.raw, load_schema("draft-config")):
        if _is_judged_elsewhere(problem.path) or problem.path in told:
            continue
        told.add(problem.path)
        yield Finding(
            problem.message,
            "Remove the key or write a value of that type." if problem.keyword != "required" else "Write it.",
            file=CONFIG_NAME,
            key=".".join(problem.path),
            found=problem.found,
            mends=_without_null(context, problem),
            producer_bug="ModelOpt: nulls in the exported config"
            if problem.found is None and problem.keyword == "type"
            else None,
        )


def _without_null(context: Context, problem: Problem) -> tuple[RemoveKey, ...]:
    """The key left out, where its null reads as its absence does."""
    if problem.found is not None or problem.keyword != "type":
        return ()
    without = without_key(context.raw, problem.path)
    try:
        same = context.config == parse_draft_config(without, where=CONFIG_NAME)
    except (Undecided, InputError):
        return ()
    required = any(other.path == problem.path for other in problems(without, load_schema("draft-config")))
    return (RemoveKey(problem.path),) if same and not required else ()


def _is_judged_elsewhere(path: tuple[str, ...]) -> bool:
    rope = {"rope_scaling", "rope_parameters"} & set(path[:-1])  # R03 judges what is in them
    return bool(rope or _JUDGED_ELSEWHERE & set(path)) or path == ("transformer_layer_config",)


CHECKS: tuple[Check, ...] = (
    recognised_format,
    one_known_architecture,
    architecture_agrees,
    plain_attention,
    types_are_right,
)
