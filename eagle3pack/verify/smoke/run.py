"""The smoke test from one end to the other: engines up and down, measurements, probes, the verdict."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, Protocol

from eagle3pack.errors import InputError
from eagle3pack.verify.smoke.engines import EngineFactory, NotRun, engine_factory
from eagle3pack.verify.smoke.measure import Measurement, Question, measure, require_counters
from eagle3pack.verify.smoke.options import SmokeOptions, Subject
from eagle3pack.verify.smoke.probes import Probe, run_probes
from eagle3pack.verify.smoke.protocol import Engine, EngineError, EngineFacts, Sampling
from eagle3pack.verify.smoke.questions import load_questions
from eagle3pack.verify.smoke.render import render_run
from eagle3pack.verify.smoke.report import Outcome, smoke_run
from eagle3pack.verify.smoke.verdict import judge

# What an engine fails with; InputError where PyTorch cannot make a model of the files.
_FAILURES = (EngineError, InputError)


class Progress(Protocol):
    """Shows how far a count has come, as `console.progress` does."""

    def __call__(
        self, label: str, total: int, *, unit: str
    ) -> AbstractContextManager[Callable[[int], None]]: ...


@dataclass(frozen=True, slots=True)
class SmokeResult:
    """What the smoke test found.

    Attributes:
        status: not_run where there was no engine.
        reason: what failed, or why it did not run; "" where it passed.
        hint: what to do about it.
        run: a smoke_run of report.json; None where nothing could be measured.
    """

    status: Literal["passed", "failed", "not_run"]
    reason: str = ""
    hint: str = ""
    run: dict[str, Any] | None = None

    @property
    def section(self) -> dict[str, Any]:
        """The `smoke` of report.json."""
        return {"status": self.status, "reason": self.reason, "runs": [] if self.run is None else [self.run]}

    @property
    def text(self) -> str:
        """The figures for a terminal; "" where there are none."""
        return "" if self.run is None else render_run(self.run)


def _silent(label: str, total: int, *, unit: str) -> AbstractContextManager[Callable[[int], None]]:
    return nullcontext(lambda count: None)


def run_smoke(
    options: SmokeOptions,
    subject: Subject,
    *,
    say: Callable[[str], None] = lambda text: None,
    progress: Progress = _silent,
) -> SmokeResult:
    """Run the draft in an engine, and judge it.

    An engine that does not start or stops serving is a failed test, not an error: the report is
    written all the same.

    Args:
        options: the user's.
        subject: draft and target.
        say: told what happens.
        progress: shown while answers come in.

    Raises:
        UsageError: the options contradict each other, the machine or the models.
        InputError: the prompts or the models cannot be read.
    """
    try:
        create = engine_factory(options, subject, say=say)
    except NotRun as reason:
        return SmokeResult("not_run", str(reason))
    questions, dataset = load_questions(options)
    session = _Session(create, questions, options, subject, say, progress)
    try:
        outcome = session.outcome()
    except _FAILURES as error:
        return SmokeResult("failed", str(error), error.hint)
    run = smoke_run(outcome, dataset, options, subject)
    failures = [*outcome.failures, *judge(run, options)]
    return SmokeResult("failed" if failures else "passed", "\n".join(failures), run=run)


@dataclass(frozen=True, slots=True)
class _Session:
    """One smoke test under way."""

    create: EngineFactory
    questions: tuple[Question, ...]
    options: SmokeOptions
    subject: Subject
    say: Callable[[str], None]
    progress: Progress

    def outcome(self) -> Outcome:
        """Everything that was asked for, one engine at a time: two rarely fit on one machine."""
        probes: tuple[Probe, ...] = ()
        with self._engine(self.subject.draft, "draft") as (engine, facts):
            require_counters(engine)
            ours = self._measure(engine, facts, "with the draft")
            if self.options.probes:
                probes = self._probe(engine, facts, ours)
        outcome = Outcome(ours, probes=probes)
        if self.options.baseline:
            outcome = self._compare(outcome, "baseline", None, "without a draft")
        if self.options.against is not None:
            outcome = self._compare(outcome, "against", self.options.against, "with the other draft")
        return outcome

    def _compare(
        self, outcome: Outcome, role: Literal["baseline", "against"], draft: Path | None, label: str
    ) -> Outcome:
        """Measure what to compare with; if that fails, what was measured before is still worth its report."""
        try:
            with self._engine(draft, role) as (engine, facts):
                measured = self._measure(engine, facts, label)
        except _FAILURES as error:
            failure = f"the run {label} failed: {error}"
            return replace(outcome, failures=(*outcome.failures, failure))
        if role == "baseline":
            return replace(outcome, baseline=measured)
        return replace(outcome, against=measured)

    @contextmanager
    def _engine(self, draft: Path | None, role: str) -> Iterator[tuple[Engine, EngineFacts]]:
        engine = self.create(draft, role)
        try:
            facts = engine.start()
            for note in facts.notes if role == "draft" else ():
                self.say(note)
            yield engine, facts
        finally:
            engine.stop()

    def _measure(self, engine: Engine, facts: EngineFacts, label: str) -> Measurement:
        turns = sum(max(len(question.conversation.turns), 1) for question in self.questions)
        with self.progress(label, turns, unit="answers") as advance:
            measured = measure(
                engine,
                facts,
                self.questions,
                Sampling(self.options.max_tokens),
                max_concurrency=self.options.max_concurrency,
                on_answers=advance,
            )
        for note in measured.notes:
            self.say(note)
        return measured

    def _probe(self, engine: Engine, facts: EngineFacts, ours: Measurement) -> tuple[Probe, ...]:
        return run_probes(
            engine,
            facts,
            self.questions[0].conversation,
            ours.answers[0][0],
            max_position_embeddings=self.subject.draft_config.max_position_embeddings,
            max_concurrency=self.options.max_concurrency,
        )
