"""R: rotary positions, in both spellings that configs use."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from eagle3pack.documents import describe
from eagle3pack.draft.fields import Fields
from eagle3pack.draft.rope import KNOWN_ROPE_TYPES, parse_rope
from eagle3pack.errors import InputError
from eagle3pack.verify.check import Check, Finding, SetKey, Undecided, check
from eagle3pack.verify.context import CONFIG_NAME, Context

# Source: transformers 5 modeling_rope_utils.py, the _validate_*_rope_parameters functions.
_REQUIRED_KEYS: Mapping[str, tuple[str, ...]] = {
    "linear": ("factor",),
    "dynamic": ("factor",),
    "yarn": ("factor",),
    "longrope": ("short_factor", "long_factor"),
    "llama3": ("factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor"),
}


def _key(context: Context, name: str) -> str:
    return ".".join((*context.layer_path, name))


def _new_spelling(context: Context) -> Fields:
    value = context.layer.values.get("rope_parameters")
    value = value if isinstance(value, dict) else {}
    nested = value.get("full_attention")
    return Fields(nested if isinstance(nested, dict) else value, CONFIG_NAME)


def _old_spelling(context: Context) -> Fields:
    value = context.layer.values.get("rope_scaling")
    return Fields(value if isinstance(value, dict) else {}, CONFIG_NAME)


def _type_of(fields: Fields) -> Any:
    return fields.values.get("rope_type", fields.values.get("type", "default"))


def _scaling_of(fields: Fields) -> dict[str, Any]:
    """The parameters of a scaled type; the plain one has none that mean anything."""
    if _type_of(fields) == "default":
        return {}
    aside = ("rope_type", "type", "rope_theta", "partial_rotary_factor")
    return {key: value for key, value in fields.values.items() if key not in aside}


@check(
    "R01",
    "the base of the rotary frequencies is written",
    reason="Every engine takes 10000 in silence where it is absent: a draft trained with 1e6 sees other "
    "positions.",
    source="vLLM 0.32 (measured); github.com/sgl-project/sglang/issues/21397; Automodel#2920",
)
def theta_is_given(context: Context) -> Iterator[Finding]:
    if context.layer.has("rope_theta") or _new_spelling(context).has("rope_theta"):
        return
    silent_target = context.has_target and context.target.rope.theta is None
    yield Finding(
        "rope_theta is absent, engines take 10000"
        + (", as they do for the target, whose config is silent too" if silent_target else ""),
        "Write the rope_theta that the draft was trained with, usually the target's.",
        file=CONFIG_NAME,
        key=_key(context, "rope_theta"),
        expected=context.target.rope.theta if context.has_target else None,
        severity="warning" if silent_target else "error",
    )


@check(
    "R02",
    "both spellings of the rotary settings are there and equal",
    severity="warning",
    reason="transformers 4 reads rope_theta and rope_scaling, transformers 5 rope_parameters; where they "
    "differ vLLM takes the latter.",
    source="github.com/sgl-project/SpecForge/pull/742; github.com/NVIDIA/Model-Optimizer/issues/1238 "
    "(measured)",
)
def spellings_agree(context: Context) -> Iterator[Finding]:
    new, old = _new_spelling(context), _old_spelling(context)
    old_theta, new_theta = context.layer.values.get("rope_theta"), new.values.get("rope_theta")
    if old_theta is None and new_theta is None:
        raise Undecided("no theta is given (R01)")
    if new.values and (old_theta is not None or old.values):
        if old_theta is not None and new_theta is not None and old_theta != new_theta:
            yield Finding(
                f"rope_theta is {describe(old_theta)}, rope_parameters.rope_theta is {describe(new_theta)}",
                "Write the one that the draft was trained with in both places.",
                file=CONFIG_NAME,
                key=_key(context, "rope_parameters.rope_theta"),
                found=new_theta,
                expected=old_theta,
                severity="error",
            )
        if (old.values or "rope_scaling" in context.layer.values) and (
            _type_of(old) != _type_of(new) or _scaling_of(old) != _scaling_of(new)
        ):
            yield Finding(
                f"rope_scaling is {describe(dict(old.values))}, rope_parameters is "
                f"{describe(dict(new.values))}",
                "Write the same scaling in both places.",
                file=CONFIG_NAME,
                key=_key(context, "rope_parameters"),
            )
    missing = _missing_spelling(context, new, old_theta)
    if missing:
        yield missing


def _missing_spelling(context: Context, new: Fields, old_theta: Any) -> Finding | None:
    try:
        rope = parse_rope(context.layer)
    except InputError as error:
        raise Undecided(f"{error} (R03)") from None
    path = context.layer_path
    if old_theta is None:
        scaling = rope.as_v4()
        mends = tuple(
            SetKey((*path, key), value)
            for key, value in scaling.items()
            if context.layer.values.get(key) != value
        )
        return Finding(
            "only rope_parameters is given, which transformers 4 does not read",
            "Write rope_theta and rope_scaling too.",
            file=CONFIG_NAME,
            key=_key(context, "rope_theta"),
            mends=mends,
        )
    if not new.values:
        return Finding(
            "rope_parameters is not given, only the spelling of transformers 4",
            "Write rope_parameters too.",
            file=CONFIG_NAME,
            key=_key(context, "rope_parameters"),
            severity="note",
            mends=(SetKey((*path, "rope_parameters"), rope.as_v5()),),
        )
    return None


@check(
    "R03",
    "the kind of rotary scaling is known and complete",
    reason="transformers 5 stops with `Missing required keys in rope_parameters for 'rope_type'='yarn': "
    "{'factor'}`; an unknown type passes until the model is built.",
    source="github.com/vllm-project/vllm/pull/51092; TorchSpec#54 (measured)",
)
def scaling_is_complete(context: Context) -> Iterator[Finding]:
    for name, fields in (
        ("rope_parameters", _new_spelling(context)),
        ("rope_scaling", _old_spelling(context)),
    ):
        kind = _type_of(fields)
        if fields.values and not (isinstance(kind, str) and kind in KNOWN_ROPE_TYPES | {"mrope"}):
            yield Finding(
                f"{name} has the type {describe(kind)}, which no engine knows",
                f"Write one of {', '.join(sorted(KNOWN_ROPE_TYPES))}.",
                file=CONFIG_NAME,
                key=_key(context, name),
                found=kind if isinstance(kind, str) else describe(kind),
            )
            continue
        for key in _REQUIRED_KEYS.get(str(kind), ()):
            if fields.values and not _is_number_or_list(fields.values.get(key)):
                yield Finding(
                    f"{name} of type {kind} needs {key}, "
                    + (
                        f"found {describe(fields.values[key])}"
                        if key in fields.values
                        else "which is missing"
                    ),
                    "Copy it from the config that the draft was trained with.",
                    file=CONFIG_NAME,
                    key=_key(context, f"{name}.{key}"),
                    found=describe(fields.values.get(key)),
                    producer_bug="a scaling parameter lost in the export (TorchSpec, speculators before 574)",
                )
    for name, fields in (
        ("rope_theta", context.layer),
        ("rope_parameters.rope_theta", _new_spelling(context)),
    ):
        theta = fields.values.get("rope_theta")
        if theta is not None and not _is_positive(theta):
            yield Finding(
                f"{name} is {describe(theta)}, expected a positive number",
                "Write the number that the draft was trained with.",
                file=CONFIG_NAME,
                key=_key(context, name),
                found=describe(theta),
            )


def _is_positive(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value < math.inf


def _is_number_or_list(value: Any) -> bool:
    return _is_positive(value) or (isinstance(value, list) and bool(value) and all(map(_is_positive, value)))


@check(
    "R05",
    "theta and scaling are the target's",
    severity="warning",
    reason="A draft usually rotates as its target does, but AngelSlim's differ on purpose and accept more "
    "so: never changed here.",
    source="github.com/wejoncy/sfllm/pull/32; github.com/vllm-project/vllm-ascend/issues/6612",
)
def rope_is_the_targets(context: Context) -> Iterator[Finding]:
    draft, target = context.config.rope, context.target.rope
    if target.theta is None or draft.theta is None:
        raise Undecided("the target's or the draft's config does not give theta in a form that is read here")
    if draft.theta != target.theta:
        yield Finding(
            f"theta is {draft.theta:g}, the target's is {target.theta:g}",
            "Compare with the training config; write the target's only if it was trained so.",
            file=CONFIG_NAME,
            key=_key(context, "rope_theta"),
            found=draft.theta,
            expected=target.theta,
        )
    if draft.rope_type != target.rope_type:
        yield Finding(
            f"the rotary scaling is {draft.rope_type}, the target's is {target.rope_type}",
            "Compare with the training config.",
            file=CONFIG_NAME,
            key=_key(context, "rope_scaling"),
            found=draft.rope_type,
            expected=target.rope_type,
        )


@check(
    "R06",
    "the whole head is rotated",
    severity="warning",
    reason="MiniMax-M3 rotates half of each head; a Llama draft that inherits this by accident sees other "
    "positions.",
    source="vLLM 0.32 transformers_utils/configs/minimax_m3.py",
)
def rotation_is_whole(context: Context) -> Iterator[Finding]:
    factor = context.config.rope.partial_rotary_factor
    if factor != 1.0 or context.layer.has("rotary_dim"):
        yield Finding(
            f"partial_rotary_factor is {factor:g}"
            if factor != 1.0
            else f"rotary_dim is {describe(context.layer.values['rotary_dim'])}, which a Llama draft ignores",
            "Remove it if the draft was trained with whole heads.",
            file=CONFIG_NAME,
            key=_key(context, "partial_rotary_factor" if factor != 1.0 else "rotary_dim"),
        )


@check(
    "R07",
    "multimodal rotary sections are there only for a vision-language target",
    severity="warning",
    engines=("sglang",),
    reason="SGLang switches to three-dimensional positions as soon as it sees mrope_section.",
    source="SGLang models/llama_eagle3.py; SpecForge qwen2.5-vl config",
)
def no_stray_mrope(context: Context) -> Iterator[Finding]:
    scaling = {**_old_spelling(context).values, **_new_spelling(context).values}
    if "mrope_section" not in scaling:
        return
    if not context.has_target:
        raise Undecided("mrope_section is set, and the target is not known")
    if not context.target.is_multimodal and "vl" not in context.target.model_type:
        yield Finding(
            f"mrope_section is set, {context.target.name} is a text model",
            "Remove it.",
            file=CONFIG_NAME,
            key=_key(context, "rope_scaling.mrope_section"),
        )


@check(
    "R08",
    "head_dim is even",
    reason="Rotary embedding turns pairs of dimensions.",
    source="Su et al. 2021, arXiv:2104.09864",
)
def head_dim_is_even(context: Context) -> Iterator[Finding]:
    if context.config.head_dim % 2:
        yield Finding(
            f"head_dim is {context.config.head_dim}",
            "Correct the shape.",
            file=CONFIG_NAME,
            key=_key(context, "head_dim"),
            found=context.config.head_dim,
        )


CHECKS: tuple[Check, ...] = (
    theta_is_given,
    spellings_agree,
    scaling_is_complete,
    rope_is_the_targets,
    rotation_is_whole,
    no_stray_mrope,
    head_dim_is_even,
)
