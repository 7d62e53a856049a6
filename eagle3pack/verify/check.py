"""What a check is: a pure question about a draft, its outcome, and what would mend it.

A check is a generator over a `Context`: it yields a `Finding` for everything that is wrong and raises
`Undecided` where it cannot tell. It never raises anything else and never prints.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from eagle3pack.errors import Eagle3PackError

if TYPE_CHECKING:
    from eagle3pack.verify.context import Context

Severity = Literal["error", "warning", "note"]
Status = Literal["passed", "failed", "not_decided", "not_applicable", "not_run"]
Engine = Literal["vllm", "sglang", "tensorrt-llm", "llama.cpp"]

ENGINES: tuple[Engine, ...] = ("vllm", "sglang", "tensorrt-llm", "llama.cpp")
DEFAULT_ENGINES: tuple[Engine, ...] = ("vllm", "sglang")


@dataclass(frozen=True, slots=True)
class SetKey:
    """Write a key of config.json.

    Attributes:
        path: keys from the top.
        value: JSON value.
    """

    path: tuple[str, ...]
    value: Any


@dataclass(frozen=True, slots=True)
class RemoveKey:
    """Leave a key of config.json out, whose value says nothing.

    Attributes:
        path: keys from the top.
    """

    path: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class RenameTensor:
    """Give a tensor the name that engines load."""

    name: str
    new_name: str


@dataclass(frozen=True, slots=True)
class DropTensor:
    """Leave a tensor out that no engine reads and one refuses."""

    name: str


@dataclass(frozen=True, slots=True)
class SetFormat:
    """Write `format: pt` into the metadata of a weight file."""

    file: str


@dataclass(frozen=True, slots=True)
class DropIndex:
    """Leave an index out that names no file of the folder."""

    file: str


Mend = SetKey | RemoveKey | RenameTensor | DropTensor | SetFormat | DropIndex


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that is wrong, its evidence and the way out.

    Attributes:
        message: what is wrong and what follows, one sentence.
        fix: what to do about it.
        file, key, tensor: where: file name, dotted path in config.json, tensor name in the file.
        found, expected: JSON values.
        severity: where it differs from the check's.
        engines: whom it concerns, where that differs from the check's.
        only_if_named: an engine other than vLLM does not serve this form, which is its producer's own:
            an error where the user named the engine, else a warning.
        mends: what `--fix` does; empty where no mend is safe and mechanical.
        producer_bug: the known fault of a producer that this is the fingerprint of.
    """

    message: str
    fix: str
    file: str = ""
    key: str = ""
    tensor: str = ""
    found: Any = None
    expected: Any = None
    severity: Severity | None = None
    engines: tuple[Engine, ...] = ()
    only_if_named: bool = False
    mends: tuple[Mend, ...] = ()
    producer_bug: str | None = None


class Undecided(Exception):
    """A check's answer where it is neither yes nor no.

    Args:
        reason: one sentence without a full stop.
        status: not decided (something is missing or broken), not applicable, or not run.
    """

    def __init__(self, reason: str, status: Status = "not_decided") -> None:
        super().__init__(reason)
        self.reason = reason
        self.status: Status = status


def not_applicable(reason: str) -> Undecided:
    """The answer of a check whose question does not arise."""
    return Undecided(reason, "not_applicable")


CheckFunction = Callable[["Context"], Iterator[Finding]]


@dataclass(frozen=True, slots=True)
class Check:
    """One check and what the documentation says about it.

    Attributes:
        id: of the catalogue, a letter for the family and a number.
        title: what holds where it passes.
        severity: of its findings, unless they say otherwise.
        engines: whom it concerns; empty means every consumer.
        reason: what happens to who ignores it.
        source: public evidence: an issue, a pull request, or a file of an engine.
        streams: it needs the values of tensors, not only headers.
        function: the question.
    """

    id: str
    title: str
    severity: Severity
    reason: str
    source: str
    engines: tuple[Engine, ...]
    streams: bool
    function: CheckFunction = field(repr=False)

    def run(self, context: Context) -> Outcome:
        """Ask the question; whatever keeps it from an answer becomes the reason."""
        try:
            findings = tuple(self.function(context))
        except Undecided as answer:
            return Outcome(self, answer.status, answer.reason)
        except Eagle3PackError as error:  # a value of the wrong kind, which C05 reports
            return Outcome(self, "not_decided", str(error))
        findings = tuple(context.rate(self, finding) for finding in findings)
        return Outcome(self, "failed" if findings else "passed", "", findings)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one check.

    Attributes:
        check: the check.
        status: its outcome.
        reason: why it has no answer, else "".
        findings: non-empty exactly where it failed; each with its severity settled.
    """

    check: Check
    status: Status
    reason: str = ""
    findings: tuple[Finding, ...] = ()

    @property
    def severity(self) -> Severity:
        """The gravest of its findings, or what a failure would be."""
        order: tuple[Severity, ...] = ("error", "warning", "note")
        found = {finding.severity for finding in self.findings}
        return next((severity for severity in order if severity in found), self.check.severity)


def check(
    id: str,
    title: str,
    *,
    reason: str,
    source: str,
    severity: Severity = "error",
    engines: tuple[Engine, ...] = (),
    streams: bool = False,
) -> Callable[[CheckFunction], Check]:
    """Make a check of a generator function."""

    def make(function: CheckFunction) -> Check:
        return Check(id, title, severity, reason, source, engines, streams, function)

    return make
