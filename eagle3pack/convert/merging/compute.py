"""Closed-form merging inside a conversion: one attention layer at a time, in memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from eagle3pack.checkpoint.as_torch import load_tensor
from eagle3pack.checkpoint.header import TensorEntry
from eagle3pack.checkpoint.writer import PlannedTensor
from eagle3pack.convert.compute import LayerResult
from eagle3pack.convert.merging.attention import AttentionWeights, from_matrices, to_matrices
from eagle3pack.convert.merging.calibrated import Judged, merge_judged
from eagle3pack.convert.merging.calibration import Calibration
from eagle3pack.convert.merging.fidelity import Rest, rest_of
from eagle3pack.convert.merging.grouping import Groups, read_groups
from eagle3pack.convert.merging.heal import Healed, HealOptions, HealProgress, HealReport, heal
from eagle3pack.convert.merging.heal_state import read_state, write_state
from eagle3pack.convert.merging.merge import MergeOptions, Refit, merge
from eagle3pack.convert.merging.metrics import IDENTITY, Metric, embedding_metric, norm_metric
from eagle3pack.convert.merging.moments import Moments
from eagle3pack.convert.merging.replay import Replay, replayable, stored_rows, surroundings
from eagle3pack.convert.merging.report import MergeReport
from eagle3pack.convert.merging.rotary import RopeSpec, rope_spec
from eagle3pack.convert.plan import Plan
from eagle3pack.convert.requirements import FLOAT_DTYPES
from eagle3pack.draft.config import DraftConfig
from eagle3pack.errors import InputError, UsageError

_ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm")
_IN_LAYER = (
    "input_layernorm",
    "hidden_norm",
    "post_attention_layernorm",
    "mlp.gate_proj",
    "mlp.up_proj",
    "mlp.down_proj",
)
_AROUND = ("norm.weight", "lm_head.weight", *(f"layers.0.{name}.weight" for name in _IN_LAYER))
MOST_REPLAYED = 8192  # tokens of held-out texts: each is proposed about twice by three drafts or four
LONGEST_DISTANCE = 32768  # als weighs distances by 1/(1 + distance); beyond this there is next to nothing


@dataclass
class Merging:
    """`procrustes`, `svd` and `als`, and every method that is healed.

    Attributes:
        plan: what is converted.
        say: told which layer is being merged, and how healing comes along.
        calibration: of this draft, or None.
        shared: of the target, what engines take from there where the draft has none, by logical name.
        trains: heal, if the plan says so.
        heal_state: the file that keeps how far healing came, or None.
    """

    plan: Plan
    say: Callable[[str], None]
    calibration: Calibration | None = None
    shared: Mapping[str, TensorEntry] = field(default_factory=dict)
    trains: bool = False
    heal_state: Path | None = None
    _made: dict[tuple[int, str], Tensor] = field(default_factory=dict)
    _reports: dict[int, MergeReport] = field(default_factory=dict)
    _judged: dict[int, Judged] = field(default_factory=dict)
    _healed: dict[int, HealReport] = field(default_factory=dict)
    _left_out: list[str] = field(default_factory=list)

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
        spec = _spec(config)
        positions = config.max_position_embeddings or LONGEST_DISTANCE
        moments = self._moments()
        chosen = request.closed_form.grouping
        options = MergeOptions(
            num_key_value_heads=request.num_key_value_heads,
            method=request.method,
            refit_output=self._refit(spec),
            grouping=_grouping(self.plan),
            max_distance=request.closed_form.max_distance or min(positions, LONGEST_DISTANCE),
        )
        weights = _weights(self.plan, layer)
        metric = self._metric(layer, moments)
        if moments is None or spec.frequencies is None:
            merged = merge(weights, spec, options, metric, moments)
        else:
            around = cache(self._around)
            judged = merge_judged(
                weights,
                spec,
                options,
                metric,
                moments,
                choose_grouping=chosen == "auto",
                train=self._trainer(layer, weights, spec, moments),
                rest=lambda: self._rest(around),
                replay=lambda: self._replay(around, spec),
            )
            merged, self._judged[layer] = judged.merged, judged
        self._reports[layer] = merged.report
        for part, matrix in to_matrices(merged.weights).items():
            self._made[layer, part] = matrix

    def _trainer(
        self, layer: int, source: AttentionWeights, spec: RopeSpec, moments: Moments
    ) -> Callable[[AttentionWeights], AttentionWeights] | None:
        """What heals a merged layer; None where that is not asked for."""
        steps = self.plan.request.closed_form.heal_steps
        if not steps or not self.trains:
            return None
        device = "cuda" if torch.cuda.is_available() else "cpu"
        options = HealOptions(steps, norm_eps=self.plan.before.rms_norm_eps, device=device)

        def train(start: AttentionWeights) -> AttentionWeights:
            healed = self._heal(source, start, spec, moments, options)
            self._healed[layer] = healed.report
            return healed.weights

        return train

    def _heal(
        self,
        source: AttentionWeights,
        start: AttentionWeights,
        spec: RopeSpec,
        moments: Moments,
        options: HealOptions,
    ) -> Healed:
        path = self.heal_state
        resumed = None if path is None else read_state(path)

        def on_begin(done: int) -> None:
            self.say(
                f"healing on {options.device}: {options.steps} steps"
                + (f", going on after step {done}" if resumed else "")
            )

        def on_step(at: HealProgress) -> None:
            if at.step % options.interval() == 0 or at.step == at.steps:
                self.say(
                    f"healing: step {at.step} of {at.steps}, held-out error {at.best_error:.4f}, "
                    f"{at.tokens_per_second:,.0f} tokens/s"
                )

        return heal(
            source,
            start,
            spec,
            moments.samples,
            options,
            moments.held_out,
            on_begin=on_begin,
            on_step=on_step,
            on_state=lambda state: None if path is None else write_state(path, state),
            resumed=resumed,
            resumed_from=str(path),
        )

    def _moments(self) -> Moments | None:
        if self.calibration is None:
            return None
        config = self.plan.before
        return self.calibration.moments(
            self._load("layers.0.hidden_norm.weight"),
            config.rms_norm_eps,
            norm_before_residual=config.norm_before_residual,
        )

    def _refit(self, spec: RopeSpec) -> Refit | None:
        """As asked; with a calibration, ridge where a closed form is refitted anyway."""
        asked = self.plan.request.closed_form.refit_output
        if asked is None and self.calibration is not None and spec.frequencies is not None:
            return "ridge" if self.plan.request.method in ("svd", "als") else None
        return asked

    def _around(self) -> dict[str, Tensor]:
        """The draft around its attention, by logical name, without its embeddings."""
        found = {**self.shared, **self.plan.sources}
        tensors = {name: load(found[name]) for name in _AROUND if name in found}
        return tensors | ({"d2t": load_tensor(found["d2t"])} if "d2t" in found else {})

    def _rest(self, around: Callable[[], Mapping[str, Tensor]]) -> Rest | None:
        """The draft behind its attention; None where its head is not at hand."""
        if "lm_head.weight" not in {**self.shared, **self.plan.sources}:
            return None
        return rest_of(around(), self.plan.before.rms_norm_eps)

    def _replay(self, around: Callable[[], Mapping[str, Tensor]], spec: RopeSpec) -> Replay | None:
        """Held-out texts to replay drafts on; None, and a note why, where they cannot be."""
        assert self.calibration is not None
        found = {**self.shared, **self.plan.sources}
        texts = [text for text in self.calibration.stretches if text.held_out] or self.calibration.stretches
        count = self.calibration.document["generation"]["num_speculative_tokens"]
        known = replayable(texts, count)
        if "embed_tokens.weight" not in found or "lm_head.weight" not in found:
            why = "the draft shares the target's embeddings or head: give --target a folder with its weights"
        elif all(text.token_ids is None for text in texts):
            why = "the calibration is of an earlier version, which kept no tokens: make it again"
        elif not known:
            why = f"no held-out text has an answer of more than {count} tokens"
        else:
            embedding = stored_rows(found["embed_tokens.weight"])
            stride = -(-sum(len(text.token_ids) for text in known) // MOST_REPLAYED)
            return Replay(known[::stride], surroundings(around(), embedding, self.plan.before), spec, count)
        self._left_out.append(f"accepted length left out: {why}")
        return None

    def _metric(self, layer: int, moments: Moments | None) -> Metric:
        name = self.plan.request.closed_form.metric
        if name == "calibration" and moments is not None:
            return moments.metric()
        if name == "identity":
            return IDENTITY
        if layer > 0:
            return norm_metric(self._load(f"layers.{layer}.input_layernorm.weight"))
        norms = [self._load(f"layers.0.{norm}.weight") for norm in ("input_layernorm", "hidden_norm")]
        if name == "norm":
            return norm_metric(*norms)
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
                {"merging": report.as_dict()}
                | ({"held_out": self._judged[layer].as_dict()} if layer in self._judged else {})
                | ({"heal": self._healed[layer].as_dict()} if layer in self._healed else {}),
                (*report.notes, *self._heal_notes(layer), *self._held_out_notes(layer), *self._left_out),
            )
            for layer, report in sorted(self._reports.items())
        ]

    def _held_out_notes(self, layer: int) -> list[str]:
        if layer not in self._judged or self._judged[layer].held_out:
            return []
        return [
            "the calibration held no text out: errors and acceptance are of the texts that the merge was "
            "fitted on, and friendlier than others would be; of two conversations or more a tenth is held out"
        ]

    def _heal_notes(self, layer: int) -> list[str]:
        report = self._healed.get(layer)
        if report is None:
            steps = self.plan.request.closed_form.heal_steps
            return ["not healed: a dry run does not train"] if steps else []
        notes = []
        if report.stopped_at is not None:
            notes.append(f"healing overflowed in step {report.stopped_at}; the best weights before it stay")
        if report.best_step == 0:
            notes.append("healing found nothing better on held-out activations; the merged weights stay")
        return notes

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
        } | self._held_out_quality()

    def _held_out_quality(self) -> dict[str, float]:
        if not self._judged:
            return {}
        (judged,) = self._judged.values()  # a calibration knows one layer
        found = judged.fidelity
        quality = {
            "judged_on_held_out": float(judged.held_out),
            "output_error": found.output_error,
            "output_error_by_mean": judged.mean_output_error,
            "attention_kl": found.attention_kl,
        }
        for report in self._healed.values():
            quality["output_error_before_healing"] = report.error_before
        if judged.acceptance is not None:
            quality |= judged.acceptance.quality()
        if found.logits_kl is not None and found.same_token is not None:
            quality["logits_kl"] = found.logits_kl
            quality |= {f"same_token_at_step_{i}": share for i, share in enumerate(found.same_token)}
        return quality

    def libraries(self) -> Mapping[str, str]:
        """torch's version."""
        return {"torch": torch.__version__}


