"""What the user can say about a smoke test, and what the smoke test is told of draft and target."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from eagle3pack.draft.config import DraftConfig
from eagle3pack.draft.target import TargetSpec
from eagle3pack.verify.smoke.launch import EngineOptions
from eagle3pack.verify.smoke.vllm import Limits

EngineChoice = Literal["auto", "none", "reference", "vllm"]


@dataclass(frozen=True, slots=True)
class SmokeOptions:
    """The options of `verify` that concern the smoke test.

    Attributes:
        engine: auto takes vLLM where one is named, else PyTorch where the target's weights are at hand.
        vllm_command: what starts vLLM; None for `vllm` on PATH.
        endpoint: URL of a server that runs already.
        device: of the reference engine.
        engine_options: passed on to vLLM; dtype concerns the reference engine too.
        tensor_parallel_size: None for the default.
        num_speculative_tokens: k.
        max_concurrency: conversations at once.
        prompts: a file; None for the prompts that come with this package.
        dataset_name: what reports call it; None for the file's stem.
        limit: prompts at most.
        categories: only these; empty for all.
        max_tokens: of each answer.
        baseline: run without a draft too.
        against: folder of another draft to run.
        against_source: as the user named it.
        min_acceptance_length, min_retention, min_agreement: what fails the test if it is not reached.
        probes: run the requests beside the average.
        limits: how long to wait for a server.
        log_path: of vLLM; None for a temporary file, which stays.
    """

    engine: EngineChoice = "auto"
    vllm_command: str | None = None
    endpoint: str | None = None
    device: str | None = None
    engine_options: EngineOptions = field(default_factory=EngineOptions)
    tensor_parallel_size: int | None = None
    num_speculative_tokens: int = 3
    max_concurrency: int = 16
    prompts: Path | None = None
    dataset_name: str | None = None
    limit: int | None = None
    categories: tuple[str, ...] = ()
    max_tokens: int = 128
    baseline: bool = False
    against: Path | None = None
    against_source: str = ""
    min_acceptance_length: float | None = None
    min_retention: float | None = None
    min_agreement: float | None = None
    probes: bool = True
    limits: Limits = field(default_factory=Limits)
    log_path: Path | None = None


@dataclass(frozen=True, slots=True)
class Subject:
    """What is tested.

    Attributes:
        draft: its folder.
        draft_source: as the user named it.
        draft_digest: None after --quick.
        draft_config: its config.
        target_source: as the user named it.
        target: its config.
        command: what the user ran, for the report.
    """

    draft: Path
    draft_source: str
    draft_digest: str | None
    draft_config: DraftConfig
    target_source: str
    target: TargetSpec
    command: str | None = None
