"""vLLM's OpenAI-compatible API, as much of it as a smoke test needs."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

from eagle3pack.engine.counters import Counters
from eagle3pack.engine.endpoint import (
    API_KEY_VARIABLE,
    CONNECT_TIMEOUT_S,
    NO_SERVER_HINT,
    in_brief,
    json_of,
    request_headers,
    trusts_proxies,
)
from eagle3pack.verify.smoke.metrics import from_histogram, parse_metrics
from eagle3pack.verify.smoke.protocol import Completion, Conversation, EngineError, Sampling

if TYPE_CHECKING:
    import httpx


class ApiClient:
    """Talks to one server.

    Args:
        url: of the server, without /v1.
        request_timeout_s: longest that an answer may take.
    """

    def __init__(self, url: str, *, request_timeout_s: float) -> None:
        self.url = url
        self.model = ""
        self.request_timeout_s = request_timeout_s
        self._has_chat_template = True  # until the server says otherwise

    @cached_property
    def _http(self) -> httpx.Client:
        """For single requests; kept, since setting one up takes longer than a request."""
        import httpx

        return httpx.Client(
            headers=request_headers(),
            trust_env=trusts_proxies(self.url),
            limits=httpx.Limits(max_keepalive_connections=0),
        )

    def get(self, path: str, *, timeout_s: float = CONNECT_TIMEOUT_S) -> httpx.Response | None:
        """One GET; None where nothing answers in time."""
        import httpx

        try:
            return self._http.get(self.url + path, timeout=timeout_s)
        except httpx.HTTPError:
            return None

    def models(self) -> list[dict[str, Any]]:
        """What /v1/models lists.

        Raises:
            EngineError: it lists nothing.
        """
        response = self.get("/v1/models")
        if response is None:
            raise EngineError("does not answer", where=self.url, hint="Is the server up, and the URL right?")
        if response.status_code in (401, 403):
            raise EngineError("wants an API key", where=self.url, hint=f"Put it into {API_KEY_VARIABLE}.")
        try:
            models = json_of(response)["data"]
            if models and isinstance(models[0]["id"], str):
                return list(models)
        except (ValueError, KeyError, TypeError):
            pass
        raise EngineError(f"/v1/models answered {in_brief(response)}", where=self.url, hint=NO_SERVER_HINT)

    def read_counters(self) -> Counters | None:
        """The speculative counters; None where the server does not speculate.

        Raises:
            EngineError: /metrics does not answer with metrics.
        """
        response = self.get("/metrics", timeout_s=60)
        if response is None:
            raise EngineError("/metrics does not answer", where=self.url)
        if response.status_code != 200:
            raise EngineError(
                f"/metrics answered {in_brief(response)}",
                where=self.url,
                hint="Give the URL of vLLM itself: a proxy in front of it often hides /metrics.",
            )
        try:
            return parse_metrics(response.text)
        except ValueError as error:
            raise EngineError(f"/metrics is not in the Prometheus format ({error})", where=self.url) from None

    async def converse(
        self,
        conversations: Sequence[Conversation],
        sampling: Sampling,
        *,
        max_concurrency: int,
        on_answers: Callable[[int], None],
    ) -> list[tuple[Completion, ...]]:
        """Hold all conversations, so many at once.

        Raises:
            EngineError: an answer was an error, took too long, or the connection broke.
        """
        import httpx

        slots = asyncio.Semaphore(max_concurrency)
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=max_concurrency)
        # Of connecting too: that the server is there is known, and a busy machine takes its time.
        timeout = httpx.Timeout(self.request_timeout_s)
        async with httpx.AsyncClient(
            base_url=self.url,
            headers=request_headers(),
            timeout=timeout,
            limits=limits,
            trust_env=trusts_proxies(self.url),
        ) as http:

            async def hold(conversation: Conversation) -> tuple[Completion, ...]:
                async with slots:
                    return await self._hold(http, conversation, sampling, on_answers)

            tasks = [asyncio.ensure_future(hold(conversation)) for conversation in conversations]
            try:
                return list(await asyncio.gather(*tasks))
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)

    async def _hold(
        self,
        http: httpx.AsyncClient,
        conversation: Conversation,
        sampling: Sampling,
        on_answers: Callable[[int], None],
    ) -> tuple[Completion, ...]:
        parameters = self._sampling(sampling)
        if conversation.token_ids:
            body: dict[str, Any] = {"prompt": list(conversation.token_ids)}
            completion = await self._request(http, "/v1/completions", body | parameters)
            on_answers(1)
            return (completion,)
        completions: list[Completion] = []
        for number in range(1, len(conversation.turns) + 1):
            answers = [completion.text for completion in completions]
            completion = await self._turn(http, conversation.turns[:number], answers, parameters)
            completions.append(completion)
            on_answers(1)
        return tuple(completions)

    async def _turn(
        self,
        http: httpx.AsyncClient,
        turns: Sequence[str],
        answers: Sequence[str],
        parameters: dict[str, Any],
    ) -> Completion:
        """Ask for the answer to the last turn.

        A target without a chat template is given the texts as they are, one paragraph each, as the
        reference engine does.
        """
        if self._has_chat_template:
            messages = [{"role": "user", "content": turns[0]}]
            for answer, turn in zip(answers, turns[1:], strict=True):
                messages.append({"role": "assistant", "content": answer})
                messages.append({"role": "user", "content": turn})
            try:
                return await self._request(http, "/v1/chat/completions", {"messages": messages} | parameters)
            except EngineError as error:
                if "chat template" not in error.problem:
                    raise
                self._has_chat_template = False
        texts = [text for pair in zip(turns, answers, strict=False) for text in pair]
        body = {"prompt": "\n\n".join([*texts, turns[-1]])}
        return await self._request(http, "/v1/completions", body | parameters)

    def _sampling(self, sampling: Sampling) -> dict[str, Any]:
        parameters: dict[str, Any] = {
            "model": self.model,
            "max_tokens": sampling.max_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "return_token_ids": True,
        }
        if sampling.stop_token_ids:
            parameters["stop_token_ids"] = list(sampling.stop_token_ids)
        if sampling.temperature:
            parameters["seed"] = 0
        return parameters

    async def _request(self, http: httpx.AsyncClient, path: str, body: dict[str, Any]) -> Completion:
        import httpx

        try:
            response = await asyncio.wait_for(http.post(path, json=body), self.request_timeout_s)
        except (httpx.TimeoutException, asyncio.TimeoutError):
            raise EngineError(
                f"{path} gave no answer within {self.request_timeout_s:.0f} s",
                where=self.url,
                hint="The server hangs, or is slow: see its log, or raise --request-timeout.",
            ) from None
        except httpx.HTTPError as error:
            raise EngineError(
                f"the connection broke ({str(error) or type(error).__name__})", where=self.url
            ) from None
        if response.status_code != 200:
            raise EngineError(f"{path} answered {in_brief(response)}", where=self.url)
        try:
            return _completion(json_of(response))
        except (ValueError, KeyError, TypeError, IndexError) as error:
            raise EngineError(
                f"{path} answered something else than a completion ({error!r})", where=self.url
            ) from None


def _completion(answer: dict[str, Any]) -> Completion:
    choice = answer["choices"][0]
    output_tokens = int(answer["usage"]["completion_tokens"])
    text = choice["message"]["content"] if "message" in choice else choice["text"]
    token_ids = choice.get("token_ids")
    prompt_ids = choice.get("prompt_token_ids") or answer.get("prompt_token_ids")
    speculation = (answer.get("metrics") or {}).get("speculative_decoding")
    return Completion(
        text=text or "",
        token_ids=None if token_ids is None else tuple(token_ids),
        prompt_token_ids=None if prompt_ids is None else tuple(prompt_ids),
        output_tokens=output_tokens,
        counters=None
        if speculation is None
        else from_histogram(
            speculation["acceptance_histogram"], speculation["num_draft_tokens"], output_tokens
        ),
    )
