"""What a conversion will do, as a value: `--dry-run` prints it, tests compare it, `execute` does it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from eagle3pack.checkpoint.files import Checkpoint
from eagle3pack.checkpoint.header import TensorEntry
from eagle3pack.checkpoint.writer import PlannedFile, PlannedTensor, plan_files
from eagle3pack.convert.requirements import (
    FLOAT_DTYPES,
    KEYS_AND_VALUES,
    QUERIES_AND_OUTPUT,
    attention_names,
    require_convertible,
)
from eagle3pack.draft.config import DraftConfig, parse_draft_config
from eagle3pack.draft.producers import canonical_config, with_key_value_heads
from eagle3pack.draft.tensors import expected_tensors
from eagle3pack.errors import InputError, UsageError

Method = Literal["mean", "first", "procrustes", "svd", "als"]
Layout = Literal["keep", "midlayer", "layers"]
MetricName = Literal["identity", "norm", "embedding", "calibration"]
RefitName = Literal["closed", "ridge", "none"]
POOLING: tuple[Method, ...] = ("mean", "first")
LONGEST_MAX_DISTANCE = 1 << 20  # als weighs distances by 1/(1 + distance): beyond 32768 little is left


@dataclass(frozen=True, slots=True)
class ClosedForm:
    """How procrustes, svd and als work; docs/conversion.md has the mathematics.

    Attributes:
        metric: second moment of the attention input in which errors are measured.
        refit_output: least squares for o_proj; None takes the method's own, and ridge with a calibration.
        grouping: contiguous, similarity, auto (what held-out activations prefer), or the name of a JSON
            file with the groups.
        max_distance: positions over which als compares logits; None takes the draft's, at most 32768.
        heal_steps: of training after the merge, on the activations of a calibration; any method has them.
    """

    metric: MetricName = "identity"
    refit_output: RefitName | None = None
    grouping: str = "contiguous"
    max_distance: int | None = None
    heal_steps: int = 0


@dataclass(frozen=True, slots=True)
class Request:
    """What the user asked for.

    Attributes:
        num_key_value_heads: of the converted draft.
        method: how the heads of a group become one.
        closed_form: settings of the methods that are more than pooling.
        layout: how the layers' tensors are named.
        canonical: write the portable config.json and names.
        shard_bytes: weight files are split above this size.
    """

    num_key_value_heads: int
    method: Method = "mean"
    closed_form: ClosedForm = field(default_factory=ClosedForm)
    layout: Layout = "keep"
    canonical: bool = False
    shard_bytes: int = 5_000_000_000

    @property
    def only_pools(self) -> bool:
        """Keys and values are pooled, streaming, and nothing else changes."""
        return self.method in POOLING and not self.closed_form.heal_steps


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
class ComputedTensor:
    """A tensor of an attention layer whose values are new.

    Attributes:
        source: the tensor in the source.
        layer: index of its decoder layer.
        part: its name within the attention, "k_proj.weight" and the like.
    """

    source: TensorEntry
    layer: int
    part: str


@dataclass(frozen=True, slots=True)
class Plan:
    """A whole conversion.

    Attributes:
        request: what was asked for.
        before: the source's config.
        after: the output's config.
        config_changed: the output's config.json differs from the source's.
        sources: the source's tensors by logical name.
        files: the weight files to write, every tensor in the source's order.
        computed: by name in the output, the tensors whose values are new.
        renamed: name in the source -> name in the output, where they differ.
        dropped: by name in the source, what is left out.
        unknown: names that are no tensors of an EAGLE3 draft; copied as they are.
        verbatim: the source's weight files and index, where they are copied as they are.
        assumed_layers: the target's default auxiliary layers, where they are written because the source's
            config names none.
    """

    request: Request
    before: DraftConfig
    after: DraftConfig
    config_changed: bool
    sources: Mapping[str, TensorEntry]
    files: tuple[PlannedFile, ...]
    computed: Mapping[str, ComputedTensor]
    renamed: Mapping[str, str]
    dropped: Mapping[str, DroppedTensor]
    unknown: tuple[str, ...]
    verbatim: tuple[Path, ...] = ()
    assumed_layers: tuple[int, ...] = ()

    @property
    def output_bytes(self) -> int:
        """Bytes of the weight files to be written."""
        if self.verbatim:
            return sum(path.stat().st_size for path in self.verbatim)
        return sum(file.nbytes for file in self.files)

    @property
    def method(self) -> str:
        """The method, or "copy" where nothing is computed."""
        return self.request.method if self.computed else "copy"

    @property
    def changed_tensors(self) -> tuple[str, ...]:
        """Names in the output of the tensors whose values change."""
        return tuple(self.computed)


def plan_conversion(
    config: DraftConfig, checkpoint: Checkpoint, request: Request, examined: Examined
) -> Plan:
    """Plan a conversion; pure.

    Raises:
        UnsupportedDraftError, InputError: see `require_convertible`.
        UsageError: the portable form needs what is not known or has other names, or als shall look too far.
    """
    if request.canonical and request.layout == "layers":
        raise UsageError(
            "--canonical names the first layer midlayer.",
            where="--layout layers",
            hint="Leave out one of the two.",
        )
    _require_distance(request.closed_form.max_distance)
    names = require_convertible(config, checkpoint)
    logical = {actual: name for name, actual in names.items()}
    after = _output_config(config, checkpoint, names, request, examined)
    dropped = {
        name: DroppedTensor(reason, checkpoint.tensors[name].nbytes)
        for name, reason in _dropped(config, names, request, examined).items()
    }
    changing = _changing(config, names, request)
    layout: Layout = "midlayer" if request.canonical else request.layout

    tensors: list[PlannedTensor] = []
    computed: dict[str, ComputedTensor] = {}
    renamed: dict[str, str] = {}
    for entry in checkpoint.tensors.values():
        if entry.name in dropped:
            continue
        name = name_in_layout(entry.name, logical[entry.name], layout)
        if name != entry.name:
            renamed[entry.name] = name
        if logical[entry.name] in changing:
            _, layer, _, part = logical[entry.name].split(".", 3)
            computed[name] = ComputedTensor(entry, int(layer), part)
            rows = entry.shape[0]
            if part in KEYS_AND_VALUES:
                rows = request.num_key_value_heads * config.head_dim
            tensors.append(PlannedTensor(name, entry.dtype, (rows, *entry.shape[1:]), None))
        else:
            tensors.append(PlannedTensor(name, entry.dtype, entry.shape, entry))
    known = expected_tensors(config)
    is_copy = not (computed or renamed or dropped) and _fits_as_it_is(checkpoint, request.shard_bytes)
    return Plan(
        request=request,
        before=config,
        after=after,
        config_changed=dict(after.raw) != dict(config.raw),
        sources={name: checkpoint.tensors[actual] for name, actual in names.items()},
        files=plan_files(tensors, request.shard_bytes),
        computed=computed,
        renamed=renamed,
        dropped=dropped,
        unknown=tuple(actual for actual, name in logical.items() if name not in known),
        verbatim=_weight_files(checkpoint) if is_copy else (),
        assumed_layers=(
            after.aux_hidden_state_layer_ids or ()
            if request.canonical and not config.aux_hidden_state_layer_ids
            else ()
        ),
    )


def _require_distance(asked: int | None) -> None:
    if asked is not None and asked > LONGEST_MAX_DISTANCE:
        raise UsageError(
            f"{asked:,}, at most {LONGEST_MAX_DISTANCE:,}: a distance t counts 1/(1 + t), and work grows "
            "with every one",
            where="--max-distance",
            hint="Leave it out: the draft's own positions are taken, at most 32,768.",
        )


def _changing(config: DraftConfig, names: Mapping[str, str], request: Request) -> set[str]:
    """Logical names of the tensors whose values the method makes anew."""
    if request.num_key_value_heads == config.num_key_value_heads:
        return set()
    parts = KEYS_AND_VALUES if request.only_pools else KEYS_AND_VALUES + QUERIES_AND_OUTPUT
    return set(attention_names(config, names, parts))


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
