"""Ask every check and put the answers into one document, report.json.

Schema: schemas/report.schema.json.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Any

from eagle3pack import __version__
from eagle3pack.verify.check import Finding, Outcome, Undecided
from eagle3pack.verify.checks import FAMILIES
from eagle3pack.verify.context import Context
from eagle3pack.verify.serving import ServingFacts, serving_facts

SCHEMA = "eagle3pack/report/1"
NO_SMOKE: Mapping[str, Any] = {"status": "not_run", "reason": "no engine was asked for", "runs": []}


@dataclass(frozen=True, slots=True)
class Examination:
    """Every answer about one draft.

    Attributes:
        outcomes: by family, in the order of the catalogue.
        facts: what it costs to serve; None where its config cannot be read.
        digest: of the draft; None where not every file was read.
    """

    outcomes: Mapping[str, tuple[Outcome, ...]]
    facts: ServingFacts | None
    digest: str | None

    @property
    def all(self) -> tuple[Outcome, ...]:
        """The outcomes of all families."""
        return tuple(outcome for family in self.outcomes.values() for outcome in family)

    def failed(self, severity: str) -> tuple[Outcome, ...]:
        """The failed checks of a severity."""
        return tuple(o for o in self.all if o.status == "failed" and o.severity == severity)

    def passes(self, *, strict: bool) -> bool:
        """No error and, with strict, no warning."""
        return not self.failed("error") and not (strict and self.failed("warning"))


def examine(context: Context) -> Examination:
    """Ask every check; those that read values share one read of the files."""
    outcomes = {name: tuple(check.run(context) for check in checks) for name, checks in FAMILIES.items()}
    try:
        facts: ServingFacts | None = serving_facts(context)
    except Undecided:
        facts = None
    try:
        digest: str | None = context.scan.digest
    except Undecided:
        digest = None
    return Examination(outcomes, facts, digest)


def build_report(
    context: Context,
    examination: Examination,
    *,
    source: str,
    revision: str | None,
    strict: bool,
    smoke: Mapping[str, Any] = NO_SMOKE,
    smoke_passed: bool = True,
    created: str | None = None,
) -> dict[str, Any]:
    """The report as a JSON document.

    Args:
        context: the draft and its target.
        examination: the answers.
        source: the draft as the user gave it.
        revision: its commit on a hub.
        strict: warnings count.
        smoke: the smoke test's section.
        smoke_passed: whether it passed, or was not asked for.
        created: the time; now where None.
    """
    return {
        "schema": SCHEMA,
        "tool": {"name": "eagle3pack", "version": __version__},
        "created": created or datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "complete": examination.digest is not None,
        "passed": examination.passes(strict=strict) and smoke_passed,
        "strict": strict,
        "draft": _draft(context, examination, source, revision),
        "target": _target(context),
        "engines": list(context.options.engines),
        "tensor_parallel_size": context.options.tensor_parallel_size,
        "summary": summary(examination.all),
        "checks": [
            _check(family, outcome)
            for family, outcomes in examination.outcomes.items()
            for outcome in outcomes
        ],
        "serving": None if examination.facts is None else examination.facts.as_json(),
        "smoke": dict(smoke),
    }


def summary(outcomes: Sequence[Outcome]) -> dict[str, int]:
    """Numbers of failed checks by severity, and of the others by status."""
    failed = [outcome.severity for outcome in outcomes if outcome.status == "failed"]
    statuses = [outcome.status for outcome in outcomes]
    return {
        "errors": failed.count("error"),
        "warnings": failed.count("warning"),
        "notes": failed.count("note"),
        "passed": statuses.count("passed"),
        "not_decided": statuses.count("not_decided"),
        "not_applicable": statuses.count("not_applicable"),
        "not_run": statuses.count("not_run"),
    }


def _draft(context: Context, examination: Examination, source: str, revision: str | None) -> dict[str, Any]:
    try:
        files = [{"path": path, "size": size, "sha256": digest} for path, size, digest in context.scan.files]
    except Undecided:
        files = [
            {"path": path.name, "size": path.stat().st_size, "sha256": None}
            for path in (context.folder / "config.json", *context.files.used)
            if path.is_file()
        ]
    try:
        architecture: str | None = context.config.architecture
    except Undecided:
        architecture = None
    return {
        "source": printable(source),
        "revision": revision,
        "digest": examination.digest,
        "files": files,
        "architecture": None if architecture is None else printable(architecture),
        "num_parameters": None if examination.facts is None else examination.facts.num_parameters,
    }


def _target(context: Context) -> dict[str, Any] | None:
    if not context.has_target:
        return None
    target = context.target
    return {
        "id": printable(target.name),
        "revision": target.revision,
        "config_sha256": target.config_sha256,
        "bundled_from": target.bundled_from,
        "architecture": printable(target.architecture),
    }


def _check(family: str, outcome: Outcome) -> dict[str, Any]:
    check = outcome.check
    message = outcome.findings[0].message if outcome.findings else outcome.reason
    return {
        "id": check.id,
        "family": family,
        "title": check.title,
        "severity": outcome.severity,
        "engines": list(check.engines),
        "status": outcome.status,
        "message": printable(message),
        "findings": [_finding(finding) for finding in outcome.findings],
    }


def _finding(finding: Finding) -> dict[str, Any]:
    places = {"file": finding.file, "key": finding.key, "tensor": finding.tensor}
    evidence: dict[str, Any] = {name: printable(value) for name, value in places.items() if value}
    for name in ("found", "expected"):
        value = getattr(finding, name)
        if value is not None:
            evidence[name] = _plain(value)
    return {
        "severity": finding.severity,
        "message": printable(finding.message),
        "evidence": evidence,
        "fix": printable(finding.fix),
        "mendable": bool(finding.mends),
        "producer_bug": finding.producer_bug,
    }


def printable(text: str) -> str:
    """Text as UTF-8 can hold it: a broken config may carry half of a surrogate pair."""
    return text.encode("utf-8", "replace").decode("utf-8")


def _plain(value: Any) -> Any:
    """A value as JSON can hold it; NaN and infinity become text."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, str):
        return printable(value)
    if value is None or isinstance(value, (bool, int, float)):
        return value
    try:
        return json.loads(printable(json.dumps(value, allow_nan=False)))
    except ValueError:
        return printable(repr(value))
