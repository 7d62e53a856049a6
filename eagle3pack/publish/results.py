"""The runs of the reports as a card shows them: grouped by what they have in common, every value bound."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from eagle3pack.errors import InputError
from eagle3pack.publish.ledger import Bound, Node, as_written, bound, fixed, text

SAME_CONDITIONS = ("tensor_parallel_size", "max_concurrency", "enforce_eager")


@dataclass(frozen=True, slots=True)
class Result:
    """One row: a data set.

    Attributes:
        run: where it comes from.
        dataset: its name.
        num_prompts: n.
        length: mean accepted length.
        interval: of it, None where it is not known.
        rate: draft accept rate, None where it is not known.
        positions: acceptance at each position.
        speed_up: output tokens a second over the baseline's, None without a baseline.
        slower: the baseline was faster.
        against: mean accepted length of the draft that it is compared with, None without one.
        retention: of accepted tokens, None without one.
    """

    run: Node
    dataset: Bound
    num_prompts: Bound | None
    length: Bound
    interval: Bound | None
    rate: Bound | None
    positions: tuple[Bound, ...]
    speed_up: Bound | None
    slower: bool
    against: Bound | None
    retention: Bound | None


@dataclass(frozen=True, slots=True)
class Group:
    """Results under the same conditions.

    Attributes:
        run: one of them, for the conditions.
        results: at least one.
    """

    run: Node
    results: tuple[Result, ...]

    @property
    def quoted(self) -> bool:
        """Not measured by this tool."""
        return bool(self.run.origin.raw == "quoted")

    @property
    def num_positions(self) -> int:
        """Columns of acceptance by position."""
        return max(len(result.positions) for result in self.results)

    @property
    def has_speed_up(self) -> bool:
        """A baseline was measured."""
        return any(result.speed_up for result in self.results)

    @property
    def has_against(self) -> bool:
        """Another draft was measured or quoted beside."""
        return any(result.against for result in self.results)


def group_results(runs: Sequence[Node]) -> list[Group]:
    """Put runs under the same conditions into one table; the order of the reports stays.

    Raises:
        InputError: a speed-up would compare different conditions.
    """
    groups: dict[str, list[Node]] = {}
    for run in runs:
        groups.setdefault(_conditions(run), []).append(run)
    return [Group(members[0], tuple(map(_result, members))) for members in groups.values()]


def _conditions(run: Node) -> str:
    keys = (
        "origin",
        "source_url",
        "target",
        "engine",
        "sampling",
        "num_speculative_tokens",
        *SAME_CONDITIONS,
    )
    return repr([run[key].raw for key in keys])


def _result(run: Node) -> Result:
    quoted = run.origin.raw == "quoted"

    def rate(node: Node, digits: int, *, percent: bool = False) -> Bound:
        if quoted:
            return as_written(node, percent=percent, digits=digits)
        value = float(node.raw) * (100 if percent else 1)
        return bound(f"{value:.{digits}f}" + (" %" if percent else ""), node)

    speed_up = _speed_up(run)
    count = run.dataset.n_prompts
    against = run.against.mean_accepted_length
    return Result(
        run=run,
        dataset=text(run.dataset.name),
        num_prompts=text(count) if count.raw is not None else None,
        length=rate(run.mean_accepted_length, 3),
        interval=_interval(run.mean_accepted_length_interval),
        rate=rate(run.draft_accept_rate, 2, percent=True) if run.draft_accept_rate.raw is not None else None,
        positions=tuple(rate(node, 3) for node in run.per_position_accept_rate),
        speed_up=speed_up,
        slower=speed_up is not None and float(speed_up.text.rstrip("x")) < 1,
        against=rate(against, 3) if against.raw is not None else None,
        retention=_retention(run),
    )


def _interval(node: Node) -> Bound | None:
    """The ends of a confidence interval."""
    if not node:
        return None
    return bound(f"{float(node.low.raw):.2f} to {float(node.high.raw):.2f}", node.low, node.high)


def _speed_up(run: Node) -> Bound | None:
    """Throughput over the baseline's of the same report, under the same conditions."""
    baseline = run.baseline
    parts = [run.output_tokens, run.wall_s, baseline.output_tokens, baseline.wall_s]
    if not baseline or not all(part.raw for part in parts):
        return None
    differing = [key for key in SAME_CONDITIONS if key in baseline.raw and baseline[key].raw != run[key].raw]
    if differing:
        raise InputError(
            f"has a baseline with another {', '.join(differing)}, so no speed-up follows",
            where=f"{run.source.document}{run.source.pointer}",
        )
    tokens, wall_s, base_tokens, base_wall_s = (float(part.raw) for part in parts)
    ratio = (tokens / wall_s) / (base_tokens / base_wall_s)
    if run.speedup.raw is not None and abs(float(run.speedup.raw) - ratio) > 1e-6 * ratio:
        raise InputError(
            f"states a speed-up of {run.speedup.raw}, but its times give {ratio:.4f}",
            where=f"{run.source.document}{run.source.pointer}",
        )
    return bound(f"{ratio:.2f}x", *parts)


def _retention(run: Node) -> Bound | None:
    """Accepted tokens a draft as a share of the other draft's."""
    ours, other = run.mean_accepted_length, run.against.mean_accepted_length
    if other.raw is None or float(other.raw) <= 1:
        return None
    share = (float(ours.raw) - 1) / (float(other.raw) - 1)
    return bound(f"{fixed(100 * share, 1)} %", ours, other)
