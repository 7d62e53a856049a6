"""Texts and states from a running vLLM, for targets that fit no single process.

vLLM hands out hidden states through its speculative method `extract_hidden_states` and a connector that
writes a file a request, on a disk that both sides see; the response names it. With include_output_tokens
the file holds the states of prompt and answer but for the last token, which no forward has read.

Sources: vLLM 0.32 v1/spec_decode/extract_hidden_states.py, distributed/kv_transfer/kv_connector/v1/
example_hidden_states_connector.py, entrypoints/openai; speculators 0.9.0 data_generation/vllm_client.py.
"""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from eagle3pack.convert.calibration_sources.feature_files import from_safetensors, states_for
from eagle3pack.convert.calibration_sources.recording import (
    BATCH_SIZE,
    Opened,
    about_prompts,
    replay_recorded,
)
from eagle3pack.convert.calibration_sources.tables import load_draft_alone
from eagle3pack.convert.merging.capture import Recorder
from eagle3pack.draft.config import DraftConfig
from eagle3pack.draft.target import default_aux_layer_ids
from eagle3pack.engine.counters import Counters
from eagle3pack.engine.draft_model import DraftModel
from eagle3pack.engine.endpoint import (
    API_KEY_VARIABLE,
    CONNECT_TIMEOUT_S,
    NO_SERVER_HINT,
    in_brief,
    json_of,
    request_headers,
    server_url,
    trusts_proxies,
)
from eagle3pack.engine.prompts import Prompt, PromptSet, rounds
from eagle3pack.engine.replay import KnownAnswer
from eagle3pack.errors import InputError, PermissionDenied, RefusedError, TransportError, UsageError
from eagle3pack.sources import resolve_target

if TYPE_CHECKING:
    import httpx

REQUEST_TIMEOUT_S = 600.0
FILE_TIMEOUT_S = 60.0  # for the server to finish writing what it has begun
UNSEEN_TIMEOUT_S = 5.0  # after which a file that nobody has begun is on another machine
_POLL_S = 0.05


def open_server(
    url: str,
    draft_folder: Path,
    config: DraftConfig,
    target: str | None,
    target_id: str | None,
    prompts: PromptSet,
) -> Opened:
    """Find out what the server gives, and load the draft.

    Args:
        url: of the server, with or without /v1.
        draft_folder, config: the draft.
        target: as the user gave it: where the draft shares its tables.
        target_id: for the calibration file; without it, the server's name for its model.
        prompts: to answer.

    Raises:
        UsageError: the URL is none, or the server does not give hidden states.
        TransportError, RefusedError, InputError: as `StatesClient`.
    """
    client = StatesClient(server_url(url), config, serve_command(config, target))
    model, engine = client.connect()
    first = prompts.prompts[0]
    ((answer, _),) = asyncio.run(client.ask([(first, [])], 2, lambda count: None))
    draft = load_draft_alone(draft_folder, target, answer.states.dtype)
    about = {
        "target": {"id": target_id or (Path(model).name if Path(model).is_absolute() else model)},
        "prompts": about_prompts(prompts),
        "source": {"kind": "server", "engine": engine},
        "generation": {"dtype": str(draft.norm.weight.dtype).removeprefix("torch.")},
    }
    return Opened(Server(client, draft, prompts.prompts), about)


class Server:
    """The server answers prompts, every turn of them, and the draft replays it; see `recording.Source`."""

    def __init__(self, client: StatesClient, draft: DraftModel, prompts: Sequence[Prompt]) -> None:
        self.draft = draft
        self.answers: Sequence[int] = [prompt.num_answers for prompt in prompts]
        self._client = client
        self._prompts = prompts

    def play(
        self,
        conversations: Sequence[int],
        numbers: Sequence[int],
        max_tokens: int,
        recorder: Recorder,
        on_tokens: Callable[[int], None],
    ) -> Sequence[Counters]:
        """See `recording.Source`; raises what `StatesClient.ask` raises."""
        counters: list[Counters] = []
        for start in range(0, len(numbers), BATCH_SIZE):  # states are large: so many are held at once
            some = slice(start, start + BATCH_SIZE)
            prompts = [self._prompts[i] for i in conversations[some]]
            texts: list[list[str]] = [[] for _ in prompts]
            for turn, going_on in enumerate(rounds([prompt.num_answers for prompt in prompts])):
                asked = [(prompts[i], texts[i]) for i in going_on]
                found = asyncio.run(self._client.ask(asked, max_tokens, on_tokens))
                for i, (_, text) in zip(going_on, found, strict=True):
                    texts[i].append(text)
                answers = [answer.to(self.draft.norm.weight) for answer, _ in found]
                counters += replay_recorded(
                    self.draft, answers, [numbers[some][i] for i in going_on], turn, recorder
                )
        return counters


