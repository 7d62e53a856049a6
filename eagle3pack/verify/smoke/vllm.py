"""vLLM as an engine: a server that we start and end, or one that runs already."""

from __future__ import annotations

import asyncio
import os
import re
import secrets
import socket
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from eagle3pack.engine.counters import Counters
from eagle3pack.engine.endpoint import json_of, server_url
from eagle3pack.sources import Location
from eagle3pack.verify.smoke.client import ApiClient
from eagle3pack.verify.smoke.explain import last_progress, log_error
from eagle3pack.verify.smoke.installation import Installation
from eagle3pack.verify.smoke.launch import HOST, EngineOptions, Launch, plan_launch
from eagle3pack.verify.smoke.process import GuardedProcess
from eagle3pack.verify.smoke.protocol import (
    Completion,
    Conversation,
    EngineError,
    EngineFacts,
    Sampling,
)

Result = TypeVar("Result")

_POLL_S = 0.25
_PROGRESS_EVERY_S = 15.0
_DYING_S = 1.0
_PORT_ATTEMPTS = 3  # another process may take the port between our choice and vLLM's bind


@dataclass(frozen=True, slots=True)
class Limits:
    """How long we wait, in seconds: for a server to come up, and for one answer."""

    start_s: float = 1800.0
    request_s: float = 600.0


class VllmEndpoint:
    """A server that runs already.

    Args:
        url: http(s)://HOST:PORT, with or without /v1.
        tensor_parallel_size: as the user states it.
        speculates: it has a draft.
    """

    def __init__(self, url: str, *, tensor_parallel_size: int | None, limits: Limits) -> None:
        self._client = ApiClient(server_url(url), request_timeout_s=limits.request_s)
        self._tensor_parallel_size = tensor_parallel_size

    def start(self) -> EngineFacts:
        """Ask the server what it is."""
        model = self._client.models()[0]
        self._client.model = model["id"]
        counters = self._client.read_counters()
        return EngineFacts(
            name="vllm",
            version=_version(self._client),
            runner=None,
            backend=None,
            device=None,
            tensor_parallel_size=self._tensor_parallel_size,
            tp_source=None if self._tensor_parallel_size is None else "declared",
            num_speculative_tokens=len(counters.accepted_per_position) if counters else 0,
            max_model_len=model.get("max_model_len"),
            enforce_eager=None,
            dtype=None,
            command=(),
            notes=("which draft the server at --endpoint runs is taken on trust",),
        )

    def generate(
        self,
        conversations: Sequence[Conversation],
        sampling: Sampling,
        *,
        max_concurrency: int,
        on_answers: Callable[[int], None] = lambda count: None,
    ) -> list[tuple[Completion, ...]]:
        """Answer every turn of every conversation; see `protocol.Engine`."""
        return asyncio.run(
            self._client.converse(
                conversations, sampling, max_concurrency=max_concurrency, on_answers=on_answers
            )
        )

    def read_counters(self) -> Counters | None:
        """What the server counted since it came up, whoever asked it."""
        return self._client.read_counters()

    def stop(self) -> None:
        """Nothing: the server is not ours."""


