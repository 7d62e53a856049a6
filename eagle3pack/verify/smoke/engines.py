"""Choosing an engine and building it, once for the draft and once for each run to compare with."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from eagle3pack.documents import read_json_object
from eagle3pack.draft.config import DraftConfig, parse_draft_config
from eagle3pack.draft.target import TargetSpec
from eagle3pack.errors import UsageError
from eagle3pack.sources import Location, parse_location, resolve_source
from eagle3pack.verify.smoke.installation import find_vllm, visible_gpus
from eagle3pack.verify.smoke.options import SmokeOptions, Subject
from eagle3pack.verify.smoke.protocol import Engine
from eagle3pack.verify.smoke.tensor_parallel import HeadCounts, choose_size
from eagle3pack.verify.smoke.vllm import VllmEndpoint, VllmServer

# Builds the engine for a draft's folder, or without one; the word names its log.
EngineFactory = Callable[[Path | None, str], Engine]


class NotRun(Exception):
    """There is no engine to run, for a reason that is no mistake."""


def engine_factory(options: SmokeOptions, subject: Subject, *, say: Callable[[str], None]) -> EngineFactory:
    """Decide which engine runs the test.

    Raises:
        NotRun: none was asked for, or none can be chosen.
        UsageError: the options contradict each other or the machine.
    """
    if options.engine == "none":
        raise NotRun("--engine none")
    if options.endpoint is not None or options.vllm_command is not None:
        if options.engine == "reference":
            named = "--endpoint" if options.endpoint is not None else "--vllm-command"
            raise UsageError("is for --engine vllm", where=named)
        return _vllm(options, subject, say)
    if options.engine == "vllm":
        return _vllm(options, subject, say)
    if options.engine == "auto" and not has_weights(subject.target_source):
        raise NotRun(
            "the target's weights are not on this machine and no engine was named; "
            "give --engine reference, --engine vllm or --endpoint"
        )
    return _reference(options, subject, say)


def has_weights(target_source: str) -> bool:
    """Whether a target is a local folder with safetensors weights."""
    location = parse_location(target_source)
    folder = Path(location.name)
    return location.place == "local" and folder.is_dir() and any(folder.glob("*.safetensors"))


def served_target(target_source: str, revision: str | None = None) -> Location:
    """The target as vLLM is told: an absolute folder, or a repository.

    Args:
        target_source: as the user named it.
        revision: the commit that was examined, so that the engine runs no other.

    Raises:
        UsageError: a file, which holds no weights.
    """
    location = parse_location(target_source)
    if location.place != "local":
        return replace(location, revision=revision or location.revision)
    path = Path(location.name)
    if path.is_dir():
        return Location("local", str(path.resolve()))
    if path.is_file() or len(path.parts) != 2 or path.parts[0] in (".", ".."):
        raise UsageError("an engine needs the target's weights, not only its config.json", where="--target")
    return Location("hf", location.name, revision)


def _vllm(options: SmokeOptions, subject: Subject, say: Callable[[str], None]) -> EngineFactory:
    if options.endpoint is not None:
        return _endpoint(options, options.endpoint)
    target = served_target(subject.target_source, subject.target.revision)
    installation = find_vllm(options.vllm_command)
    models = [_heads("target", subject.target), _heads("draft", subject.draft_config)]
    if options.against is not None:
        config_path = options.against / "config.json"
        config = parse_draft_config(read_json_object(config_path), where=str(config_path))
        models.append(_heads("other draft", config))
    parallel = choose_size(
        options.tensor_parallel_size,
        tuple(models),
        visible_gpus=None if installation.cpu_build else visible_gpus(),
        cpu_build=bool(installation.cpu_build),
    )
    if parallel.note:
        say(parallel.note)
    log = options.log_path or Path(tempfile.mkdtemp(prefix="eagle3pack-")) / "vllm.log"

    def create(draft: Path | None, role: str) -> Engine:
        return VllmServer(
            installation,
            target,
            draft,
            options.engine_options,
            tensor_parallel_size=parallel.size,
            num_speculative_tokens=options.num_speculative_tokens,
            limits=options.limits,
            log_path=log if role == "draft" else log.with_name(f"{log.stem}.{role}{log.suffix}"),
            say=say,
        )

    return create


def _endpoint(options: SmokeOptions, url: str) -> EngineFactory:
    for value, option in ((options.baseline, "--baseline"), (options.against, "--against")):
        if value:
            raise UsageError(
                "needs a second server, which --endpoint cannot start",
                where=option,
                hint="Use --engine vllm, or verify each server and compare the reports.",
            )
    return lambda draft, role: VllmEndpoint(
        url, tensor_parallel_size=options.tensor_parallel_size, limits=options.limits
    )


def _reference(options: SmokeOptions, subject: Subject, say: Callable[[str], None]) -> EngineFactory:
    from eagle3pack.verify.smoke.reference import ReferenceEngine, SharedTarget

    location = served_target(subject.target_source, subject.target.revision)
    folder = resolve_source(str(location)).folder
    target = SharedTarget(folder, dtype=options.engine_options.dtype, device=options.device)
    return lambda draft, role: ReferenceEngine(target, draft, options.num_speculative_tokens, say=say)


def _heads(name: str, config: TargetSpec | DraftConfig) -> HeadCounts:
    return HeadCounts(name, config.num_attention_heads, config.num_key_value_heads)
