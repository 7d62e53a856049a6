"""A: which hidden states of the target the draft is fed.

Ids count as vLLM does: k is the hidden state after k layers. SGLang's count the layer whose output it is,
one less. Engines look for them in different places and take (2, L/2, L-3) where they find none.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

from eagle3pack.documents import describe
from eagle3pack.verify.check import Check, Finding, SetKey, Undecided, check
from eagle3pack.verify.context import CONFIG_NAME, Context

KEY = "eagle_aux_hidden_state_layer_ids"
NESTED_KEY = f"eagle_config.{KEY}"


def _places(context: Context) -> dict[str, object]:
    """What stands in each of the two places; absent and null are left out."""
    return {
        name: fields.values[KEY]
        for name, fields in ((KEY, context.top), (NESTED_KEY, context.eagle))
        if fields.has(KEY)
    }


def _as_ids(value: object) -> list[int] | None:
    if isinstance(value, list) and all(isinstance(i, int) and not isinstance(i, bool) for i in value):
        return value
    return None


def both_places(context: Context, ids: list[int]) -> tuple[SetKey, ...]:
    """The mend that writes ids at the top and inside eagle_config."""
    mends = [SetKey((KEY,), ids)] if context.top.values.get(KEY) != ids else []
    if not context.is_speculators and context.eagle.values.get(KEY) != ids:
        mends.append(SetKey(("eagle_config", KEY), ids))
    return tuple(mends)


@check(
    "A01",
    "the auxiliary layer ids are at the top and in eagle_config, equal",
    reason="vLLM's V2 runner, the default on GPUs, reads only the top, SGLang only eagle_config; each takes "
    "its default in silence. An acceptance of 1.21 % was seen.",
    source="github.com/vllm-project/vllm/issues/50170 (measured)",
)
def ids_in_both_places(context: Context) -> Iterator[Finding]:
    places = _places(context)
    if not places or any(_as_ids(value) is None for value in places.values()):
        raise Undecided("no ids are given (A05), or they are no list of numbers (A02)")
    values = [value for value in places.values() if isinstance(value, list)]
    if len(values) == 2:
        if values[0] != values[1]:
            yield Finding(
                f"{KEY} is {values[0]} at the top and {values[1]} in eagle_config",
                "Write the one that the draft was trained with in both places.",
                file=CONFIG_NAME,
                key=NESTED_KEY,
                found=values[1],
                expected=values[0],
            )
        return
    if context.is_speculators and KEY in places:
        return  # the format has one place, and engines that read the format read it there
    (name, ids), missing_top = next(iter(places.items())), KEY not in places
    ids = values[0]
    if not missing_top and len(ids) != 3 and not context.top.has("num_aux_hidden_states"):
        raise Undecided("the ids at the top alone do not size fc either (T09)")
    harmless = context.has_target and tuple(ids) == context.default_aux_ids
    yield Finding(
        f"the ids are only in {name}: "
        + ("vLLM's V2 runner" if missing_top else "SGLang")
        + " does not look there and takes its default"
        + (", which is the same" if harmless else ""),
        "Write them in both places.",
        file=CONFIG_NAME,
        key=KEY if missing_top else NESTED_KEY,
        expected=ids,
        engines=("vllm",) if missing_top else ("sglang",),
        severity="warning" if harmless or not context.has_target else "error",
        mends=both_places(context, ids),
        producer_bug="ModelOpt, SpecForge: ids in eagle_config alone" if missing_top else None,
    )


@check(
    "A02",
    "the auxiliary layer ids ascend, each once",
    reason="vLLM sorts them and drops duplicates: the states come in another order than in training, or fc "
    "is fed too few.",
    source="vLLM 0.32 v1/worker/gpu_model_runner.py: tuple(sorted(set(ids)))",
)
def ids_ascend(context: Context) -> Iterator[Finding]:
    for name, value in _places(context).items():
        ids = _as_ids(value)
        if not ids or any(not 0 <= i < 2**31 for i in ids):
            yield Finding(
                f"{name} is {describe(value)}, expected a list of layer numbers",
                "Write the ids that the draft was trained with.",
                file=CONFIG_NAME,
                key=name,
                found=describe(value),
            )
        elif any(a >= b for a, b in pairwise(ids)):
            yield Finding(
                f"{name} is {describe(ids)}: not ascending, or a number twice",
                "Write the ids in the order of the layers; a draft trained in another order must be trained "
                "again.",
                file=CONFIG_NAME,
                key=name,
                found=describe(ids),
            )


@check(
    "A03",
    "every auxiliary layer is one of the target's",
    reason="A layer that is not there is never captured: a width assertion, or an index out of range, at "
    "the first request.",
    source="github.com/vllm-project/vllm/issues/24392",
)
def ids_exist(context: Context) -> Iterator[Finding]:
    layers = context.target.num_hidden_layers
    for name, value in _places(context).items():
        ids = _as_ids(value)
        outside = [i for i in ids or () if not 0 <= i <= layers]
        if outside:
            yield Finding(
                f"{name} names {describe(outside)}, the target has {layers} layers",
                "Write the ids that the draft was trained with, or use the right target.",
                file=CONFIG_NAME,
                key=name,
                found=outside,
            )
            return  # the other place says the same, or A01 tells


@check(
    "A04",
    "the ids count as vLLM does",
    severity="warning",
    reason="Ids from SGLang's or TorchSpec's training name the layer whose output is taken, one less than "
    "vLLM's: acceptance fell from 45 to 10 %.",
    source="github.com/vllm-project/vllm/issues/43671; TorchSpec#87; "
    "github.com/sgl-project/sglang/pull/25454",
)
def ids_count_after_layers(context: Context) -> Iterator[Finding]:
    ids = context.config.aux_hidden_state_layer_ids
    if ids is None:
        raise Undecided("no ids are given (A05)")
    default = context.default_aux_ids
    if tuple(i + 1 for i in ids) == default:
        yield Finding(
            f"the ids {list(ids)} are the usual ones, {list(default)}, as SGLang counts: one less than "
            "vLLM's",
            f"Write {list(default)} if the draft was trained on the outputs of layers {list(ids)}.",
            file=CONFIG_NAME,
            key=KEY,
            found=list(ids),
            expected=list(default),
            producer_bug="auxiliary layer ids off by one between SGLang's and vLLM's numbering",
        )


@check(
    "A05",
    "the auxiliary layers are written",
    severity="warning",
    reason="Absent, each engine takes its own default, and a draft trained on other layers accepts little.",
    source="vLLM 0.32 model_executor/models/interfaces.py",
)
def ids_are_given(context: Context) -> Iterator[Finding]:
    if _places(context) or not context.config.use_aux_hidden_state:
        return
    default = list(context.default_aux_ids) if context.has_target else None
    three = context.config.num_aux_hidden_states == 3
    yield Finding(
        "no auxiliary layer ids are given"
        + (f"; vLLM takes {default} for this target" if default else "; engines take (2, L/2, L-3)"),
        "Write the ids that the draft was trained with, at the top and in eagle_config.",
        file=CONFIG_NAME,
        key=KEY,
        expected=default if three else None,
        producer_bug="TorchSpec, SafeAILab: no auxiliary layer ids in the exported config",
    )


@check(
    "A06",
    "the auxiliary layers of a hybrid target keep full attention",
    severity="note",
    reason="Some producers tap only attention layers of a hybrid target; others any.",
    source="huggingface.co/thoughtworks/Qwen3-Coder-Next-Eagle3",
)
def taps_are_attention(context: Context) -> Iterator[Finding]:
    kinds = context.target.text.get("layer_types")
    ids = context.config.aux_hidden_state_layer_ids
    if not context.target.is_hybrid or not isinstance(kinds, list) or ids is None:
        return
    others = [i for i in ids if 0 < i <= len(kinds) and kinds[i - 1] != "full_attention"]
    if others:
        yield Finding(
            f"the states after layers {others} come from layers of another kind than full attention",
            "No change needed if the draft was trained so.",
            file=CONFIG_NAME,
            key=KEY,
            found=others,
        )


@check(
    "A07",
    "llama.cpp taps the same layers",
    severity="warning",
    engines=("llama.cpp",),
    reason="llama.cpp ignores the ids and always takes (2, L/2, L-3).",
    source="llama.cpp conversion/llama.py, src/models/eagle3.cpp",
)
def llama_cpp_taps_the_same(context: Context) -> Iterator[Finding]:
    ids = context.config.aux_hidden_state_layer_ids
    if ids is not None and tuple(ids) != context.default_aux_ids:
        yield Finding(
            f"llama.cpp takes {list(context.default_aux_ids)}, the draft was trained on {list(ids)}",
            "Serve it with another engine.",
            file=CONFIG_NAME,
            key=KEY,
            found=list(ids),
            expected=list(context.default_aux_ids),
            severity="error" if "llama.cpp" in context.options.engines else "warning",
        )


CHECKS: tuple[Check, ...] = (
    ids_in_both_places,
    ids_ascend,
    ids_exist,
    ids_count_after_layers,
    ids_are_given,
    taps_are_attention,
    llama_cpp_taps_the_same,
)
