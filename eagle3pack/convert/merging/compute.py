"""Closed-form merging inside a conversion: one attention layer at a time, in memory."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from eagle3pack.checkpoint.header import TensorEntry
from eagle3pack.checkpoint.reading import read_tensor
from eagle3pack.checkpoint.writer import PlannedTensor
from eagle3pack.convert.compute import LayerResult
from eagle3pack.convert.merging.attention import from_matrices, to_matrices
from eagle3pack.convert.merging.grouping import Groups
from eagle3pack.convert.merging.merge import MergeOptions, merge
from eagle3pack.convert.merging.metrics import IDENTITY, Metric, embedding_metric, norm_metric
from eagle3pack.convert.merging.report import MergeReport
from eagle3pack.convert.merging.rotary import rope_spec
from eagle3pack.convert.plan import Plan
from eagle3pack.documents import describe
from eagle3pack.errors import InputError, UsageError

_DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}
_ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm")
LONGEST_DISTANCE = 32768  # als weighs distances by 1/(1 + distance); beyond this there is next to nothing


@dataclass
class Merging:
    """`procrustes`, `svd` and `als`.

    Attributes:
        plan: what is converted.
        say: told which layer is being merged.
    """

    plan: Plan
    say: Callable[[str], None]
    _made: dict[tuple[int, str], Tensor] = field(default_factory=dict)
    _reports: dict[int, MergeReport] = field(default_factory=dict)

    def compute(self, planned: PlannedTensor) -> Iterator[memoryview]:
        """Give one tensor of a layer, merging the layer when its first one is asked for.

        Raises:
            InputError: NaN or infinity in a tensor of the attention, or groups that do not fit.
        """
        computed = self.plan.computed[planned.name]
        if computed.layer not in self._reports:
            self._merge(computed.layer)
        tensor = self._made.pop((computed.layer, computed.part))
        yield memoryview(tensor.contiguous().flatten().view(torch.uint8).numpy().data)

    def _merge(self, layer: int) -> None:
        request, config = self.plan.request, self.plan.before
        self.say(f"merging the heads of layer {layer} by {request.method}")
        tensors = {
            name.removeprefix(f"layers.{layer}.self_attn."): load(entry)
            for name, entry in self.plan.sources.items()
            if name.startswith(f"layers.{layer}.self_attn.") and name.split(".")[3] in _ATTENTION
        }
        spec = rope_spec(config.rope, config.head_dim, config.max_position_embeddings)
        positions = config.max_position_embeddings or LONGEST_DISTANCE
        options = MergeOptions(
            num_key_value_heads=request.num_key_value_heads,
            method=request.method,
            refit_output=request.closed_form.refit_output,
            grouping=_grouping(request.closed_form.grouping),
            max_distance=request.closed_form.max_distance or min(positions, LONGEST_DISTANCE),
        )
        weights = from_matrices(tensors, config.head_dim)
        merged = merge(weights, spec, options, self._metric(layer))
        self._reports[layer] = merged.report
        for part, matrix in to_matrices(merged.weights).items():
            self._made[layer, part] = matrix

    def _metric(self, layer: int) -> Metric:
        name = self.plan.request.closed_form.metric
        if name == "identity":
            return IDENTITY
        if layer > 0:
            return norm_metric(self._load(f"layers.{layer}.input_layernorm.weight"))
        norms = [self._load(f"layers.0.{norm}.weight") for norm in ("input_layernorm", "hidden_norm")]
        if name == "norm":
            return norm_metric(*norms)
        if "embed_tokens.weight" not in self.plan.sources:
            raise UsageError(
                "the draft has no embed_tokens of its own",
                where="--metric embedding",
                hint="Use --metric norm.",
            )
        fc = self._load("fc.weight") if "fc.weight" in self.plan.sources else None
        return embedding_metric(
            self._load("embed_tokens.weight"), *norms, fc=fc, eps=self.plan.before.rms_norm_eps
        )

    def _load(self, logical: str) -> Tensor:
        return load(self.plan.sources[logical])

    def results(self) -> list[LayerResult]:
        """The whole report of every layer."""
        return [
            LayerResult(
                layer,
                tuple(group.heads for group in report.result.groups),
                {"merging": report.as_dict()},
                report.notes,
            )
            for layer, report in sorted(self._reports.items())
        ]

    def quality(self) -> dict[str, float]:
        """Kept energy of keys and values, and what `mean` keeps of the same groups; mean over layers."""
        reports = list(self._reports.values())

        def average(of: Callable[[MergeReport], float]) -> float:
            return sum(map(of, reports)) / len(reports)

        return {
            "k_kept_energy": average(lambda report: report.result.kept_keys),
            "v_kept_energy": average(lambda report: report.result.kept_values),
            "k_kept_energy_by_mean": average(lambda report: report.mean.kept_keys),
            "v_kept_energy_by_mean": average(lambda report: report.mean.kept_values),
        }

    def libraries(self) -> Mapping[str, str]:
        """torch's version."""
        return {"torch": torch.__version__}


def load(entry: TensorEntry) -> Tensor:
    """A float tensor of a checkpoint, in its own dtype.

    Raises:
        InputError: it is stored as something else.
    """
    if entry.dtype not in _DTYPES:
        raise InputError(f"the tensor {entry.name} is stored as {entry.dtype}", where=str(entry.path))
    return torch.frombuffer(read_tensor(entry), dtype=_DTYPES[entry.dtype]).reshape(entry.shape)


def _grouping(text: str) -> Literal["contiguous", "similarity"] | Groups:
    """contiguous, similarity, or the groups that a JSON file lists."""
    if text in ("contiguous", "similarity"):
        return "contiguous" if text == "contiguous" else "similarity"
    try:
        groups = json.loads(Path(text).read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError(
            f"{text!r} is neither contiguous nor similarity, nor a JSON file ({error})", where="--grouping"
        ) from None
    if not isinstance(groups, list) or not all(
        isinstance(group, list) and all(type(head) is int for head in group) for group in groups
    ):
        raise InputError(
            f"holds {describe(groups)}, expected lists of key/value heads such as [[0, 3], [1, 2]]",
            where=text,
        )
    return tuple(tuple(group) for group in groups)
