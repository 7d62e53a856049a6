"""What a conversion will do, as a value: `--dry-run` prints it, tests compare it, `execute` does it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from eagle3pack.checkpoint.files import Checkpoint
from eagle3pack.checkpoint.header import TensorEntry
from eagle3pack.checkpoint.writer import PlannedFile, PlannedTensor, plan_files
from eagle3pack.draft.config import DraftConfig, parse_draft_config
from eagle3pack.draft.producers import canonical_config, with_key_value_heads
from eagle3pack.draft.tensors import expected_tensors, resolve_names
from eagle3pack.errors import InputError, UnsupportedDraftError, UsageError

Method = Literal["mean", "first"]
Layout = Literal["keep", "midlayer", "layers"]
METHODS: tuple[Method, ...] = ("mean", "first")
LAYOUTS: tuple[Layout, ...] = ("keep", "midlayer", "layers")

# safetensors dtype -> (name in a config.json, bytes an element)
FLOAT_DTYPES = {"BF16": ("bfloat16", 2), "F16": ("float16", 2), "F32": ("float32", 4)}
_POOLED = ("k_proj.weight", "k_proj.bias", "v_proj.weight", "v_proj.bias")


@dataclass(frozen=True, slots=True)
class Request:
    """What the user asked for.

    Attributes:
        num_key_value_heads: of the converted draft.
        method: how the heads of a group become one.
        layout: how the layers' tensors are named.
        canonical: write the portable config.json and names.
        shard_bytes: weight files are split above this size.
    """

    num_key_value_heads: int
    method: Method = "mean"
    layout: Layout = "keep"
    canonical: bool = False
    shard_bytes: int = 5_000_000_000


@dataclass(frozen=True, slots=True)
class Examined:
    """What the planner must know of the data, read before planning.

    Attributes:
        vocabulary_map_is_identity: d2t maps every draft token to itself; None where there is no d2t.
        shared_with_target: logical name -> name in the target, of tensors equal to it byte for byte.
        aux_hidden_state_layer_ids: the target's default, for a draft whose config names none.
    """

    vocabulary_map_is_identity: bool | None = None
    shared_with_target: Mapping[str, str] = field(default_factory=dict)
    aux_hidden_state_layer_ids: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class DroppedTensor:
    """A tensor that the output leaves out.

    Attributes:
        reason: why.
        nbytes: its size in the source.
    """

    reason: str
    nbytes: int


@dataclass(frozen=True, slots=True)
class PooledTensor:
    """One k or v projection (or its bias) whose heads are merged.

    Attributes:
        source: the tensor in the source.
        layer: index of its decoder layer.
        projection: "k" or "v".
        is_bias: a bias rather than a weight.
        num_heads: key/value heads in the source.
        num_groups: key/value heads after.
        head_bytes: bytes of one head.
        row_bytes: bytes of one row.
    """

    source: TensorEntry
    layer: int
    projection: Literal["k", "v"]
    is_bias: bool
    num_heads: int
    num_groups: int
    head_bytes: int
    row_bytes: int


@dataclass(frozen=True, slots=True)
class Plan:
    """A whole conversion.

    Attributes:
        request: what was asked for.
        before: the source's config.
        after: the output's config.
        config_changed: the output's config.json differs from the source's.
        files: the weight files to write, every tensor in the source's order.
        pooled: by name in the output, the tensors that are computed.
        renamed: name in the source -> name in the output, where they differ.
        dropped: by name in the source, what is left out.
        unknown: names that are no tensors of an EAGLE3 draft; copied as they are.
        verbatim: the source's weight files and index, where they are copied as they are.
    """

    request: Request
    before: DraftConfig
    after: DraftConfig
    config_changed: bool
    files: tuple[PlannedFile, ...]
    pooled: Mapping[str, PooledTensor]
    renamed: Mapping[str, str]
    dropped: Mapping[str, DroppedTensor]
    unknown: tuple[str, ...]
    verbatim: tuple[Path, ...] = ()

    @property
    def output_bytes(self) -> int:
        """Bytes of the weight files to be written."""
        if self.verbatim:
            return sum(path.stat().st_size for path in self.verbatim)
        return sum(file.nbytes for file in self.files)

    @property
    def changed_tensors(self) -> tuple[str, ...]:
        """Names in the output of the tensors whose values change."""
        return tuple(self.pooled)


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
        whose = "" if wanted is not None else "the target's number, "
        raise UsageError(
            f"{whose}{count} does not divide the draft's {have} key/value heads into equal groups",
            where="--num-kv-heads",
            hint=f"Numbers that do: {possible}.",
        )
    return count


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
                hint="Mend config.json so that it describes these weights.",
            )
    for name in _pooled_names(config, names):
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


def _pooled_names(config: DraftConfig, names: Mapping[str, str]) -> list[str]:
    return [
        name
        for layer in range(config.num_hidden_layers)
        for suffix in _POOLED
        if (name := f"layers.{layer}.self_attn.{suffix}") in names
    ]


def plan_conversion(
    config: DraftConfig, checkpoint: Checkpoint, request: Request, examined: Examined
) -> Plan:
    """Plan a conversion; pure.

    Raises:
        UnsupportedDraftError, InputError: see `require_convertible`.
        UsageError: the portable form needs what is not known.
    """
    names = require_convertible(config, checkpoint)
    logical = {actual: name for name, actual in names.items()}
    after = _output_config(config, checkpoint, names, request, examined)
    dropped = {
        name: DroppedTensor(reason, checkpoint.tensors[name].nbytes)
        for name, reason in _dropped(config, names, request, examined).items()
    }
    computed = (
        set(_pooled_names(config, names))
        if after.num_key_value_heads != config.num_key_value_heads
        else set()
    )
    layout: Layout = "midlayer" if request.canonical and request.layout == "keep" else request.layout

    tensors: list[PlannedTensor] = []
    pooled: dict[str, PooledTensor] = {}
    renamed: dict[str, str] = {}
    for entry in checkpoint.tensors.values():
        if entry.name in dropped:
            continue
        name = name_in_layout(entry.name, logical[entry.name], layout)
        if name != entry.name:
            renamed[entry.name] = name
        if logical[entry.name] in computed:
            pooled[name] = _pooled_tensor(entry, logical[entry.name], config, request.num_key_value_heads)
            rows = request.num_key_value_heads * config.head_dim
            tensors.append(PlannedTensor(name, entry.dtype, (rows, *entry.shape[1:]), None))
        else:
            tensors.append(PlannedTensor(name, entry.dtype, entry.shape, entry))
    known = expected_tensors(config)
    is_copy = not (pooled or renamed or dropped) and _fits_as_it_is(checkpoint, request.shard_bytes)
    return Plan(
        request=request,
        before=config,
        after=after,
        config_changed=dict(after.raw) != dict(config.raw),
        files=plan_files(tensors, request.shard_bytes),
        pooled=pooled,
        renamed=renamed,
        dropped=dropped,
        unknown=tuple(actual for actual, name in logical.items() if name not in known),
        verbatim=_weight_files(checkpoint) if is_copy else (),
    )


def _fits_as_it_is(checkpoint: Checkpoint, shard_bytes: int) -> bool:
    """The files are safetensors, and none is above the size at which files are split."""
    return all(
        header.data_start > 0 and (header.file_bytes <= shard_bytes or len(header.tensors) == 1)
        for header in checkpoint.headers
    )


def _weight_files(checkpoint: Checkpoint) -> tuple[Path, ...]:
    index = (checkpoint.index_path,) if checkpoint.index_path else ()
    return (*(header.path for header in checkpoint.headers), *index)


def name_in_layout(actual: str, logical: str, layout: Layout) -> str:
    """The name of a tensor in the wanted layout."""
    if layout == "keep":
        return actual
    if layout == "midlayer" and logical.startswith("layers.0."):
        return "midlayer." + logical.removeprefix("layers.0.")
    return logical


def _output_config(
    config: DraftConfig,
    checkpoint: Checkpoint,
    names: Mapping[str, str],
    request: Request,
    examined: Examined,
) -> DraftConfig:
    heads = request.num_key_value_heads
    if request.canonical:
        dtype = checkpoint.tensors[names["layers.0.self_attn.k_proj.weight"]].dtype
        ids = config.aux_hidden_state_layer_ids or examined.aux_hidden_state_layer_ids
        raw: dict[str, Any] = canonical_config(config, heads, ids, FLOAT_DTYPES[dtype][0])
    elif heads == config.num_key_value_heads:
        return config
    else:
        raw = with_key_value_heads(config, heads)
    return parse_draft_config(raw, where="the converted config.json")


def _dropped(
    config: DraftConfig, names: Mapping[str, str], request: Request, examined: Examined
) -> dict[str, str]:
    dropped = {
        names[name]: f"equal to the target's {target_name}, which engines then share"
        for name, target_name in examined.shared_with_target.items()
    }
    if request.canonical and config.has_full_vocabulary and examined.vocabulary_map_is_identity is not None:
        if not examined.vocabulary_map_is_identity:
            raise InputError(
                "d2t maps tokens to others although the draft vocabulary is the target's whole one",
                where=names["d2t"],
                hint="Engines ignore or refuse such a map; set draft_vocab_size to what d2t was made for.",
            )
        reason = "the map of a full draft vocabulary is the identity; vLLM refuses it"
        dropped |= {names[name]: reason for name in ("d2t", "t2d") if name in names}
    return dropped


def _pooled_tensor(entry: TensorEntry, logical: str, config: DraftConfig, num_groups: int) -> PooledTensor:
    head_bytes = entry.nbytes // config.num_key_value_heads
    return PooledTensor(
        source=entry,
        layer=int(logical.split(".")[1]),
        projection="k" if ".k_proj." in logical else "v",
        is_bias=logical.endswith(".bias"),
        num_heads=config.num_key_value_heads,
        num_groups=num_groups,
        head_bytes=head_bytes,
        row_bytes=head_bytes // config.head_dim,
    )


def count_parameters(tensors: Sequence[tuple[str, tuple[int, ...]]]) -> int:
    """Float parameters among (dtype, shape): maps and masks are none."""
    total = 0
    for dtype, shape in tensors:
        if dtype in ("I64", "I32", "BOOL", "U8"):
            continue
        size = 1
        for length in shape:
            size *= length
        total += size
    return total


def kv_bytes_per_token(config: DraftConfig, itemsize: int) -> int:
    """Bytes that the draft's KV cache takes for one token, over all its layers and ranks."""
    return 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * itemsize
