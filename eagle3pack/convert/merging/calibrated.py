"""A merge that held-out activations judge: which grouping, how good, and how mean pooling compares."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from eagle3pack.convert.merging.acceptance import Acceptance
from eagle3pack.convert.merging.attention import AttentionWeights
from eagle3pack.convert.merging.fidelity import (
    Fidelity,
    Rest,
    attention_outputs,
    compare,
    output_error,
)
from eagle3pack.convert.merging.merge import Merged, MergeOptions, mean_pooled, merge
from eagle3pack.convert.merging.metrics import Metric
from eagle3pack.convert.merging.moments import Moments, spread
from eagle3pack.convert.merging.replay import Replay
from eagle3pack.convert.merging.rotary import RopeSpec
from eagle3pack.errors import UsageError

MOST_JUDGED = 4096  # activations: both layers run over them for every candidate


@dataclass(frozen=True, slots=True)
class Judged:
    """A merge and what held-out activations say of it.

    Attributes:
        merged: the layer.
        fidelity: beside its source.
        mean_output_error: of mean pooling with the same groups.
        output_errors: of every grouping that was tried.
        acceptance: of held-out texts; None where they could not be replayed.
        held_out: false where the calibration held nothing out, so that all this is of what the merge was
            fitted on.
    """

    merged: Merged
    fidelity: Fidelity
    mean_output_error: float
    output_errors: Mapping[str, float]
    acceptance: Acceptance | None = None
    held_out: bool = True

    def as_dict(self) -> dict[str, Any]:
        """JSON types only."""
        return {
            "texts": "held out" if self.held_out else "fitted",
            **self.fidelity.as_dict(),
            "output_error_by_mean": self.mean_output_error,
            "output_error_by_grouping": dict(self.output_errors),
            "acceptance": None if self.acceptance is None else self.acceptance.as_dict(),
        }


def merge_judged(
    weights: AttentionWeights,
    rope: RopeSpec,
    options: MergeOptions,
    metric: Metric,
    moments: Moments,
    *,
    choose_grouping: bool = False,
    train: Callable[[AttentionWeights], AttentionWeights] | None = None,
    rest: Callable[[], Rest | None] = lambda: None,
    replay: Callable[[], Replay | None] = lambda: None,
) -> Judged:
    """Merge one layer and compare it with its source on held-out activations, on all where none are.

    Args:
        weights, rope, options, metric, moments: as `merge`; with frequencies and activations.
        choose_grouping: try similar heads beside neighbours, and keep them only where they lose less.
        train: makes better weights of the merged ones.
        rest: loads the rest of the draft, for its logits.
        replay: of held-out texts, for what is accepted; asked for after `rest`.

    Raises:
        UsageError: the calibration holds no activations.
    """
    held_out = spread(moments.held_out or moments.samples, MOST_JUDGED)
    if not held_out:
        raise UsageError("it holds no activations", where="calibration")
    tried = [options]
    if choose_grouping:
        tried = [replace(options, grouping="contiguous"), replace(options, grouping="similarity")]
    best: Merged | None = None
    errors: dict[str, float] = {}
    expected = attention_outputs(weights, rope, held_out)
    for candidate in tried:
        merged = merge(weights, rope, candidate, metric, moments)
        name = merged.report.grouping
        errors[name] = output_error(expected, merged.weights, rope, held_out)
        if best is None or errors[name] < errors[best.report.grouping]:
            best = merged
    assert best is not None
    result = best if train is None else replace(best, weights=train(best.weights))
    mean = mean_pooled(weights, rope, tuple(group.heads for group in best.report.result.groups))
    mean_error = output_error(expected, mean, rope, held_out)
    fidelity = compare(weights, result.weights, rope, result.report.query_order, held_out, rest)
    acceptance, replaying = None, replay()
    if replaying is not None:
        acceptance = Acceptance(
            replaying.counters(weights),
            replaying.counters(mean),
            replaying.counters(best.weights),
            None if train is None else replaying.counters(result.weights),
        )
    return Judged(result, fidelity, mean_error, errors, acceptance, bool(moments.held_out))
