"""The report for a person: errors first, each with its way out, then what it costs to serve."""

from __future__ import annotations

import shlex
from collections.abc import Iterator

from eagle3pack.verify.check import Finding, Outcome, Severity
from eagle3pack.verify.context import Context
from eagle3pack.verify.report import Examination, printable, summary
from eagle3pack.verify.serving import ServingFacts

_SHOWN_FINDINGS = 5  # of one check; a wrong prefix or a NaN draft has one for every tensor
_MARKS: dict[Severity, str] = {"error": "ERROR", "warning": "WARN ", "note": "note "}


def render(context: Context, examination: Examination, *, source: str, verbose: bool = False) -> str:
    """The whole text, without a final newline.

    Args:
        context: the draft and its target.
        examination: the answers.
        source: the draft as the user named it.
        verbose: notes and checks without an answer too.
    """
    lines = [f"{source}{_against(context)}", ""]
    lines += _findings(examination, ("error", "warning", "note") if verbose else ("error", "warning"))
    if verbose:
        lines += _unanswered(examination)
    if examination.facts is not None:
        lines += ["to serve it", *_facts(context, examination.facts), ""]
    lines += _verdict(context, examination, verbose=verbose)
    return printable("\n".join(lines))


def render_failures(examination: Examination, *, strict: bool) -> str:
    """Only the findings that fail the draft; "" where there are none."""
    return printable(
        "\n".join(_findings(examination, ("error", "warning") if strict else ("error",))).rstrip()
    )


def _findings(examination: Examination, severities: tuple[Severity, ...]) -> Iterator[str]:
    for severity in severities:
        for family, outcomes in examination.outcomes.items():
            chosen = [o for o in outcomes if o.status == "failed" and o.severity == severity]
            if chosen:
                yield family
                for outcome in chosen:
                    yield from _failed(outcome, severities)
                yield ""


def _against(context: Context) -> str:
    if not context.has_target:
        return ""
    target = context.target
    layers = _count(target.num_hidden_layers, "layer")
    shape = f"{layers}, hidden {target.hidden_size}, vocabulary {target.vocab_size}"
    return f" for {target.name} ({shape}{', bundled shape' if target.bundled else ''})"


def _failed(outcome: Outcome, severities: tuple[Severity, ...]) -> Iterator[str]:
    findings = [finding for finding in outcome.findings if finding.severity in severities]
    shown = findings[:_SHOWN_FINDINGS]
    for finding in shown:
        yield f"  {_MARKS[finding.severity or 'error']} {outcome.check.id}  {finding.message}"
        yield f"             {_fix(finding)}"
        if finding.producer_bug:
            yield f"             known: {finding.producer_bug}"
    if len(findings) > len(shown):
        yield f"             and {len(findings) - len(shown)} more of the same"


def _fix(finding: Finding) -> str:
    return f"fix: {finding.fix}" + (" (--fix does it)" if finding.mends else "")


def _unanswered(examination: Examination) -> Iterator[str]:
    chosen = [o for o in examination.all if o.status in ("not_decided", "not_run")]
    if chosen:
        yield "without an answer"
        for outcome in chosen:
            yield f"        {outcome.check.id}  {outcome.check.title}: {outcome.reason}"
        yield ""


def _facts(context: Context, facts: ServingFacts) -> Iterator[str]:
    size = facts.tensor_parallel_size
    ranks = f"{size} rank{'s' if size > 1 else ''}"
    if facts.num_parameters is not None:
        yield f"  parameters             {facts.num_parameters:,}"
    mine, theirs = facts.kv_bytes_per_token_per_rank, facts.target_kv_bytes_per_token_per_rank
    if mine is not None:
        yield f"  KV cache               {mine:,} bytes a token and rank at {ranks}" + (
            f", the target {theirs:,}" if theirs is not None else ""
        )
    if facts.page_size_ratio is not None:
        yield f"  KV page                {facts.page_size_ratio:.3g} times a target layer's"
    if facts.kv_pool_share_lost is not None:
        yield f"  KV pool                {facts.kv_pool_share_lost:.1%} goes to the draft"
    sizes = ", ".join(map(str, facts.tensor_parallel_sizes_that_fit))
    yield f"  tensor parallel sizes  {sizes or 'none of 1 to 16'}"
    if facts.shared_with_target:
        saved = f" ({facts.shared_bytes:,} bytes)" if facts.shared_bytes else ""
        yield f"  taken from the target  {' and '.join(facts.shared_with_target)}{saved}"
    if facts.aux_layers_vllm is not None:
        default = ", the default" if facts.aux_layers_are_default else ""
        yield (
            f"  auxiliary layers       {facts.aux_layers_vllm} in vLLM, {facts.aux_layers_sglang} in SGLang"
            + default
        )
    if "vllm" in context.options.engines:
        yield f"  vLLM                   --speculative-config {shlex.quote(facts.speculative_config)}"


def _verdict(context: Context, examination: Examination, *, verbose: bool) -> Iterator[str]:
    found = [finding.severity for outcome in examination.all for finding in outcome.findings]
    counts = summary(examination.all)
    failed = counts["errors"] + counts["warnings"] + counts["notes"]
    unanswered = counts["not_decided"] + counts["not_run"]
    severities: tuple[Severity, ...] = ("error", "warning", "note")
    yield (
        ", ".join(_count(found.count(severity), severity) for severity in severities)
        + (f" in {failed} of {_count(len(examination.all), 'check')}" if failed else "")
        + f"; {counts['passed']} passed, {unanswered} without an answer, "
        f"{counts['not_applicable']} not applicable"
        + ("" if verbose or not (unanswered or "note" in found) else " (-v shows more)")
    )
    if not context.has_target:
        yield "Without --target the draft was not held against its target."


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
