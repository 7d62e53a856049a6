"""What a draft must be for its heads to be merged, and how many heads can be made of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from eagle3pack.checkpoint.files import Checkpoint
from eagle3pack.draft.config import DraftConfig
from eagle3pack.draft.target import TargetSpec
from eagle3pack.draft.tensors import expected_tensors, resolve_names
from eagle3pack.errors import InputError, UnsupportedDraftError, UsageError

# safetensors dtype -> (name in a config.json, bytes an element)
FLOAT_DTYPES = {"BF16": ("bfloat16", 2), "F16": ("float16", 2), "F32": ("float32", 4)}
KEYS_AND_VALUES = ("k_proj.weight", "k_proj.bias", "v_proj.weight", "v_proj.bias")
QUERIES_AND_OUTPUT = ("q_proj.weight", "q_proj.bias", "o_proj.weight")  # what closed forms fit to them


def choose_key_value_heads(config: DraftConfig, wanted: int | None, target_heads: int | None) -> int:
    """The number of key/value heads to make: the user's, else the target's.

    Raises:
        UsageError: neither is given, or it does not divide the draft's.
    """
    count = wanted if wanted is not None else target_heads
    have = config.num_key_value_heads
    possible = ", ".join(str(n) for n in range(1, have + 1) if have % n == 0)
    if count is None:
        raise UsageError(
            "how many key/value heads the draft is to have is not known",
            where="--num-kv-heads",
            hint=f"Give --num-kv-heads ({possible}), or --target to take its number.",
        )
    if count < 1 or have % count:
        number = f"{count}" if wanted is not None else f"{count}, the target's number,"
        raise UsageError(
            f"{number} does not divide the draft's {have} key/value heads into equal groups",
            where="--num-kv-heads",
            hint=f"Numbers that do: {possible}.",
        )
    return count


def require_target(config: DraftConfig, target: TargetSpec) -> None:
    """Refuse a target that cannot be the one that the draft was trained for.

    Raises:
        InputError: its hidden states have another width, or it has not the layers that the draft reads.
    """
    last = max(config.aux_hidden_state_layer_ids or (0,))
    problem = None
    if config.target_hidden_size != target.hidden_size:
        problem = (
            f"the draft reads hidden states of {config.target_hidden_size}, the target {target.name} gives "
            f"{target.hidden_size}"
        )
    elif last > target.num_hidden_layers:
        problem = (
            f"the draft reads layers up to {last}, the target {target.name} has {target.num_hidden_layers}"
        )
    if problem:
        raise InputError(problem, where="--target", hint="Name the target that the draft was trained for.")


def require_convertible(config: DraftConfig, checkpoint: Checkpoint) -> dict[str, str]:
    """Refuse drafts that this conversion does not fit.

    Returns:
        Logical name -> name in the file.

    Raises:
        UnsupportedDraftError: a sound draft whose arithmetic is another.
        InputError: a required tensor is missing or has another shape than the config says.
    """
    where = str(checkpoint.folder)
    _refuse_other_arithmetic(checkpoint, where)
    names = resolve_names(checkpoint.tensors, where=where)
    for spec in expected_tensors(config).values():
        if spec.name not in names:
            if spec.required:
                raise InputError(
                    f"the tensor {spec.name} is missing",
                    where=where,
                    hint=f"config.json describes {config.num_hidden_layers} decoder layer(s); "
                    "see `eagle3pack verify` for all that does not fit.",
                )
            continue
        found = checkpoint.tensors[names[spec.name]].shape
        if found != spec.shape:
            raise InputError(
                f"{names[spec.name]} has shape {list(found)}, config.json makes it {list(spec.shape)}",
                where=where,
                hint="Mend config.json (head_dim, numbers of heads, sizes): it must describe these weights.",
            )
    for name in attention_names(config, names, KEYS_AND_VALUES + QUERIES_AND_OUTPUT):
        dtype = checkpoint.tensors[names[name]].dtype
        if dtype not in FLOAT_DTYPES:
            raise UnsupportedDraftError(
                f"{names[name]} is stored as {dtype}; quantised heads cannot be merged",
                where=where,
                hint="Convert the unquantised draft, then quantise the result.",
            )
    return names


def _refuse_other_arithmetic(checkpoint: Checkpoint, where: str) -> None:
    reasons = {
        "kv_a_proj_with_mqa": "an MLA draft keeps one compressed latent and has no key/value heads to merge",
        "qkv_proj": "query, key and value projections are fused; split them into q_proj, k_proj and v_proj",
        "mask_hidden": "a P-EAGLE head drafts in parallel and is not EAGLE3",
        "k_proj.weight_scale": "the key projection is quantised; convert the unquantised draft",
        "k_proj.qweight": "the key projection is quantised; convert the unquantised draft",
        "k_proj.weight_packed": "the key projection is quantised; convert the unquantised draft",
    }
    for name in checkpoint.tensors:
        for part, reason in reasons.items():
            if part in name:
                raise UnsupportedDraftError(f"{reason} (found {name})", where=where)


def attention_names(config: DraftConfig, names: Mapping[str, str], parts: Sequence[str]) -> list[str]:
    """Logical names of those parts of every layer's attention that the draft has."""
    return [
        name
        for layer in range(config.num_hidden_layers)
        for part in parts
        if (name := f"layers.{layer}.self_attn.{part}") in names
    ]
