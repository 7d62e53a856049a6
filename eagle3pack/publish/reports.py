"""Reports that a card may quote: of these bytes, whole, and agreeing with their own counters.

A rate is not believed because a report states it. Where counters are there it must follow from them;
where a run is quoted from elsewhere, its rates must agree with each other to their printed precision.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any

from eagle3pack.documents import read_json_object, schema_problems
from eagle3pack.errors import InputError
from eagle3pack.publish.ledger import Document, Node, read_document

TOLERANCE = 1e-6  # of a rate against its counters; both are computed in double precision


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the reports allow.

    Attributes:
        only_rendering: why this draft can be rendered but never published; "" where it can.
        unverified: why its verification is not complete; such a draft needs the user's reason.
    """

    only_rendering: str
    unverified: tuple[str, ...]


def read_reports(paths: Sequence[Path], digest: str | None) -> tuple[tuple[Document, ...], Verdict]:
    """Read reports and hold them against the draft at hand.

    Args:
        paths: report.json files; the first becomes `report.json` in the repository, others are numbered.
        digest: of the draft in the folder; None where it has no weights.

    Raises:
        InputError: a report is of other bytes, contradicts itself, or breaks its schema.
    """
    documents: list[Document] = []
    for i, path in enumerate(paths):
        require_written(read_json_object(path), "report", where=str(path), by="verify")
        document = read_document("report.json" if i == 0 else f"report-{i + 1}.json", path)
        if any(document.sha256 == other.sha256 for other in documents):
            raise InputError("was given before; its figures would stand there twice", where=str(path))
        check_report(document, digest, where=str(path))
        documents.append(document)
    return tuple(documents), _judge(documents, digest)


def require_written(document: Mapping[str, Any], schema: str, *, where: str, by: str) -> None:
    """Refuse a document that our own command cannot have written.

    Raises:
        InputError: it breaks its schema.
    """
    for problem in schema_problems(document, schema):
        raise InputError(
            f"{problem.path or 'the document'}: {problem.message}",
            where=where,
            hint=f"Give the file as `eagle3pack {by}` wrote it.",
        )


def smoke_runs(reports: Sequence[Document]) -> list[Node]:
    """The runs of all reports, in order."""
    return [run for report in reports for run in report.root.smoke.runs]


def check_report(report: Document, digest: str | None, *, where: str) -> None:
    """Hold one report against the draft and against itself.

    Raises:
        InputError: they do not agree.
    """
    stated = report.root.draft.digest.raw
    if stated is not None and stated != digest:
        found = f"the draft in the folder is {digest[:12]}" if digest else "the folder has no weights"
        raise InputError(
            f"is about the draft {stated[:12]}, but {found}",
            where=where,
            hint="Run `eagle3pack verify` on this folder again.",
        )
    _check_summary(report.root, where)
    for run in report.root.smoke.runs:
        if run.draft.digest.raw not in (None, stated):
            raise InputError("has a run of another draft", where=where)
        for part, name in ((run, "run"), (run.baseline, "baseline"), (run.against, "against")):
            if part.raw:
                check_run(part, where=f"{where}: {part.source.pointer}", is_baseline=name == "baseline")


def check_run(run: Node, *, where: str, is_baseline: bool = False) -> None:
    """Hold a run's rates against its counters, or against each other where it is quoted.

    Raises:
        InputError: they do not agree.
    """
    if run.origin.raw == "quoted":
        _check_quoted(run, where)
    elif not is_baseline:
        _check_measured(run, where)


def _check_measured(run: Node, where: str) -> None:
    drafts, proposed, accepted = (run[key].raw for key in ("drafts", "draft_tokens", "accepted_tokens"))
    positions = run.accepted_per_position.raw or []
    if not drafts or not proposed:
        raise InputError("measured no drafts: the counters are zero or missing", where=where)
    if sum(positions) != accepted or accepted > proposed or any(count > drafts for count in positions):
        raise InputError("has counters that contradict each other", where=where)
    _agree(run.mean_accepted_length, 1 + accepted / drafts, where)
    _agree(run.draft_accept_rate, accepted / proposed, where)
    stated = run.per_position_accept_rate
    if len(stated) != len(positions):
        raise InputError("has rates for other positions than it has counters", where=where)
    for rate, count in zip(stated, positions, strict=True):
        _agree(rate, count / drafts, where)


