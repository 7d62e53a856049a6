"""`eagle3pack verify`."""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING, Any

import click

from eagle3pack import console
from eagle3pack.cli.options import FilePath, common_options
from eagle3pack.cli.smoke_options import smoke_options, take_smoke_options

if TYPE_CHECKING:
    from pathlib import Path

    from eagle3pack.verify.command import Verified

CHECK_FAILED = 3


@click.command()
@click.argument("source")
@click.option("--target", metavar="TARGET", help="Folder, config.json, hf: or ms: id, or a bundled ORG/NAME.")
@click.option(
    "--for",
    "engines",
    metavar="ENGINES",
    help="Whose rules count, of vllm, sglang, tensorrt-llm, llama.cpp; others' become notes. "
    "[default: vllm,sglang]",
)
@click.option(
    "--tensor-parallel-size", type=click.IntRange(min=1), metavar="N", help="Ranks that will serve it."
)
@click.option("--quick", is_flag=True, help="Read no values and run no engine, unless one is named.")
@click.option("--strict", is_flag=True, help="Warnings fail too.")
@click.option("--fix", metavar="OUT", help="Write a copy into OUT with every safe mend made.")
@click.option("--report", type=FilePath(dir_okay=False), help="Write report.json here.")
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
    _require_outputs(source, options["target"], smoke, report)
    verified = run_verify(source, VerifyOptions(**options), say=console.say, progress=console.progress)
    if not as_json:
        console.print_result(verified.text(verbose=console.is_verbose()))
    if options["fix"]:
        write_mended(verified, options["fix"], say=console.say)
    section, figures = _smoke_test(verified, smoke, report)
    document = verified.report(smoke=section, smoke_passed=section["status"] != "failed")
    if report is not None:
        write_report(document, report)
    if as_json:
        console.print_json(document)
    else:
        console.print_result(figures)
    click_context.exit(0 if document["passed"] else CHECK_FAILED)


def _require_outputs(source: str, target: str | None, smoke: dict[str, Any], report: Path | None) -> None:
    """Refuse, before anything is read, to write where something else lies."""
    from eagle3pack.verify.outputs import require_log_path, require_report_path

    models = [text for text in (source, target, smoke["against"]) if text]
    if report is not None:
        require_report_path(report, models)
    if smoke["engine_log"] is not None:
        require_log_path(smoke["engine_log"], models)


def _smoke_test(verified: Verified, given: dict[str, Any], report: Path | None) -> tuple[dict[str, Any], str]:
    """Run the draft in an engine, where there is reason and way to.

    Returns:
        The report's section, and the text for a person.
    """
    reason = verified.why_no_smoke_test(given["engine"])
    if reason:
        return {"status": "not_run", "reason": reason, "runs": []}, f"smoke test not run: {reason}"
    from eagle3pack.verify.smoke.run import run_smoke

    size = verified.context.options.tensor_parallel_size
    options = take_smoke_options(given, tensor_parallel_size=size, report=report)
    result = run_smoke(options, verified.subject(), say=console.say, progress=console.progress)
    verdict = {
        "passed": "smoke test passed",
        "failed": "smoke test failed: ",
        "not_run": "smoke test not run: ",
    }
    lines = [result.text, verdict[result.status] + result.reason, result.hint and f"  {result.hint}"]
    return result.section, "\n".join(line for line in lines if line)
