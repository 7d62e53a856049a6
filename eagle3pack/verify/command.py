"""`eagle3pack verify` without its smoke test, as one function: resolve, examine, mend, report."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eagle3pack.documents import to_json, write_whole
from eagle3pack.errors import UsageError
from eagle3pack.sources import Source, resolve_source, resolve_target
from eagle3pack.verify.check import ENGINES, Engine
from eagle3pack.verify.context import CONFIG_NAME, Context, Options
from eagle3pack.verify.report import Examination, build_report, examine
from eagle3pack.verify.text import render, render_failures

if TYPE_CHECKING:
    from eagle3pack.verify.smoke.options import Subject

Progress = Callable[[str, int], AbstractContextManager[Callable[[int], None]]]


@dataclass(frozen=True, slots=True)
class VerifyOptions:
    """The options of the static part, named as on the command line."""

    target: str | None = None
    engines: str | None = None
    tensor_parallel_size: int | None = None
    quick: bool = False
    strict: bool = False
    fix: str | None = None


@dataclass(frozen=True, slots=True)
class Verified:
    """A draft and all that was found about it.

    Attributes:
        source: where it came from.
        source_text: as the user wrote it.
        target_text: likewise the target; "" where none was given.
        context: the draft under examination.
        examination: the answers.
        strict: warnings count.
    """

    source: Source
    source_text: str
    target_text: str
    context: Context
    examination: Examination
    strict: bool

    @property
    def passed(self) -> bool:
        """No check of the static part failed that counts."""
        return self.examination.passes(strict=self.strict)

    def why_no_smoke_test(self, engine: str, *, named: bool) -> str:
        """Why a smoke test is out of place; "" where it is not.

        Args:
            engine: the value of --engine.
            named: the user named an engine, by that or by another option.
        """
        if engine == "none":
            return "--engine none"
        if self.context.options.quick and not named:
            return "--quick runs no engine unless --engine names one"
        if self.context.files.pickles and not self.context.files.used:
            return "engines are given safetensors weights only (F03)"
        if self.examination.failed("error"):
            return "the static checks found errors, which an engine would only repeat"
        if not self.context.has_target:
            return "no --target was given"
        return ""

    def subject(self) -> Subject:
        """Draft and target, for the smoke test."""
        from eagle3pack.verify.smoke.options import Subject

        return Subject(
            draft=self.context.folder,
            draft_source=self.source_text,
            draft_digest=self.examination.digest,
            draft_config=self.context.config,
            target_source=self.target_text,
            target=self.context.target,
            command=shlex.join(["eagle3pack", *sys.argv[1:]]),
        )

    def report(self, **smoke: Any) -> dict[str, Any]:
        """report.json; `smoke` and `smoke_passed` as `build_report` takes them."""
        return build_report(
            self.context,
            self.examination,
            source=self.source_text,
            revision=self.source.revision,
            strict=self.strict,
            **smoke,
        )

    def text(self, *, verbose: bool = False, quiet: bool = False) -> str:
        """The same for a person; quiet: only what fails it, "" where nothing does."""
        if quiet:
            return render_failures(self.examination, strict=self.strict)
        return render(self.context, self.examination, source=self.source_text, verbose=verbose)


def parse_engines(text: str | None) -> tuple[tuple[Engine, ...], bool]:
    """Read --for: the engines whose rules count, and whether the user named them.

    Raises:
        UsageError: a name that is none of the engines.
    """
    if text is None:
        return Options().engines, False
    names = [name.strip().lower() for name in text.split(",") if name.strip()]
    for name in names:
        if name not in ENGINES:
            raise UsageError(f"{name} is none of {', '.join(ENGINES)}", where="--for")
    if not names:
        raise UsageError("names no engine", where="--for", hint=f"Choose from {', '.join(ENGINES)}.")
    return tuple(engine for engine in ENGINES if engine in names), True


def run_verify(
    source_text: str, options: VerifyOptions, *, say: Callable[[str], None], progress: Progress
) -> Verified:
    """Examine a draft.

    Args:
        source_text: SOURCE as the user wrote it.
        options: see `eagle3pack verify --help`.
        say: for messages while it works.
        progress: (label, total bytes) -> a context that yields the function to advance it.

    Raises:
        Eagle3PackError: the draft or the target cannot be had at all; what is wrong with the draft is in
            the result.
    """
    engines, named = parse_engines(options.engines)
    target = resolve_target(options.target) if options.target else None
    if target is not None and target.bundled:
        say(f"target {target.name}: using the shape that came with this package ({target.bundled_from})")
    if options.fix:
        from eagle3pack.verify.mend import require_new

        require_new(Path(options.fix))
    source = resolve_source(source_text)
    asked = Options(engines, named, options.tensor_parallel_size, options.quick)
    context = Context(
        source.folder,
        asked,
        target=target,
        target_text=options.target,
        draft_name=source_text if source.location.place == "local" else source.location.name,
    )
    if options.quick:
        examination = examine(context)
    else:
        total = sum(
            path.stat().st_size
            for path in (source.folder / CONFIG_NAME, *context.files.used)
            if path.is_file()
        )
        with progress("reading", total) as advance:
            context.options = replace(asked, on_bytes=advance)
            examination = examine(context)
    return Verified(source, source_text, options.target or "", context, examination, options.strict)


def write_mended(verified: Verified, out: str, *, say: Callable[[str], None]) -> None:
    """Write a copy of the draft with every safe mend applied (--fix).

    Raises:
        Eagle3PackError: see `mend.write_mended_copy`.
    """
    from eagle3pack.verify.mend import what_remains, write_mended_copy

    done = write_mended_copy(verified.context, verified.examination, Path(out))
    for line in done:
        say(f"mended {line}")
    if done:
        say(f"wrote {out}: {what_remains(verified.context, Path(out))}")
    else:
        say(f"nothing to mend; {out} was not written")


def write_report(document: Mapping[str, Any], path: Path) -> None:
    """Write report.json, whole or not at all; raises as `write_whole`."""
    hint = "Make room there, or give --report another place, and run it again."
    write_whole(path, to_json(document).encode("utf-8"), hint=hint)