def attention_tensors(plan: Plan, layer: int) -> dict[str, Tensor]:
    """The tensors of one layer's attention, by their name within it."""
    prefix = f"layers.{layer}.self_attn."
    return {
        name.removeprefix(prefix): load(entry)
        for name, entry in plan.sources.items()
        if name.startswith(prefix) and name.split(".")[3] in _ATTENTION
    }


def load(entry: TensorEntry) -> Tensor:
    """A float tensor of a checkpoint, in its own dtype.

    Raises:
        InputError: it is stored as something else.
    """
    if entry.dtype not in FLOAT_DTYPES:
        raise InputError(f"the tensor {entry.name} is stored as {entry.dtype}", where=str(entry.path))
    return load_tensor(entry)


def _spec(config: DraftConfig) -> RopeSpec:
    return rope_spec(config.rope, config.head_dim, config.max_position_embeddings)


def _grouping(plan: Plan) -> Literal["contiguous", "similarity"] | Groups:
    """contiguous, similarity, or the groups that a JSON file lists; auto begins with contiguous."""
    request = plan.request
    match request.closed_form.grouping:
        case "contiguous" | "auto":
            return "contiguous"
        case "similarity":
            return "similarity"
        case path:
            heads = plan.before.num_key_value_heads
            return read_groups(Path(path), heads, request.num_key_value_heads)


