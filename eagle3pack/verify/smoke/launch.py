"""The command line and environment that a vLLM server is started with."""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from eagle3pack.errors import UsageError
from eagle3pack.sources import Location
from eagle3pack.verify.smoke.installation import Installation

HOST = "127.0.0.1"
_DRAFT_PREFIX = "speculative-config."
# What --engine-arg may not set, and what does.
_OURS = {
    "model": "--target",
    "host": "eagle3pack itself",
    "port": "eagle3pack itself",
    "served-model-name": "eagle3pack itself",
    "speculative-config": "--engine-arg speculative-config.KEY=VALUE",
    "tensor-parallel-size": "--tensor-parallel-size",
}
_GIB = 2**30


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """What the user wants passed on to the engine; None and false leave its defaults.

    Attributes:
        enforce_eager: no graphs and no compilation.
        max_model_len: longest prompt and completion together.
        dtype: to run in: "auto", "bfloat16", "float16", "float32".
        attention_backend: of target and draft.
        block_size: tokens of a KV page.
        extra: options by name; None for a flag. `speculative-config.KEY` goes to the draft.
    """

    enforce_eager: bool = False
    max_model_len: int | None = None
    dtype: str | None = None
    attention_backend: str | None = None
    block_size: int | None = None
    extra: tuple[tuple[str, str | None], ...] = ()


@dataclass(frozen=True, slots=True)
class Launch:
    """A server to be started.

    Attributes:
        command: words.
        environment: variables that are added to ours.
        notes: what we decided that the user should know.
    """

    command: tuple[str, ...]
    environment: Mapping[str, str]
    notes: tuple[str, ...] = field(default=())


def parse_engine_args(texts: Sequence[str]) -> tuple[tuple[str, str | None], ...]:
    """Read KEY=VALUE, or KEY= for a flag, as --engine-arg takes them.

    Raises:
        UsageError: no key, no equals sign, or a key that eagle3pack sets itself.
    """
    pairs = []
    for text in texts:
        key, equals, value = text.partition("=")
        key = key.strip().lstrip("-").replace("_", "-") if not key.startswith(_DRAFT_PREFIX) else key
        if not key or not equals:
            raise UsageError("must be KEY=VALUE, or KEY= for a flag", where=f"--engine-arg {text}")
        if key in _OURS:
            raise UsageError(f"is set by {_OURS[key]}", where=f"--engine-arg {text}")
        pairs.append((key, value or None))
    return tuple(pairs)


def plan_launch(
    installation: Installation,
    target: Location,
    draft: Path | None,
    options: EngineOptions,
    *,
    tensor_parallel_size: int,
    num_speculative_tokens: int,
    port: int,
    model_name: str,
) -> Launch:
    """Put the command together.

    Args:
        installation: the vLLM to start.
        target: a local folder or a repository that vLLM fetches itself.
        draft: its folder; None for a baseline.
        options: passed on.
        tensor_parallel_size: ranks.
        num_speculative_tokens: k.
        port: on this machine's loopback.
        model_name: what the API calls the target.
    """
    words = [*installation.command, target.name]
    words += ["--host", HOST, "--port", str(port), "--served-model-name", model_name]
    words += ["--tensor-parallel-size", str(tensor_parallel_size)]
    if target.revision:
        words += ["--revision", target.revision]
    for name, value in _options(options):
        words += [f"--{name}"] if value is None else [f"--{name}", value]
    if draft is not None:
        config = speculative_config(draft, num_speculative_tokens, options)
        words += ["--speculative-config", json.dumps(config, separators=(",", ":"))]
        if installation.counts_requests:
            words += ["--per-request-spec-decode-metrics", "summary"]
    environment, notes = _cpu_environment(tensor_parallel_size) if installation.cpu_build else ({}, ())
    if target.place == "ms":
        environment["VLLM_USE_MODELSCOPE"] = "True"
    return Launch(tuple(words), environment, (*installation.notes, *notes))


def speculative_config(draft: Path, num_speculative_tokens: int, options: EngineOptions) -> dict[str, Any]:
    """What vLLM must know of the draft.

    The method is always written: left to itself vLLM guesses it from the path's name and falls back
    to another one (vLLM 0.32 config/speculative.py).
    """
    config: dict[str, Any] = {
        "method": "eagle3",
        "model": str(draft.resolve()),
        "num_speculative_tokens": num_speculative_tokens,
    }
    if options.attention_backend:
        config["attention_backend"] = options.attention_backend
    for key, value in options.extra:
        if key.startswith(_DRAFT_PREFIX):
            config[key.removeprefix(_DRAFT_PREFIX)] = _json_or_text(value)
    return config


def core_lists(cores: Sequence[int], ranks: int) -> str:
    """One list of cores a rank, as VLLM_CPU_OMP_THREADS_BIND wants them: 0-3|4-7, or 0|0|1|1.

    Cores are split evenly in their order; with fewer cores than ranks, neighbours share one.
    """
    if len(cores) < ranks:
        return "|".join(str(cores[rank * len(cores) // ranks]) for rank in range(ranks))
    bounds = [rank * len(cores) // ranks for rank in range(ranks + 1)]
    parts = [cores[start:end] for start, end in itertools.pairwise(bounds)]
    return "|".join(",".join(map(str, part)) for part in parts)


def kv_cache_gib(available_bytes: int, ranks: int) -> int:
    """KV cache of each rank on a CPU: a quarter of the free memory between them, 1 to 4 GiB."""
    return max(1, min(4, available_bytes // (4 * ranks * _GIB)))


def _cpu_environment(ranks: int) -> tuple[dict[str, str], tuple[str, ...]]:
    """What a CPU build needs and the user has not set.

    Without VLLM_CPU_KVCACHE_SPACE it claims 92 % of a memory node and does not start where less is
    free; without core lists it wants one memory node a rank (vLLM 0.32 v1/worker/cpu_worker.py,
    utils/ompmultiprocessing.py).
    """
    chosen: dict[str, str] = {}
    if "VLLM_CPU_KVCACHE_SPACE" not in os.environ:
        chosen["VLLM_CPU_KVCACHE_SPACE"] = str(kv_cache_gib(_available_bytes(), ranks))
    if ranks > 1 and "VLLM_CPU_OMP_THREADS_BIND" not in os.environ:
        chosen["VLLM_CPU_OMP_THREADS_BIND"] = core_lists(sorted(os.sched_getaffinity(0)), ranks)
    if not chosen:
        return chosen, ()
    settings = " ".join(f"{name}={value}" for name, value in chosen.items())
    return chosen, (f"CPU build of vLLM: set {settings} (GiB of KV cache and cores of each rank)",)


def _available_bytes() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return _GIB


def _options(options: EngineOptions) -> list[tuple[str, str | None]]:
    named: list[tuple[str, str | None]] = []
    if options.enforce_eager:
        named.append(("enforce-eager", None))
    for name, value in (
        ("max-model-len", options.max_model_len),
        ("dtype", options.dtype),
        ("attention-backend", options.attention_backend),
        ("block-size", options.block_size),
    ):
        if value is not None:
            named.append((name, str(value)))
    return named + [(key, value) for key, value in options.extra if not key.startswith(_DRAFT_PREFIX)]


def _json_or_text(value: str | None) -> Any:
    if value is None:
        return True
    try:
        return json.loads(value)
    except (json.JSONDecodeError, RecursionError):
        return value
