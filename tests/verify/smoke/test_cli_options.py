"""The options of the smoke test on the command line."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner

from eagle3pack.cli.smoke_options import smoke_options, take_smoke_options
from eagle3pack.errors import UsageError
from eagle3pack.verify.smoke.options import SmokeOptions
from tests.tiny import write_draft


def parsed(*arguments: str, report: Path | None = None) -> SmokeOptions:
    """The options that a command line amounts to."""
    seen: list[dict[str, Any]] = []

    @click.command()
    @click.argument("source")
    @smoke_options
    @click.option("--quick", is_flag=True)
    def command(source: str, quick: bool, smoke: dict[str, Any]) -> None:
        assert (source, quick) == ("draft", True)
        seen.append(smoke)

    result = CliRunner().invoke(command, ["draft", "--quick", *arguments])
    assert result.exit_code == 0, result.output
    return take_smoke_options(seen[0], tensor_parallel_size=4, report=report)


def test_the_published_setting_is_the_default() -> None:
    assert parsed() == SmokeOptions(tensor_parallel_size=4)


def test_everything_arrives(tmp_path: Path) -> None:
    draft = write_draft(tmp_path / "mha")
    prompts = tmp_path / "q.jsonl"
    prompts.write_text('{"prompt": "hi"}\n')
    options = parsed(
        *shlex.split("--engine vllm --vllm-command /opt/vllm --num-speculative-tokens 5 --max-concurrency 8"),
        *(
            "--prompts",
            str(prompts),
            "--dataset-name",
            "Q",
            "--limit",
            "2",
            "--category",
            "a",
            "--category",
            "b",
        ),
        *shlex.split(
            "--max-tokens 9 --baseline --min-acceptance-length 2 --min-retention 0.9 --min-agreement 0.5"
        ),
        *("--against", str(draft), "--no-probes", "--enforce-eager", "--dtype", "bfloat16"),
        *shlex.split("--max-model-len 99 --attention-backend FLASH_ATTN --block-size 128 --device cuda:1"),
        *shlex.split("--engine-arg a=b --engine-arg flag= --start-timeout 5 --request-timeout 6"),
        report=tmp_path / "report.json",
    )
    assert (options.engine, options.vllm_command, options.device) == ("vllm", "/opt/vllm", "cuda:1")
    assert (options.num_speculative_tokens, options.max_concurrency, options.max_tokens) == (5, 8, 9)
    assert (options.prompts, options.dataset_name, options.limit) == (prompts, "Q", 2)
    assert options.categories == ("a", "b")
    assert (options.baseline, options.probes) == (True, False)
    assert (options.min_acceptance_length, options.min_retention, options.min_agreement) == (2, 0.9, 0.5)
    assert (options.against, options.against_source) == (draft, str(draft))
    passed_on = options.engine_options
    assert (passed_on.enforce_eager, passed_on.max_model_len, passed_on.dtype) == (True, 99, "bfloat16")
    assert (passed_on.attention_backend, passed_on.block_size) == ("FLASH_ATTN", 128)
    assert passed_on.extra == (("a", "b"), ("flag", None))
    assert (options.limits.start_s, options.limits.request_s) == (5, 6)
    assert options.log_path == tmp_path / "report.vllm.log"


@pytest.mark.parametrize("text", ["port=1", "flag"])
def test_what_is_no_engine_option(text: str) -> None:
    with pytest.raises(UsageError):
        parsed("--engine-arg", text)
