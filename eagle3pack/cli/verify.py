"""`eagle3pack verify`."""

from __future__ import annotations

import gc
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import click

from eagle3pack import console
from eagle3pack.cli.options import FilePath, GroupedCommand, common_options, option_group
from eagle3pack.cli.smoke_options import smoke_options, take_smoke_options

if TYPE_CHECKING:
    from pathlib import Path

    from eagle3pack.verify.command import Verified
    from eagle3pack.verify.smoke.options import SmokeOptions

CHECK_FAILED = 3
_TYPED = click.core.ParameterSource.COMMANDLINE


@click.command(cls=GroupedCommand)
@click.argument("source")
@option_group(
    "Checks",
    click.option(
        "--target", metavar="TARGET", help="Folder, config.json, hf: or ms: id, or a bundled ORG/NAME."
    ),
    click.option(
        "--for",
        "engines",
        multiple=True,
        metavar="ENGINES",
        help="Whose rules count, of vllm, sglang, tensorrt-llm, llama.cpp; others' become notes; "
        "repeatable. [default: vllm,sglang]",
    ),
    click.option(
        "--tensor-parallel-size", type=click.IntRange(min=1), metavar="N", help="Ranks that will serve it."
    ),
    click.option("--quick", is_flag=True, help="Read no values and run no engine, unless one is named."),
    click.option("--strict", is_flag=True, help="Warnings fail too."),
    click.option("--fix", metavar="OUT", help="Write a copy into OUT with every safe mend made."),
    click.option("--report", type=FilePath(dir_okay=False), metavar="FILE", help="Write report.json here."),
)
@smoke_options
@common_options
@click.pass_context
def verify(
    click_context: click.Context,
    /,
    source: str,
    as_json: bool,
    report: Path | None,
    smoke: dict[str, Any],
    **options: Any,
) -> None:
    """Hold the draft SOURCE against its target and the engines that will serve it.

    SOURCE is a folder, hf:ORG/NAME[@REVISION] or ms:ORG/NAME[@REVISION]. Each finding says what is wrong,
    what comes of it and what to do. The exit code is 3 where a check fails that counts.

    \b
    Examples:
      eagle3pack verify ./draft --target ./target --report report.json
      eagle3pack verify ./draft --target MiniMaxAI/MiniMax-M3 --tensor-parallel-size 4 --quick
    """
    gc.disable()  # nothing of what is imported here is ever freed: looking for it costs 5 % of a --quick
    from eagle3pack.verify.command import VerifyOptions, run_verify, write_mended, write_report

    gc.enable()
    options["engines"] = ",".join(options["engines"]) if options["engines"] else None
    _require_outputs(source, options["target"], smoke, report)
    asked = _ask(click_context, smoke, options, report)
    verified = run_verify(source, VerifyOptions(**options), say=console.say, progress=console.progress)
    if not as_json and (text := verified.text(verbose=console.is_verbose(), quiet=console.is_quiet())):
        console.print_result(text)
    if options["fix"]:
        write_mended(verified, options["fix"], say=console.say)
    outcome = _smoke_test(verified, smoke, asked)
    document = verified.report(smoke=outcome.section, smoke_passed=outcome.passed)
    if report is not None:
        write_report(document, report)
    if as_json:
        console.print_json(document)
    elif not console.is_quiet():
        if outcome.figures:
            console.print_result(outcome.figures)
        console.print_result(outcome.verdict)
    if not outcome.passed and (as_json or console.is_quiet()):
        console.fail(outcome.verdict)
    click_context.exit(0 if document["passed"] else CHECK_FAILED)


def _require_outputs(source: str, target: str | None, smoke: dict[str, Any], report: Path | None) -> None:
    """Refuse, before anything is read, to write where something else lies."""
    from eagle3pack.verify.outputs import require_log_path, require_report_path

    models = [text for text in (source, target, smoke["against"]) if text]
    if report is not None:
        require_report_path(report, models)
    if smoke["engine_log"] is not None:
        require_log_path(smoke["engine_log"], models)


def _ask(
    click_context: click.Context, given: dict[str, Any], options: dict[str, Any], report: Path | None
) -> SmokeOptions | None:
    """Make sense of the smoke test's options before the draft is read: a mistake in them is told at once.

    Returns:
        None for a --quick without a word about the smoke test, which does not pay for its imports.
    """
    typed = {name for name in given if click_context.get_parameter_source(name) is _TYPED}
    if options["quick"] and not typed:
        return None
    from eagle3pack.verify.smoke.questions import load_questions
    from eagle3pack.verify.smoke.request import ignored_options, require_draft, require_possible, runs_vllm

    require_possible(given, quick=options["quick"], target=options["target"])
    asked = take_smoke_options(given, tensor_parallel_size=options["tensor_parallel_size"], report=report)
    load_questions(asked)
    if asked.against is not None:
        require_draft(asked.against)
    if given["device"] and given["engine"] != "none" and not runs_vllm(given):
        from eagle3pack.verify.smoke.reference import require_device

        require_device(given["device"])
    if ignored := ignored_options(given):
        reader = (
            "the reference engine reads that" if runs_vllm(given) else "vLLM reads that, and it does not run"
        )
        console.say(f"ignored: {', '.join(ignored)} (only {reader})")
    return asked


@dataclass(frozen=True, slots=True)
class _Smoke:
    """What became of the smoke test: the report's section, the same for a person, and whether it may pass."""

    section: dict[str, Any]
    figures: str
    verdict: str
    passed: bool


def _smoke_test(verified: Verified, given: dict[str, Any], asked: SmokeOptions | None) -> _Smoke:
    """Run the draft in an engine, where there is reason and way to."""
    from eagle3pack.verify.smoke.request import asked_runs, engine_named

    reason = verified.why_no_smoke_test(given["engine"], named=engine_named(given))
    if reason or asked is None:
        return _not_run(reason, asked_runs(given))
    from eagle3pack.verify.smoke.run import run_smoke

    result = run_smoke(asked, verified.subject(), say=console.say, progress=console.progress)
    if result.status == "not_run":
        return _not_run(result.reason, asked_runs(given))
    verdict = "smoke test passed" if result.status == "passed" else f"smoke test failed: {result.reason}"
    verdict += f"\n  {result.hint}" if result.hint else ""
    return _Smoke(result.section, result.text, verdict, result.status == "passed")


def _not_run(reason: str, asked: list[str]) -> _Smoke:
    """A run that nobody insisted on may be left out; one with a gate on it may not."""
    if asked:
        reason = f"{reason}; asked for and not done: {', '.join(asked)}"
    section = {"status": "not_run", "reason": reason, "runs": []}
    return _Smoke(section, "", f"smoke test not run: {reason}", not asked)
