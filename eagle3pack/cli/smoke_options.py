"""The options of `verify` that concern the smoke test, and what they amount to."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar, cast

import click

from eagle3pack.cli.options import Bound, FilePath, option_group

if TYPE_CHECKING:
    from pathlib import Path

    from eagle3pack.verify.smoke.options import SmokeOptions

Command = TypeVar("Command", bound=Callable[..., Any])
_FILE = FilePath(exists=True, dir_okay=False)
_SHARE = Bound(0, 1)

_COUNT = click.IntRange(min=1)

_GROUPS = (
    option_group(
        "Smoke test",
        click.option(
            "--engine",
            type=click.Choice(["auto", "none", "reference", "vllm"]),
            default="auto",
            show_default=True,
            help="What runs the smoke test. auto: vLLM where --vllm-command or --endpoint names one, else "
            "PyTorch in this process where the target's weights are on this machine.",
        ),
        click.option(
            "--dtype",
            type=click.Choice(["auto", "bfloat16", "float16", "float32"]),
            help="What the engine computes in.",
        ),
        click.option("--device", metavar="DEVICE", help="Of the reference engine: cpu, cuda, cuda:1."),
        click.option(
            "--num-speculative-tokens",
            type=click.IntRange(1, 32),
            default=3,
            show_default=True,
            metavar="K",
            help="Tokens that the draft proposes at a time.",
        ),
        click.option(
            "--max-concurrency",
            type=_COUNT,
            default=16,
            show_default=True,
            metavar="N",
            help="Conversations that run at once.",
        ),
        click.option(
            "--max-tokens",
            type=click.IntRange(min=2),
            default=128,
            show_default=True,
            metavar="N",
            help="Tokens of an answer at most.",
        ),
        click.option(
            "--probes/--no-probes", default=True, show_default=True, help="Requests beside the average."
        ),
    ),
    option_group(
        "Prompts",
        click.option(
            "--prompts",
            type=_FILE,
            metavar="FILE",
            help="MT-Bench's question.jsonl and the like, or one prompt a line.",
        ),
        click.option(
            "--dataset-name",
            metavar="NAME",
            help="What reports call the prompts; the file's name by default.",
        ),
        click.option(
            "--category",
            "categories",
            multiple=True,
            metavar="NAME",
            help="Only prompts of this category; repeatable.",
        ),
        click.option("--limit", type=_COUNT, metavar="N", help="Prompts at most."),
    ),
    option_group(
        "Comparisons and gates",
        click.option("--baseline", is_flag=True, help="Run without the draft too: speed-up and agreement."),
        click.option(
            "--against", metavar="SOURCE", help="Run another draft too, and say what is retained of it."
        ),
        click.option("--min-acceptance-length", type=Bound(min=1), metavar="X", help="Fail below it."),
        click.option(
            "--min-retention",
            type=Bound(min=0),
            metavar="X",
            help="Fail below it; with --against.",
        ),
        click.option(
            "--min-agreement", type=_SHARE, metavar="X", help="Fail below this share; with --baseline."
        ),
    ),
    option_group(
        "vLLM",
        click.option("--vllm-command", metavar="CMD", help="What starts vLLM, if not `vllm` on PATH."),
        click.option("--endpoint", metavar="URL", help="A vLLM server that runs already."),
        click.option("--enforce-eager", is_flag=True, help="No graphs, no compilation."),
        click.option("--max-model-len", type=_COUNT, metavar="N", help="Longest prompt and answer together."),
        click.option("--attention-backend", metavar="NAME", help="Of target and draft."),
        click.option("--block-size", type=_COUNT, metavar="N", help="Tokens of a KV page."),
        click.option(
            "--engine-arg",
            "engine_args",
            multiple=True,
            metavar="KEY=VALUE",
            help="Any other option, KEY= for a flag; speculative-config.KEY=VALUE for the draft's. "
            "Repeatable.",
        ),
        click.option(
            "--start-timeout",
            type=Bound(min=1),
            default=1800,
            show_default=True,
            metavar="SECONDS",
            help="How long vLLM may load.",
        ),
        click.option(
            "--request-timeout",
            type=Bound(min=1),
            default=600,
            show_default=True,
            metavar="SECONDS",
            help="How long one answer may take.",
        ),
        click.option(
            "--engine-log", type=FilePath(dir_okay=False), metavar="FILE", help="Where vLLM's output goes."
        ),
    ),
)


def smoke_options(command: Command) -> Command:
    """Add the options of the smoke test to a command, which gets their values as one mapping `smoke`.

    --tensor-parallel-size is not among them: it concerns the static checks too.
    """

    @functools.wraps(command)
    def with_smoke(**values: Any) -> Any:
        smoke = {name: values.pop(name) for name in names}
        return command(smoke=smoke, **values)

    others: list[click.Parameter] = list(getattr(command, "__click_params__", ()))
    for group in reversed(_GROUPS):
        group(with_smoke)
    params: list[click.Parameter] = with_smoke.__click_params__  # type: ignore[attr-defined]
    names = [param.name for param in params if param not in others]
    return cast(Command, with_smoke)


def take_smoke_options(
    given: Mapping[str, Any], *, tensor_parallel_size: int | None, report: Path | None
) -> SmokeOptions:
    """Make sense of the values that `smoke_options` collected.

    Args:
        given: the values by name.
        tensor_parallel_size: as the user gave it, or None.
        report: where the report goes; vLLM's log goes beside it unless --engine-log says otherwise.

    Raises:
        UsageError: an --engine-arg that may not be set.
        InputError, TransportError, ...: --against names a draft that is not there.
    """
    from eagle3pack.sources import resolve_source
    from eagle3pack.verify.smoke.launch import EngineOptions, parse_engine_args
    from eagle3pack.verify.smoke.options import SmokeOptions
    from eagle3pack.verify.smoke.vllm import Limits

    against = given["against"]
    log = given["engine_log"] or (report.with_suffix(".vllm.log") if report else None)
    return SmokeOptions(
        engine=given["engine"],
        vllm_command=given["vllm_command"],
        endpoint=given["endpoint"],
        device=given["device"],
        engine_options=EngineOptions(
            enforce_eager=given["enforce_eager"],
            max_model_len=given["max_model_len"],
            dtype=given["dtype"],
            attention_backend=given["attention_backend"],
            block_size=given["block_size"],
            extra=parse_engine_args(given["engine_args"]),
        ),
        tensor_parallel_size=tensor_parallel_size,
        num_speculative_tokens=given["num_speculative_tokens"],
        max_concurrency=given["max_concurrency"],
        prompts=given["prompts"],
        dataset_name=given["dataset_name"],
        limit=given["limit"],
        categories=given["categories"],
        max_tokens=given["max_tokens"],
        baseline=given["baseline"],
        against=resolve_source(against).folder if against else None,
        against_source=against or "",
        min_acceptance_length=given["min_acceptance_length"],
        min_retention=given["min_retention"],
        min_agreement=given["min_agreement"],
        probes=given["probes"],
        limits=Limits(given["start_timeout"], given["request_timeout"]),
        log_path=log,
    )