class StatesClient:
    """Talks to one vLLM that hands out hidden states.

    Args:
        url: its root.
        config: of the draft that will read the states.
        command: what starts such a server, for messages.
    """

    def __init__(self, url: str, config: DraftConfig, command: str) -> None:
        self._url = url
        self._config = config
        self._command = command
        self._model = ""
        self._has_chat_template = True  # until the server says otherwise

    def connect(self) -> tuple[str, str]:
        """What the server calls its model, and what it is itself.

        Raises:
            TransportError: nothing answers.
            RefusedError: it wants a key, or is no such server.
        """
        models, version = asyncio.run(self._look())
        try:
            self._model = json_of(models)["data"][0]["id"]
            said = json_of(version).get("version") if version.status_code == 200 else None
        except (ValueError, KeyError, IndexError, TypeError, AttributeError):
            wants_key = models.status_code in (401, 403)
            raise RefusedError(
                f"/v1/models answered {in_brief(models)}",
                where=self._url,
                hint=f"Put its API key into {API_KEY_VARIABLE}." if wants_key else NO_SERVER_HINT,
            ) from None
        return self._model, f"vllm {said}" if said else "vllm"

    async def _look(self) -> tuple[httpx.Response, httpx.Response]:
        async with self._http(CONNECT_TIMEOUT_S) as http:
            return await self._send(http, "GET", "/v1/models"), await self._send(http, "GET", "/version")

    async def ask(
        self,
        asked: Sequence[tuple[Prompt, Sequence[str]]],
        max_tokens: int,
        on_tokens: Callable[[int], None],
    ) -> list[tuple[KnownAnswer, str]]:
        """Ask for the next answer of each of some conversations, all at once.

        Args:
            asked: prompts, each with the answers to its turns so far.
            max_tokens: of an answer.
            on_tokens: told of the tokens of each answer.

        Returns:
            The answers with their states, and their text.

        Raises:
            UsageError: it gives no hidden states, or writes them where we cannot see.
            TransportError: the connection broke, or an answer or its file took too long.
            RefusedError: it refused a prompt.
            InputError: the states are not those that the draft reads.
        """
        async with self._http() as http:

            async def one(prompt: Prompt, answers: Sequence[str]) -> tuple[KnownAnswer, str]:
                answer, text = await self._ask(http, prompt, answers, max_tokens)
                on_tokens(len(answer.token_ids) - answer.prompt_tokens)
                return answer, text

            tasks = [asyncio.ensure_future(one(*what)) for what in asked]
            try:
                return list(await asyncio.gather(*tasks))
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)

    async def _ask(
        self, http: httpx.AsyncClient, prompt: Prompt, answers: Sequence[str], max_tokens: int
    ) -> tuple[KnownAnswer, str]:
        parameters: dict[str, Any] = {
            "model": self._model,
            "max_tokens": max_tokens,
            "temperature": 0.0,
            "return_token_ids": True,
            "kv_transfer_params": {"include_output_tokens": True},
        }
        response = await self._complete(http, prompt, answers, parameters)
        try:
            given = json_of(response)
            choice = given["choices"][0]
            text = choice["message"]["content"] if "message" in choice else choice["text"]
            prompt_ids = choice.get("prompt_token_ids") or given["prompt_token_ids"]
            token_ids = torch.tensor([*prompt_ids, *choice["token_ids"]])
            named = (given.get("kv_transfer_params") or {}).get("hidden_states_path")
        except (ValueError, KeyError, IndexError, TypeError, AttributeError) as error:
            raise RefusedError(
                f"answered something else than a completion with token ids ({error!r})", where=self._url
            ) from None
        if not isinstance(named, str):
            raise UsageError(
                "the server gives no hidden states",
                where=f"--endpoint {self._url}",
                hint=f"Start it with: {self._command}",
            )
        states = await self._states(Path(named), token_ids)
        return KnownAnswer(token_ids, len(prompt_ids), states), text or ""

    async def _complete(
        self, http: httpx.AsyncClient, prompt: Prompt, answers: Sequence[str], parameters: dict[str, Any]
    ) -> httpx.Response:
        """Ask through the chat template; a target without one is given the texts, a paragraph each."""
        if prompt.token_ids:
            body = {"prompt": list(prompt.token_ids)} | parameters
            return await self._send(http, "POST", "/v1/completions", body)
        turns = prompt.turns[: len(answers) + 1]
        if self._has_chat_template:
            messages = [{"role": "user", "content": turns[0]}]
            for answer, turn in zip(answers, turns[1:], strict=True):
                messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": turn}]
            try:
                return await self._send(
                    http, "POST", "/v1/chat/completions", {"messages": messages} | parameters
                )
            except RefusedError as error:
                if "chat template" not in error.problem:
                    raise
                self._has_chat_template = False
        texts = [text for pair in zip(turns, answers, strict=False) for text in pair]
        body = {"prompt": "\n\n".join([*texts, turns[-1]])} | parameters
        return await self._send(http, "POST", "/v1/completions", body)

    async def _states(self, path: Path, token_ids: Tensor) -> Tensor:
        """Read the file of one answer, and remove it: it is megabytes, and the server leaves it there."""
        await wait_for(path)
        features = from_safetensors(path)
        if not torch.equal(features.token_ids, token_ids[:-1]):
            raise InputError(
                f"holds the states of {len(features.token_ids)} tokens, which are not the "
                f"{len(token_ids) - 1} of prompt and answer",
                where=str(path),
                hint="A vLLM before 0.32 may not know include_output_tokens.",
            )
        states = states_for(features, self._config, where=str(path))
        try:
            path.unlink()
            _lock_of(path).unlink(missing_ok=True)
        except PermissionError:
            raise PermissionDenied(
                "may not be removed, and the server would fill the disk", where=str(path)
            ) from None
        return states

    def _http(self, timeout_s: float = REQUEST_TIMEOUT_S) -> httpx.AsyncClient:
        import httpx

        timeout = httpx.Timeout(timeout_s)
        return httpx.AsyncClient(
            base_url=self._url,
            headers=request_headers(),
            timeout=timeout,
            trust_env=trusts_proxies(self._url),
        )

    async def _send(
        self, http: httpx.AsyncClient, method: str, path: str, body: dict[str, Any] | None = None
    ) -> httpx.Response:
        import httpx

        try:
            response = await http.request(method, path, json=body)
        except httpx.TimeoutException:
            raise TransportError(
                f"{path} gave no answer in time", where=self._url, hint="Is the server up, and the URL right?"
            ) from None
        except httpx.HTTPError as error:
            raise TransportError(
                f"{path} does not answer ({str(error) or type(error).__name__})",
                where=self._url,
                hint="Is the server up, and the URL right?",
            ) from None
        if response.status_code != 200 and body is not None:
            raise RefusedError(f"{path} answered {in_brief(response)}", where=self._url)
        return response