def require_mergeable(plan: Plan, calibrated: bool) -> None:
    """Refuse what could not be done with this draft; see `convert.compute`."""
    settings, spec = plan.request.closed_form, _spec(plan.before)
    _grouping(plan)
    if spec.frequencies is None:
        runs_the_attention = {
            "--grouping auto": settings.grouping == "auto",
            "--heal": settings.heal_steps > 0,
            "--refit-output ridge": settings.refit_output == "ridge",
        }
        for option, asked in runs_the_attention.items():
            if asked:
                raise UsageError(f"it runs the attention, and {spec.unknown}", where=option)
    if settings.metric == "embedding" and "embed_tokens.weight" not in plan.sources:
        raise UsageError(
            "the draft has no embed_tokens of its own",
            where="--metric embedding",
            hint="Use --metric norm.",
        )
    if calibrated:
        _weights(plan, 0)


def _weights(plan: Plan, layer: int) -> AttentionWeights:
    """One layer's attention, its numbers checked.

    Raises:
        InputError: a tensor holds NaN or infinity; names its file.
    """
    try:
        return from_matrices(attention_tensors(plan, layer), plan.before.head_dim)
    except InputError as error:
        entry = plan.sources.get(f"layers.{layer}.self_attn.{error.where}")
        if entry is None:
            raise
        raise InputError(
            f"the tensor {entry.name} {error.problem}", where=str(entry.path), hint=error.hint
        ) from None
