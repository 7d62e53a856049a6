"""A smoke run as text for a terminal: one table, a bar for each position. Pure: nothing is printed here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

_BAR_CELLS = 30
_EIGHTHS = " ▏▎▍▌▋▊▉"


def render_run(run: Mapping[str, Any]) -> str:
    """The figures of a `smoke_run`, its comparisons and probes."""
    lines = [_headline(run), *_figures(run)]
    lines += _positions(run, run.get("against"))
    lines += _categories(run)
    lines += _comparisons(run)
    lines += _probes(run)
    return "\n".join(lines)


def bar(share: float, cells: int = _BAR_CELLS) -> str:
    """A bar of block characters, an eighth of a cell fine."""
    eighths = round(max(0.0, min(1.0, share)) * cells * 8)
    full, rest = divmod(eighths, 8)
    return ("█" * full + (_EIGHTHS[rest] if rest else "")).ljust(cells)


def _headline(run: Mapping[str, Any]) -> str:
    engine, dataset = run["engine"], run["dataset"]
    words = [f"{engine['name']} {engine['version'] or ''}".strip()]
    if run["tensor_parallel_size"]:
        words.append(f"TP {run['tensor_parallel_size']}")
    words += [word for word in (engine["device"], run["target"]["dtype"]) if word]
    words.append(f"k = {run['num_speculative_tokens']}")
    prompts, answers = _count(dataset["n_prompts"], "prompt"), _count(dataset["n_requests"], "answer")
    words.append(f"{dataset['name']}: {prompts}, {answers}")
    return "smoke test  " + " · ".join(words)


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _figures(run: Mapping[str, Any]) -> list[str]:
    if run["mean_accepted_length"] is None:
        return ["  nothing was drafted"]
    rows = [
        (
            "mean accepted length",
            f"{run['mean_accepted_length']:.3f}",
            _range(run["mean_accepted_length_interval"], "{:.3f}"),
        ),
        (
            "draft accept rate",
            f"{run['draft_accept_rate']:.2%}",
            _range(run["draft_accept_rate_interval"], "{:.2%}"),
        ),
        (
            "counted",
            f"{run['drafts']} drafts",
            f"{run['draft_tokens']} draft tokens, {run['accepted_tokens']} accepted",
        ),
        ("output", f"{run['output_tokens']} tokens", _rate(run)),
    ]
    return [f"  {name:<22}{value:>12}   {more}".rstrip() for name, value, more in rows]


def _positions(run: Mapping[str, Any], against: Mapping[str, Any] | None) -> list[str]:
    rates: Sequence[float] = run["per_position_accept_rate"] or ()
    others: Sequence[float] = (against or {}).get("per_position_accept_rate") or ()
    lines = []
    for position, rate in enumerate(rates):
        other = f"  against {others[position]:.3f}" if position < len(others) else ""
        lines.append(f"  position {position + 1:<13}{rate:>12.3f}   {bar(rate)}{other}".rstrip())
    return lines


def _categories(run: Mapping[str, Any]) -> list[str]:
    categories = run.get("per_category") or ()
    if len(categories) < 2:
        return []
    lines = ["  by category"]
    for category in categories:
        length = category["mean_accepted_length"]
        shown = "-" if length is None else f"{length:.3f}"
        interval = _range(category["mean_accepted_length_interval"], "{:.3f}")
        lines.append(f"    {category['category']:<20}{shown:>12}   {interval}".rstrip())
    return lines


def _comparisons(run: Mapping[str, Any]) -> list[str]:
    lines = []
    if run.get("baseline") is not None:
        speedup, agreement = run["speedup"], run["agreement"]
        if speedup is not None:
            lines.append(f"  {'speed-up':<22}{speedup:>11.2f}x   {_rate(run['baseline'])} without the draft")
        same = f"{agreement['identical']} of {agreement['compared']}"
        first = agreement["divergences"][:1]
        where = "".join(
            f"first difference: prompt {item['prompt'] + 1}, turn {item['turn'] + 1}, "
            f"after {item['position']} tokens"
            for item in first
        )
        lines.append(f"  {'same greedy answers':<22}{same:>12}   {where}".rstrip())
    if run.get("against") is not None:
        other = run["against"]
        length = other["mean_accepted_length"]
        shown = "-" if length is None else f"{length:.3f}"
        lines.append(f"  {'against':<22}{shown:>12}   {other['draft']['source']}")
        if run["retention"] is not None:
            interval = _range(run["retention_interval"], "{:.3f}")
            lines.append(f"  {'retention':<22}{run['retention']:>12.3f}   {interval}".rstrip())
    return lines


def _probes(run: Mapping[str, Any]) -> list[str]:
    signs = {"passed": "ok", "failed": "FAILED", "not_applicable": "n/a", "not_run": "not run"}
    return [
        f"  {'probe ' + probe['name']:<22}{signs[probe['status']]:>12}   {probe['message']}".rstrip()
        for probe in run.get("probes", ())
    ]


def _range(interval: Mapping[str, Any] | None, form: str) -> str:
    if interval is None:
        return ""
    low, high = form.format(interval["low"]), form.format(interval["high"])
    return f"{low} to {high}  ({interval['level']:.0%}, over {interval['n']} {interval['over']})"


def _rate(run: Mapping[str, Any]) -> str:
    return f"{run['output_tokens'] / run['wall_s']:.1f} tokens/s" if run["wall_s"] else ""
