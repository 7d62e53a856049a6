"""Whether what was asked of a smoke test can be done at all: told before anything is read or run."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from eagle3pack.checkpoint.files import open_checkpoint
from eagle3pack.documents import read_json_object
from eagle3pack.draft.config import parse_draft_config
from eagle3pack.errors import UsageError

_GATES = ("min_acceptance_length", "min_retention", "min_agreement")
_RUNS = (*_GATES, "baseline", "against")
_SERVERS = ("endpoint", "vllm_command")
_NEEDS = {"min_retention": "against", "min_agreement": "baseline"}
# What is put into the command line of a vLLM that is started, and read by nothing else.
_STARTED_VLLM = ("engine_args", "enforce_eager", "block_size", "attention_backend", "max_model_len")
_SPELLED = {"engine_args": "--engine-arg"}


def engine_named(given: Mapping[str, Any]) -> bool:
    """Whether the options name an engine, so that --quick runs it too."""
    return given["engine"] in ("reference", "vllm") or any(given[name] for name in _SERVERS)


def runs_vllm(given: Mapping[str, Any]) -> bool:
    """Whether it is vLLM that runs, if anything does."""
    return given["engine"] == "vllm" or (given["engine"] == "auto" and engine_named(given))


def asked_runs(given: Mapping[str, Any]) -> list[str]:
    """Gates and comparisons that were asked for, as on the command line; left out, they have failed."""
    return [
        _option(name) if given[name] is True else f"{_option(name)} {given[name]}"
        for name in _RUNS
        if _is_set(given[name])
    ]


def ignored_options(given: Mapping[str, Any]) -> list[str]:
    """Options that were given and that nothing reads, where that is no mistake worth stopping at."""
    names = ("device",) if runs_vllm(given) else (*_STARTED_VLLM, "engine_log")
    return [_option(name) for name in names if _is_set(given[name])]


def require_possible(given: Mapping[str, Any], *, quick: bool, target: str | None) -> None:
    """Raise for the first thing that was asked for and cannot be had, whatever the draft is like.

    Args:
        given: the values of the smoke test's options, by name.
        quick: --quick.
        target: --target.

    Raises:
        UsageError: see each rule.
    """
    for name, needed in _NEEDS.items():
        if _is_set(given[name]) and not given[needed]:
            raise UsageError(f"needs --{needed}", where=_option(name))
    asked = [_option(name) for name in (*_SERVERS, *_RUNS) if _is_set(given[name])]
    if asked and given["engine"] == "none":
        raise UsageError("needs an engine, and --engine none runs none", where=asked[0])
    if asked and quick and not engine_named(given):
        raise UsageError(
            "needs an engine, and --quick runs none that is not named",
            where=asked[0],
            hint="Leave --quick out, or name one with --engine.",
        )
    if not target and (asked or engine_named(given)):
        raise UsageError("needs --target", where=asked[0] if asked else f"--engine {given['engine']}")
    _require_one_engine(given)
    if runs_vllm(given) and given["endpoint"]:
        _require_url(given["endpoint"])
    elif target and engine_named(given):
        _require_engine(given, target)


def require_draft(folder: Path) -> None:
    """Raise where the folder of --against holds no draft; its weights are not read.

    Raises:
        InputError: config.json or the weights are missing or broken.
    """
    config = folder / "config.json"
    parse_draft_config(read_json_object(config), where=str(config))
    open_checkpoint(folder)


def _require_one_engine(given: Mapping[str, Any]) -> None:
    if given["endpoint"] and given["vllm_command"]:
        raise UsageError("starts a server, --endpoint names one that runs", where="--vllm-command")
    foreign: tuple[str, ...]
    if given["engine"] == "reference":
        foreign, reason = (*_SERVERS, *_STARTED_VLLM), "is for --engine vllm, not --engine reference"
    elif given["endpoint"]:
        foreign, reason = _STARTED_VLLM, "has no effect on a server that runs already (--endpoint)"
    else:
        return
    for name in foreign:
        if _is_set(given[name]):
            raise UsageError(reason, where=_option(name))
    for name in ("baseline", "against") if given["endpoint"] else ():
        if given[name]:
            raise UsageError(
                "needs a second server, which --endpoint cannot start",
                where=_option(name),
                hint="Use --engine vllm, or verify each server and compare the reports.",
            )


def _require_url(url: str) -> None:
    try:
        parts = urlsplit(url)
        sound = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port or 1) > 0
    except ValueError:  # a port that is no number
        sound = False
    if not sound:
        raise UsageError(
            "is no URL of a server", where=f"--endpoint {url}", hint="For example http://host:8000."
        )


def _require_engine(given: Mapping[str, Any], target: str) -> None:
    from eagle3pack.verify.smoke.engines import served_target

    if os.path.lexists(target):  # what is not there, `resolve_target` tells better
        location = served_target(target)
        if given["engine"] == "reference" and not any(Path(location.name).glob("*.safetensors")):
            raise UsageError(
                "holds no safetensors weights, which an engine needs", where=f"--target {target}"
            )
    if given["engine"] == "reference":
        return
    from eagle3pack.verify.smoke.installation import find_program

    find_program(given["vllm_command"])


def _is_set(value: Any) -> bool:
    return value is not None and value is not False and value != () and value != ""


def _option(name: str) -> str:
    return _SPELLED.get(name, f"--{name.replace('_', '-')}")
