"""A measurement as report.json carries it (`schemas/report.schema.json`, `$defs/smoke_run`)."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from eagle3pack.engine.counters import (
    Counters,
    draft_accept_rate,
    mean_accepted_length,
    per_position_accept_rate,
    retention,
    total,
)
from eagle3pack.engine.statistics import (
    LEVEL,
    Interval,
    accept_rate_interval,
    mean_length_interval,
)
from eagle3pack.verify.smoke.compare import (
    Agreement,
    compare_answers,
    retention_between,
    speedup,
)
from eagle3pack.verify.smoke.measure import Measurement, Unit
from eagle3pack.verify.smoke.options import SmokeOptions, Subject
from eagle3pack.verify.smoke.probes import Probe

_SHOWN_DIVERGENCES = 20


@dataclass(frozen=True, slots=True)
class Dataset:
    """The prompts of a run.

    Attributes:
        name: as reports call it.
        sha256: of the file; None where there is none.
        categories: of each prompt, in order; "" where the set has none.
    """

    name: str
    sha256: str | None
    categories: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Outcome:
    """Everything that was measured.

    Attributes:
        draft: with the draft.
        baseline: without one, or None.
        against: with another draft, or None.
        probes: of the draft.
        failures: why a comparison that was asked for is missing.
    """

    draft: Measurement
    baseline: Measurement | None = None
    against: Measurement | None = None
    probes: tuple[Probe, ...] = ()
    failures: tuple[str, ...] = ()


def smoke_run(outcome: Outcome, dataset: Dataset, options: SmokeOptions, subject: Subject) -> dict[str, Any]:
    """The whole smoke test as one object."""
    ours, baseline, against = outcome.draft, outcome.baseline, outcome.against
    run = _run(ours, dataset, options, subject, _draft(subject.draft_source, subject.draft_digest))
    run["probes"] = [asdict(probe) for probe in outcome.probes]
    if baseline is not None:
        run["baseline"] = _run(baseline, dataset, options, subject, None)
        run["speedup"] = speedup(ours, baseline)
        run["agreement"] = _agreement(compare_answers(ours.answers, baseline.answers))
    if against is not None:
        other = _draft(options.against_source or str(options.against), None)
        run["against"] = _run(against, dataset, options, subject, other)
        run["retention"] = retention(ours.counters, against.counters)
        run["retention_interval"] = _interval(retention_between(ours, against), ours)
    return run


def _run(
    measured: Measurement,
    dataset: Dataset,
    options: SmokeOptions,
    subject: Subject,
    draft: dict[str, Any] | None,
) -> dict[str, Any]:
    facts, counters = measured.facts, measured.counters
    counts = [unit.counters for unit in measured.units]
    rates = per_position_accept_rate(counters)
    return {
        "origin": "measured",
        "source_url": None,
        "command": subject.command,
        "engine_command": shlex.join(facts.command) if facts.command else None,
        "draft": draft,
        "dataset": {
            "name": dataset.name,
            "sha256": dataset.sha256,
            "n_prompts": len(dataset.categories),
            "n_requests": measured.num_requests,
            "categories": [category for category in dict.fromkeys(dataset.categories) if category],
        },
        "target": {
            "id": subject.target.name,
            "revision": subject.target.revision,
            "config_sha256": subject.target.config_sha256,
            "dtype": facts.dtype or subject.target.dtype,
            "quantization": subject.target.quantization,
        },
        "engine": {
            "name": facts.name,
            "version": facts.version,
            "runner": facts.runner,
            "backend": facts.backend,
            "device": facts.device,
        },
        "tensor_parallel_size": facts.tensor_parallel_size,
        "tp_source": facts.tp_source,
        "max_concurrency": options.max_concurrency,
        "sampling": {"temperature": 0, "top_p": 1, "max_tokens": options.max_tokens},
        "enforce_eager": facts.enforce_eager,
        "num_speculative_tokens": facts.num_speculative_tokens,
        **_counts(counters),
        "wall_s": round(measured.wall_s, 3),
        "mean_accepted_length": mean_accepted_length(counters),
        "draft_accept_rate": draft_accept_rate(counters),
        "per_position_accept_rate": None if rates is None else list(rates),
        "mean_accepted_length_interval": _interval(mean_length_interval(counts), measured),
        "draft_accept_rate_interval": _interval(accept_rate_interval(counts), measured),
        "per_category": _per_category(measured, dataset),
        "notes": [*facts.notes, *measured.notes],
    }


def _counts(counters: Counters) -> dict[str, Any]:
    return {
        "drafts": counters.drafts,
        "draft_tokens": counters.draft_tokens,
        "accepted_tokens": counters.accepted_tokens,
        "accepted_per_position": list(counters.accepted_per_position),
        "output_tokens": counters.output_tokens,
    }


def _per_category(measured: Measurement, dataset: Dataset) -> list[dict[str, Any]]:
    by_category: dict[str, list[Unit]] = {}
    for unit in measured.units:
        by_category.setdefault(unit.category, []).append(unit)
    by_category.pop("", None)
    return [
        {
            "category": category,
            "n_prompts": dataset.categories.count(category),
            **_counts(counters := total(unit.counters for unit in units)),
            "mean_accepted_length": mean_accepted_length(counters),
            "draft_accept_rate": draft_accept_rate(counters),
            "mean_accepted_length_interval": _interval(_over_prompts(measured, units), measured, len(units)),
        }
        for category, units in by_category.items()
    ]


def _over_prompts(measured: Measurement, units: Sequence[Unit]) -> Interval | None:
    return (
        mean_length_interval([unit.counters for unit in units]) if measured.unit_name == "prompts" else None
    )


def _interval(
    interval: Interval | None, measured: Measurement, count: int | None = None
) -> dict[str, Any] | None:
    if interval is None:
        return None
    return {
        "low": interval.low,
        "high": interval.high,
        "level": LEVEL,
        "over": measured.unit_name,
        "n": len(measured.units) if count is None else count,
    }


def _agreement(agreement: Agreement) -> dict[str, Any]:
    return {
        "compared": agreement.compared,
        "identical": agreement.identical,
        "share": agreement.share,
        "divergences": [
            {
                "prompt": divergence.prompt,
                "turn": divergence.turn,
                "position": divergence.position,
                "with_draft": divergence.ours,
                "without": divergence.theirs,
            }
            for divergence in agreement.divergences[:_SHOWN_DIVERGENCES]
        ],
    }


def _draft(source: str, digest: str | None) -> dict[str, Any]:
    return {"source": source, "digest": digest}