def serve_command(config: DraftConfig, target: str | None) -> str:
    """What starts a vLLM that hands out the states which a draft reads.

    Ids count the layers that a state has passed, as in the draft's config and all of vLLM.

    Args:
        config: of the draft.
        target: as the user gave it.
    """
    ids = config.aux_hidden_state_layer_ids
    if ids is None and target is not None:
        ids = default_aux_layer_ids(resolve_target(target).num_hidden_layers)
    speculation = {
        "method": "extract_hidden_states",
        "num_speculative_tokens": 1,
        "draft_model_config": {
            "hf_config": {"eagle_aux_hidden_state_layer_ids": list(ids or ("2", "L/2", "L-3"))}
        },
    }
    transfer = {
        "kv_connector": "ExampleHiddenStatesConnector",
        "kv_role": "kv_producer",
        "kv_connector_extra_config": {"shared_storage_path": "/dev/shm/hidden_states"},
    }
    return (
        f"vllm serve {target or 'TARGET'} --speculative-config '{json.dumps(speculation)}' "
        f"--kv-transfer-config '{json.dumps(transfer)}'"
    )


async def wait_for(path: Path) -> None:
    """Wait until a file is complete: until then the server holds a lock on one beside it.

    Raises:
        UsageError: there is none.
        TransportError: it is not completed.
    """
    start = time.monotonic()
    while (waited := time.monotonic() - start) < FILE_TIMEOUT_S:
        if _is_free(_lock_of(path)) and path.exists():
            return
        if waited > UNSEEN_TIMEOUT_S and not path.exists() and not _lock_of(path).exists():
            raise UsageError(
                "was written by the server, and is not on this machine",
                where=str(path),
                hint="Run this where the server runs, or give it a shared_storage_path that both see.",
            )
        await asyncio.sleep(_POLL_S)
    raise TransportError(f"was not complete within {FILE_TIMEOUT_S:.0f} s", where=str(path))


def _lock_of(path: Path) -> Path:
    return path.with_name(f"{path.name}.lock")


def _is_free(lock: Path) -> bool:
    """Nobody writes what the lock stands for, as far as is known."""
    try:
        descriptor = os.open(lock, os.O_RDONLY)
    except FileNotFoundError:  # servers may be told to do without
        return True
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    finally:
        os.close(descriptor)
    return True
