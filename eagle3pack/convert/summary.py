"""What a conversion did, or would do, in a few lines and as JSON."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from eagle3pack.checkpoint.files import Checkpoint
from eagle3pack.convert.handoff.command import HandOff
from eagle3pack.convert.plan import Plan, count_parameters, kv_bytes_per_token
from eagle3pack.convert.record import Proof
from eagle3pack.convert.requirements import FLOAT_DTYPES

POOLED_WARNING = (
    "a pooled draft is a starting point: it accepts far fewer tokens than its source until it is retrained "
    "(the published MiniMax-M3 GQA head was). --method als starts far closer; with --dry-run it tells how "
    "close"
)
MERGED_WARNING = (
    "a merged draft speculates at once; verify --against its source measures what was lost, and retraining "
    "brings that back"
)
_LABELS = {
    "k_relative_error": "relative error, keys",
    "v_relative_error": "relative error, values",
    "k_kept_energy": "kept of the logits",
    "v_kept_energy": "kept of the outputs",
    "output_error_before_healing": "output error unhealed",
    "output_error": "held-out output error",
    "attention_kl": "held-out attention KL",
    "logits_kl": "held-out logits KL",
    "accepted_length": "accepted length",
    "accepted_at_1": "accepted by position",
    "retention": "accepted retained",
}


@dataclass(frozen=True, slots=True)
class Summary:
    """The result of `eagle3pack convert`.

    Attributes:
        plan: what was done.
        source: as the user wrote it.
        out: the output folder.
        written: false for a dry run.
        before, after: parameters, bytes of all tensors, key/value heads, KV bytes a token.
        not_stripped: logical name -> why it stays in the draft although --strip-shared was given.
        copied_files: files beside the weights that were copied.
        digest: the draft's, None for a dry run or without hashing.
        quality: what the method says of its result, by name; see the schema. Empty where it did not run.
        warnings: what the user should not overlook.
        hand_off: what is written for a framework that retrains.
        proof: what was compared with the source as a whole.
    """

    plan: Plan
    source: str
    out: str
    written: bool
    before: Mapping[str, int]
    after: Mapping[str, int]
    not_stripped: Mapping[str, str] = field(default_factory=dict)
    copied_files: Sequence[str] = ()
    digest: str | None = None
    quality: Mapping[str, float] = field(default_factory=dict)
    warnings: Sequence[str] = ()
    hand_off: HandOff | None = None
    proof: Proof | None = None

    def as_json(self) -> dict[str, Any]:
        """The JSON object of `--json`."""
        plan = self.plan
        return {
            "source": self.source,
            "out": self.out,
            "written": self.written,
            "method": plan.method,
            "num_attention_heads": plan.before.num_attention_heads,
            "before": dict(self.before),
            "after": dict(self.after),
            "changed_tensors": list(plan.changed_tensors),
            "renamed_tensors": dict(plan.renamed),
            "dropped_tensors": [
                {"name": name, "reason": dropped.reason, "bytes": dropped.nbytes}
                for name, dropped in plan.dropped.items()
            ],
            "not_stripped": dict(self.not_stripped),
            "files": [file.name for file in plan.files],
            "copied_files": list(self.copied_files),
            "quality": dict(self.quality),
            "draft_digest": self.digest,
            "hand_off": self.hand_off.as_json() if self.hand_off else None,
            "proved": asdict(self.proof) if self.proof else None,
            "warnings": list(self.warnings),
        }

    def as_text(self) -> str:
        """A few lines for people."""
        before, after = self.before, self.after
        heads = self.plan.before.num_attention_heads
        rows = [
            (
                "key/value heads",
                f"{before['key_value_heads']}",
                f"{after['key_value_heads']}",
                f"of {heads} query heads",
            ),
            ("parameters", _billions(before["parameters"]), _billions(after["parameters"]), ""),
            ("weights", _gigabytes(before["bytes"]), _gigabytes(after["bytes"]), ""),
            (
                "draft KV cache a token",
                f"{before['kv_bytes_per_token']:,} B",
                f"{after['kv_bytes_per_token']:,} B",
                _times_smaller(before["kv_bytes_per_token"], after["kv_bytes_per_token"]),
            ),
        ]
        verb = "converted" if self.written else "would convert"
        lines = [f"{verb} {self.source} -> {self.out}"]
        lines += [f"  {label:<24}{old:>12} -> {new:<12}{note}".rstrip() for label, old, new, note in rows]
        lines += [f"  {label:<24}{text}" for label, text in self._details()]
        return "\n".join(lines)

    def _details(self) -> list[tuple[str, str]]:
        plan = self.plan
        details = []
        if plan.computed:
            details.append(("changed", _changed(plan)))
        else:
            details.append(("changed", "no tensor; the weights are copied"))
        details += [
            (label if self._held_out else label.replace("held-out", "fitted"), self._quality(name))
            for name, label in _LABELS.items()
            if name in self.quality
        ]
        if plan.renamed:
            old, new = next(iter(plan.renamed.items()))
            details.append(("renamed", f"{len(plan.renamed)} tensors ({old} -> {new}, ...)"))
        details += [
            ("left out", f"{name} ({_gigabytes(dropped.nbytes)}): {dropped.reason}")
            for name, dropped in plan.dropped.items()
        ]
        details += [("not left out", f"{name}: {why}") for name, why in self.not_stripped.items()]
        details.append(("files", ", ".join([*(file.name for file in plan.files), *self.copied_files])))
        if self.proof:
            compared = f"{self.proof.tensors} unchanged tensors, {_gigabytes(self.proof.bytes)}"
            details.append(("proved", f"{compared}: every byte is the source's"))
        if self.digest:
            details.append(("draft digest", self.digest))
        if self.hand_off:
            details += self._retraining(self.hand_off)
        return details

    def _retraining(self, hand_off: HandOff) -> list[tuple[str, str]]:
        details = [(f"for {hand_off.framework}", str(hand_off.place))]
        if hand_off.written:
            details.append(("retrain it with", hand_off.written.command))
            details += [("note", note) for note in hand_off.written.notes]
        return details

    @property
    def _held_out(self) -> bool:
        """Figures of a calibration are of texts that nothing was fitted to."""
        return self.quality.get("judged_on_held_out") != 0

    def _quality(self, name: str) -> str:
        value = self.quality[name]
        if name == "output_error":
            return f"{value:.3f} (mean pooling: {self.quality['output_error_by_mean']:.3f}; 0 is exact)"
        if name == "output_error_before_healing":
            return f"{value:.3f}, before {self.plan.request.closed_form.heal_steps} steps of training"
        if name in ("accepted_length", "accepted_at_1", "retention"):
            return self._accepted(name)
        if name.endswith("_kl"):
            return f"{value:.3f} nats{self._same_tokens() if name == 'logits_kl' else ''}"
        if not name.endswith("_kept_energy"):
            return f"{value:.2f} (mean over all heads; 0 is exact)"
        # The yardstick beside the figure: with another one, figures of two runs cannot be compared.
        settings = self.plan.request.closed_form
        yardstick = f"metric {settings.metric}"
        if settings.max_distance is not None and name.startswith("k_"):
            yardstick += f", distances up to {settings.max_distance:,}"
        return f"{value:.1%} (mean pooling: {self.quality[f'{name}_by_mean']:.1%}; {yardstick})"

    def _accepted(self, name: str) -> str:
        """What held-out texts say of acceptance, with what it is to be compared with."""
        found = self.quality
        if name == "accepted_length":
            unhealed = found.get("accepted_length_before_healing")
            others = [f"source: {found['accepted_length_of_source']:.3f}"]
            others += [] if unhealed is None else [f"before healing: {unhealed:.3f}"]
            others += [f"mean pooling: {found['accepted_length_by_mean']:.3f}"]
            which = "held-out texts" if self._held_out else "the texts it was fitted on"
            return f"{found[name]:.3f} on {which} ({'; '.join(others)})"
        if name == "accepted_at_1":
            ours, theirs = (
                ", ".join(f"{value:.3f}" for key, value in found.items() if re.fullmatch(pattern, key))
                for pattern in (r"accepted_at_\d+", r"accepted_at_\d+_of_source")
            )
            return f"{ours} (source: {theirs})"
        texts, drafts = round(found["accepted_texts"]), round(found["accepted_drafts_of_source"])
        counts = f"{drafts:,} drafts of the source in {texts} text{'s' if texts != 1 else ''}"
        if "retention_low" not in found:
            return f"{found[name]:.1%} of {counts}: too few to tell"
        low, high = found["retention_low"], found["retention_high"]
        return f"{found[name]:.1%}, {low:.1%} to {high:.1%} in 95% of resamples: {counts}"

    def _same_tokens(self) -> str:
        shares = [share for name, share in self.quality.items() if name.startswith("same_token_at_step_")]
        return f"; same token at step 0, 1, ...: {', '.join(f'{share:.1%}' for share in shares)}"


def _changed(plan: Plan) -> str:
    parts = ", ".join(dict.fromkeys(computed.part for computed in plan.computed.values()))
    layers = len({computed.layer for computed in plan.computed.values()})
    return f"{parts}{f' of {layers} layers' if layers > 1 else ''} (--method {plan.method})"


def measure(checkpoint: Checkpoint, plan: Plan) -> tuple[dict[str, int], dict[str, int]]:
    """Parameters, bytes, heads and KV bytes of the source and of the output."""
    old = list(checkpoint.tensors.values())
    new = [tensor for file in plan.files for tensor in file.tensors]
    itemsize = FLOAT_DTYPES[next(entry.dtype for entry in old if entry.dtype in FLOAT_DTYPES)][1]
    before = {
        "key_value_heads": plan.before.num_key_value_heads,
        "parameters": count_parameters([(entry.dtype, entry.shape) for entry in old]),
        "bytes": sum(entry.nbytes for entry in old),
        "kv_bytes_per_token": kv_bytes_per_token(plan.before, itemsize),
    }
    after = {
        "key_value_heads": plan.after.num_key_value_heads,
        "parameters": count_parameters([(tensor.dtype, tensor.shape) for tensor in new]),
        "bytes": sum(tensor.nbytes for tensor in new),
        "kv_bytes_per_token": kv_bytes_per_token(plan.after, itemsize),
    }
    return before, after


def _billions(count: int) -> str:
    return f"{count / 1e9:.1f} B" if count >= 1e9 else f"{count / 1e6:.1f} M"


def _gigabytes(count: int) -> str:
    return f"{count / 1e9:.2f} GB" if count >= 1e9 else f"{count / 1e6:.1f} MB"


def _times_smaller(before: int, after: int) -> str:
    return f"{before / after:g}x smaller" if after < before else ""
