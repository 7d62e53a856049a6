"""How many ranks an engine runs on: what the user gave, or the most that fits below the published setting."""

from __future__ import annotations

from dataclasses import dataclass

from eagle3pack.errors import UsageError

PUBLISHED_SIZE = 4  # acceptance figures of EAGLE3 drafts are published at this size


@dataclass(frozen=True, slots=True)
class HeadCounts:
    """The attention heads of a target or a draft, by what it is called in messages."""

    name: str
    num_attention_heads: int
    num_key_value_heads: int


@dataclass(frozen=True, slots=True)
class TensorParallelSize:
    """A size, and what to tell the user of how it came about; "" where it is as asked."""

    size: int
    note: str = ""


def misfit(heads: HeadCounts, size: int) -> str:
    """Why a model cannot be split over so many ranks; "" where it can.

    Source: vLLM 0.32, model_executor/models/llama.py: query heads are divided, key/value heads divided
    or replicated.
    """
    query, key_value = heads.num_attention_heads, heads.num_key_value_heads
    if query % size:
        return f"the {heads.name}'s {query} query heads do not divide by {size}"
    if key_value % size and size % key_value:
        return f"the {heads.name}'s {key_value} key/value heads neither divide by {size} nor into it"
    return ""


def fitting_sizes(models: tuple[HeadCounts, ...], limit: int) -> tuple[int, ...]:
    """Every size up to the limit that all of the models can be split over."""
    return tuple(size for size in range(1, limit + 1) if not any(misfit(heads, size) for heads in models))


def choose_size(
    requested: int | None,
    models: tuple[HeadCounts, ...],
    *,
    visible_gpus: int | None,
    cpu_build: bool,
) -> TensorParallelSize:
    """Decide the tensor-parallel size.

    Args:
        requested: what the user gave, or None.
        models: the target and the draft.
        visible_gpus: of this machine; None where unknown.
        cpu_build: vLLM runs on CPUs, where any number of ranks shares the cores.

    Raises:
        UsageError: the size that the user gave cannot run.
    """
    if requested is not None:
        for heads in models:
            if problem := misfit(heads, requested):
                fitting = ", ".join(map(str, fitting_sizes(models, max(8, requested))))
                raise UsageError(problem, where="--tensor-parallel-size", hint=f"Sizes that fit: {fitting}.")
        if not cpu_build and visible_gpus is not None and requested > visible_gpus:
            raise UsageError(
                f"{requested} ranks need as many GPUs, {visible_gpus} visible",
                where="--tensor-parallel-size",
                hint="Give a smaller size, or the --endpoint of a server on several machines.",
            )
        return TensorParallelSize(requested)
    if cpu_build:
        return TensorParallelSize(1, _note(1, "this vLLM is a CPU build"))
    limit = PUBLISHED_SIZE if visible_gpus is None else max(visible_gpus, 1)
    size = max(fitting_sizes(models, min(limit, PUBLISHED_SIZE)))
    if size == PUBLISHED_SIZE:
        return TensorParallelSize(size)
    reason = next((misfit(heads, PUBLISHED_SIZE) for heads in models if misfit(heads, PUBLISHED_SIZE)), "")
    if limit < PUBLISHED_SIZE:
        reason = f"{limit} GPU{'s' if limit > 1 else ''} visible"
    return TensorParallelSize(size, _note(size, reason))


def _note(size: int, reason: str) -> str:
    return (
        f"tensor-parallel size {size} instead of {PUBLISHED_SIZE}, the published setting: {reason}. "
        "Give --tensor-parallel-size to decide it yourself."
    )