class VllmServer:
    """A server that lives as long as this object: use it as a context manager, or call `stop`.

    Args:
        installation: the vLLM to start.
        target: what it serves.
        draft: the draft's folder; None for a baseline.
        options: passed on to it.
        tensor_parallel_size: ranks.
        num_speculative_tokens: k.
        limits: how long to wait.
        log_path: where its output goes.
        say: told how loading goes on.
    """

    def __init__(
        self,
        installation: Installation,
        target: Location,
        draft: Path | None,
        options: EngineOptions,
        *,
        tensor_parallel_size: int,
        num_speculative_tokens: int,
        limits: Limits,
        log_path: Path,
        say: Callable[[str], None] = lambda text: None,
    ) -> None:
        self._installation = installation
        self._target = target
        self._draft = draft
        self._options = options
        self._tensor_parallel_size = tensor_parallel_size
        self._num_speculative_tokens = num_speculative_tokens if draft is not None else 0
        self._limits = limits
        self.log_path = log_path
        self._say = say
        self._process: GuardedProcess | None = None
        self._client = ApiClient("", request_timeout_s=limits.request_s)

    def start(self) -> EngineFacts:
        """Start the server and wait until it serves; see `protocol.Engine`."""
        try:
            launch = self._launch()
            model = self._client.models()[0]
            return self._facts(launch, model)
        except BaseException:
            self.stop()
            raise

    def generate(
        self,
        conversations: Sequence[Conversation],
        sampling: Sampling,
        *,
        max_concurrency: int,
        on_answers: Callable[[int], None] = lambda count: None,
    ) -> list[tuple[Completion, ...]]:
        """Answer every turn of every conversation; see `protocol.Engine`."""
        work = self._client.converse(
            conversations, sampling, max_concurrency=max_concurrency, on_answers=on_answers
        )
        try:
            return asyncio.run(self._while_alive(work))
        except EngineError as error:
            raise self._with_log(error) from None

    def read_counters(self) -> Counters | None:
        """What the server counted since it came up."""
        try:
            return self._client.read_counters()
        except EngineError as error:
            raise self._with_log(error) from None

    def stop(self) -> None:
        """End the server and its workers."""
        if self._process is not None:
            self._process.stop()

    @property
    def _running(self) -> GuardedProcess:
        if self._process is None:
            raise RuntimeError("the server was not started")
        return self._process

    def _launch(self) -> Launch:
        """Start it on a free port, again on another one if that was taken meanwhile."""
        for attempt in range(1, _PORT_ATTEMPTS + 1):
            port = _free_port()
            self._client.url = f"http://{HOST}:{port}"
            self._client.model = f"eagle3pack-{secrets.token_hex(4)}"
            launch = plan_launch(
                self._installation,
                self._target,
                self._draft,
                self._options,
                tensor_parallel_size=self._tensor_parallel_size,
                num_speculative_tokens=self._num_speculative_tokens,
                port=port,
                model_name=self._client.model,
            )
            self._process = GuardedProcess(
                launch.command, self.log_path, {**os.environ, **launch.environment}
            )
            try:
                self._wait_until_healthy()
                return launch
            except EngineError:
                taken = "address already in use" in self._process.log_text().lower()
                if not taken or attempt == _PORT_ATTEMPTS:
                    raise
                self._process.stop()
                self._say(f"port {port} was taken meanwhile; trying another")
        raise AssertionError("unreachable")

    def _wait_until_healthy(self) -> None:
        process = self._running
        start = time.monotonic()
        next_word = start + _PROGRESS_EVERY_S
        while (now := time.monotonic()) - start < self._limits.start_s:
            if process.exit_code is not None:
                raise log_error(
                    f"ended with exit code {process.exit_code} while loading",
                    process.log_text(),
                    self.log_path,
                )
            if self._serves():
                return
            if now >= next_word:
                self._say(f"vLLM is loading, {now - start:.0f} s: {last_progress(process.log_text())}")
                next_word += _PROGRESS_EVERY_S
            time.sleep(_POLL_S)
        raise log_error(
            f"was not ready within {self._limits.start_s:.0f} s (--start-timeout)",
            process.log_text(),
            self.log_path,
        )

    def _serves(self) -> bool:
        """It is healthy, and it is ours that answers: its model has the name that we gave it."""
        health = self._client.get("/health")
        if health is None or health.status_code != 200:
            return False
        models = self._client.get("/v1/models")
        return models is not None and self._client.model in models.text

    async def _while_alive(self, work: Coroutine[Any, Any, Result]) -> Result:
        """Do the work, but notice at once when the server dies: a broken worker may leave sockets open."""
        task = asyncio.ensure_future(work)
        try:
            while not task.done():
                await asyncio.wait({task}, timeout=_POLL_S)
                if self._running.exit_code is not None and not task.done():
                    raise EngineError("the server died", where="vllm")
            return task.result()
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    def _with_log(self, error: EngineError) -> EngineError:
        """The error with the server's own reason for it, if it died; else with the place of the log."""
        process = self._running
        deadline = time.monotonic() + _DYING_S  # a dying server closes its sockets before it ends
        while process.exit_code is None and time.monotonic() < deadline:
            time.sleep(_POLL_S)
        if process.exit_code is not None:
            return log_error(
                f"died while serving, exit code {process.exit_code}", process.log_text(), self.log_path
            )
        return EngineError(
            error.problem, where="vllm", hint=f"{error.hint} Its log is {self.log_path}.".strip()
        )

    def _facts(self, launch: Launch, model: dict[str, Any]) -> EngineFacts:
        log = self._running.log_text()
        cpu_build = self._installation.cpu_build
        return EngineFacts(
            name="vllm",
            version=_version(self._client) or self._installation.version,
            runner=_runner(log),
            backend=_backend(log) or ("CPU_ATTN" if cpu_build else None),
            device="cpu" if cpu_build else _device(log),
            tensor_parallel_size=self._tensor_parallel_size,
            tp_source="measured",
            num_speculative_tokens=self._num_speculative_tokens,
            max_model_len=model.get("max_model_len"),
            enforce_eager=self._options.enforce_eager,
            dtype=_dtype(log),
            command=launch.command,
            notes=launch.notes,
        )


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        port: int = probe.getsockname()[1]
        return port


def _version(client: ApiClient) -> str | None:
    response = client.get("/version")
    try:
        version = json_of(response)["version"] if response is not None else None
    except (ValueError, KeyError, TypeError):
        return None
    return version if isinstance(version, str) else None


def _runner(log: str) -> str | None:
    """V1 or V2, as far as the log tells (vLLM 0.32 config/vllm.py)."""
    if "using the V1 model runner" in log:
        return "V1"
    return "V2" if "Using V2 Model Runner" in log else None


def _backend(log: str) -> str | None:
    match = re.search(r"Using (?:AttentionBackendEnum\.)?(\w+) (?:attention )?backend", log)
    return match[1] if match else None


def _device(log: str) -> str | None:
    match = re.search(r"device_config=(\w+)", log)
    return match[1] if match else None


def _dtype(log: str) -> str | None:
    match = re.search(r"dtype=torch\.(\w+)", log)
    return match[1] if match else None