def _agree(stated: Node, computed: float, where: str) -> None:
    if stated.raw is None or abs(float(stated.raw) - computed) > TOLERANCE * max(1.0, computed):
        key = stated.source.pointer.rsplit("/", 1)[-1]
        raise InputError(f"states {key} {stated.raw}, but its counters give {computed:.6f}", where=where)


def _check_quoted(run: Node, where: str) -> None:
    """1 + the sum of the positions, and (length - 1) / k, each to the digits that were printed."""
    if not str(run.source_url.raw or "").startswith(("http://", "https://")):
        raise InputError("is quoted without a source_url", where=where)
    if any(run[key].raw is not None for key in ("drafts", "draft_tokens", "accepted_tokens")):
        raise InputError("is quoted, so its counters must be null", where=where)
    length = run.mean_accepted_length.raw
    if length is None:
        raise InputError("quotes no mean accepted length", where=where)
    rates = [rate.raw for rate in run.per_position_accept_rate]
    k, rate = run.num_speculative_tokens.raw, run.draft_accept_rate.raw
    if not 1 <= length <= 1 + k:
        raise InputError(f"quotes {length} accepted tokens with {k} proposed", where=where)
    if rates and abs(1 + sum(map(Decimal, map(str, rates))) - Decimal(str(length))) > sum(
        map(_half_unit, [length, *rates]), Decimal(0)
    ):
        raise InputError(
            f"quotes a mean accepted length of {length}, but its positions give {1 + sum(rates)}", where=where
        )
    if rate is not None:
        implied = (Decimal(str(length)) - 1) / k
        if abs(implied - Decimal(str(rate))) > _half_unit(length) / k + _half_unit(rate):
            raise InputError(
                f"quotes an accept rate of {rate}, but its length gives {implied:.4f}", where=where
            )


def _half_unit(number: Any) -> Decimal:
    """Half of the last printed digit; what rounding may have changed."""
    exponent = Decimal(str(number)).as_tuple().exponent
    return Decimal(5).scaleb(int(exponent) - 1)


def _check_summary(report: Node, where: str) -> None:
    """A report that counts failures which its list does not show was cut."""
    severities = [check.severity.raw for check in report.checks if check.status.raw == "failed"]
    for key, severity in (("errors", "error"), ("warnings", "warning"), ("notes", "note")):
        if report.summary[key].raw != severities.count(severity):
            raise InputError(
                f"counts {report.summary[key].raw} failed checks of severity {severity}, "
                f"but lists {severities.count(severity)}",
                where=where,
                hint="Publish the report as verify wrote it.",
            )
    if report.passed.raw and "error" in severities:
        raise InputError("says that it passed, but lists a failed check", where=where)


def _judge(reports: Sequence[Document], digest: str | None) -> Verdict:
    """Whether this may be published, and what is missing in its verification."""
    if digest is None:
        return Verdict("the folder has no weights", ())
    unverified = [] if reports else ["there is no report"]
    measured = False
    for report in reports:
        root = report.root
        if root.draft.digest.raw is None or not root.complete.raw:
            return Verdict(f"{report.name} was not made from all bytes of this draft", ())
        if not root.passed.raw:
            unverified.append(f"checks failed in {report.name}")
        if root.smoke.status.raw == "failed":
            unverified.append(f"the smoke test failed in {report.name}: {root.smoke.reason.raw}")
        measured |= any(run.origin.raw == "measured" for run in root.smoke.runs)
    if reports and not measured:
        reasons = [str(report.root.smoke.reason.raw) for report in reports if report.root.smoke.reason.raw]
        unverified.append("no engine ran this draft" + (f" ({'; '.join(reasons)})" if reasons else ""))
    return Verdict("", tuple(unverified))
