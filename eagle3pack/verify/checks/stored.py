"""F11 to F14: what values and dtypes of the stored tensors show."""

from __future__ import annotations

from collections.abc import Iterator

from eagle3pack.verify.check import Check, Finding, check
from eagle3pack.verify.checks.settings import FLOAT8_DTYPES, QUANTISED_SUFFIXES
from eagle3pack.verify.context import CONFIG_NAME, Context

FLOAT_DTYPES = {"BF16": "bfloat16", "F16": "float16", "F32": "float32", "F64": "float64"}
FLOAT16_MAX = 65504.0


@check(
    "F11",
    "no weight is NaN or infinite",
    streams=True,
    reason="Every engine loads it in silence and accepts nothing. A NaN lm_head is speculators' mark for a "
    "head that was never loaded.",
    source="vLLM 0.32 (measured); speculators models/eagle3",
)
def no_nan(context: Context) -> Iterator[Finding]:
    for facts in context.scan.tensors.values():
        if facts.nonfinite:
            whole = facts.nonfinite == facts.count
            yield Finding(
                f"{'every' if whole else f'{facts.nonfinite:,} of {facts.count:,}'} "
                f"value{'' if whole else 's'} of {facts.name} {'is' if whole else 'are'} NaN or infinite",
                "Export the draft again from a checkpoint that is sound.",
                file=facts.path.name,
                tensor=facts.name,
                found=facts.nonfinite,
                expected=0,
                producer_bug="speculators: a head that was never initialised"
                if whole and facts.logical == "lm_head.weight"
                else None,
            )


@check(
    "F12",
    "no matrix is constant",
    streams=True,
    reason="A matrix of zeros is what a partial export of a sharded training state leaves behind; nothing "
    "fails.",
    source="pytorch.org/docs/stable/distributed.checkpoint.html: keys without data keep their initial value",
)
def no_constant_matrix(context: Context) -> Iterator[Finding]:
    for facts in context.scan.tensors.values():
        is_matrix = (
            facts.is_float and len(facts.shape) == 2 and not facts.logical.endswith(QUANTISED_SUFFIXES)
        )
        if is_matrix and facts.is_constant and not facts.nonfinite:
            yield Finding(
                f"every value of {facts.name} is {facts.first:g}",
                "Export the draft again; this tensor was never written.",
                file=facts.path.name,
                tensor=facts.name,
                found=facts.first,
            )


@check(
    "F13",
    "all float tensors share one dtype, and config.json names it",
    severity="warning",
    reason="Mixed dtypes are cast at load; a wrong name doubles the memory or overflows. TorchSpec writes "
    "the dtype of whichever tensor comes first.",
    source="TorchSpec tools/convert_to_hf.py",
)
def one_dtype(context: Context) -> Iterator[Finding]:
    known = FLOAT_DTYPES if context.raw.get("quantization_config") else FLOAT_DTYPES | FLOAT8_DTYPES
    dtypes: dict[str, str] = {}
    for name, entry in context.tensors.items():
        if entry.dtype in known and not name.endswith(QUANTISED_SUFFIXES):
            dtypes.setdefault(known[entry.dtype], entry.name)
    if len(dtypes) > 1:
        yield Finding(
            "the float tensors have several dtypes: " + ", ".join(f"{n} is {d}" for d, n in dtypes.items()),
            "Export all weights in one dtype.",
            found=sorted(dtypes),
            producer_bug="TorchSpec: torch_dtype is that of whichever tensor came first"
            if "_torchspec_version" in context.raw
            else None,
        )
    if len(dtypes) != 1:
        return
    actual = next(iter(dtypes))
    wrong: dict[str, list[str]] = {}  # what is declared -> the keys that say so
    for fields in (context.top, context.layer) if context.is_speculators else (context.top,):
        for key in ("torch_dtype", "dtype"):
            declared = fields.values.get(key)
            if isinstance(declared, str) and declared.removeprefix("torch.") not in ("auto", actual):
                wrong.setdefault(declared, []).append(f"{fields.path}{key}")
    for declared, keys in wrong.items():
        yield Finding(
            f"{' and '.join(keys)} {'is' if len(keys) == 1 else 'are'} {declared}, the weights are {actual}",
            f"Write {actual}, or export the weights as {declared.removeprefix('torch.')}.",
            file=CONFIG_NAME,
            key=keys[0],
            found=declared,
            expected=actual,
        )


@check(
    "F14",
    "no weight overflows the dtype that config.json names",
    streams=True,
    reason="bfloat16 reaches 3e38, float16 only 65504: the cast at load makes infinities.",
    source="IEEE 754 binary16",
)
def fits_float16(context: Context) -> Iterator[Finding]:
    declared = [context.top.values.get(key) for key in ("torch_dtype", "dtype")]
    if not any(name in ("float16", "torch.float16", "half") for name in declared):
        return
    for facts in context.scan.tensors.values():
        if facts.is_float and facts.dtype != "F16" and not facts.nonfinite and facts.max_abs > FLOAT16_MAX:
            yield Finding(
                f"{facts.name} holds {facts.max_abs:g}, which float16 turns into infinity",
                "Write torch_dtype bfloat16.",
                file=facts.path.name,
                tensor=facts.name,
                found=facts.max_abs,
                expected=FLOAT16_MAX,
            )


CHECKS: tuple[Check, ...] = (
    no_nan,
    no_constant_matrix,
    one_dtype,
    fits_float16,
)
