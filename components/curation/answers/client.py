"""One asynchronous client of a vLLM OpenAI endpoint: retries with jitter, back-off, token ids,
token rate.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import httpx
from tenacity import (
    AsyncRetrying,
    RetryCallState,
    retry_if_exception_type,
    stop_after_attempt,
    wait_random_exponential,
)

from components.contracts import Progress
from components.curation.conversation import Answer
from components.errors import EngineError

MAX_ATTEMPTS = 6
REPORT_INTERVAL_S = 4.0
_BACKOFF = wait_random_exponential(multiplier=0.5, max=20)
_GENERATED = re.compile(r"^vllm:generation_tokens_total(?:\{[^}]*\})? (\S+)$", re.MULTILINE)


class AnswerRefusedError(Exception):
    """The engine refused one request for its content (HTTP 4xx). Never leaves this component."""


class _RetryableError(Exception):
    def __init__(self, problem: str, *, retry_after_s: float | None = None) -> None:
        super().__init__(problem)
        self.retry_after_s = retry_after_s


def _wait_s(state: RetryCallState) -> float:
    """Exponential back-off with full jitter, never sooner than the engine's own Retry-After."""
    error = state.outcome.exception() if state.outcome else None
    asked = error.retry_after_s if isinstance(error, _RetryableError) else None
    return max(_BACKOFF(state), asked or 0.0)


class AnswerClient:
    """Client of one engine. Requests hold their slot while they back off, so a busy engine gets
    fewer, not more.
    """

    def __init__(self, engine_url: str, model: str, *, timeout_s: float) -> None:
        self._url = engine_url.rstrip("/")
        self._model = model
        self._timeout_s = timeout_s
        self._http: httpx.AsyncClient | None = None

    @asynccontextmanager
    async def session(self, limits: httpx.Limits) -> AsyncIterator[None]:
        """Open the connections; everything else needs them."""
        timeout = httpx.Timeout(self._timeout_s, connect=10.0, pool=None)
        async with httpx.AsyncClient(base_url=self._url, timeout=timeout, limits=limits) as http:
            self._http = http
            try:
                yield
            finally:
                self._http = None

    async def version(self) -> str:
        """Version of the engine, 'unknown' where the endpoint does not tell.

        Raises:
            EngineError: nothing answers at the URL.
        """
        try:
            response = await self._client.get("/version")
        except httpx.TransportError as error:
            raise EngineError(
                "no engine answers", got=f"{self._url}: {error or type(error).__name__}"
            ) from error
        return (
            str(response.json().get("version", "unknown"))
            if response.status_code == httpx.codes.OK
            else "unknown"
        )

    async def num_generated_tokens(self) -> float | None:
        """The engine's own count of generated tokens so far; None where it has no such metric."""
        try:
            response = await self._client.get("/metrics")
        except httpx.TransportError:
            return None  # the requests themselves notice an engine that is gone
        values = _GENERATED.findall(response.text) if response.status_code == httpx.codes.OK else []
        return sum(map(float, values)) if values else None

    async def complete(self, request: dict[str, Any], *, temperature: float) -> Answer:
        """One answer.

        Raises:
            AnswerRefusedError: the engine will not answer this request (4xx).
            EngineError: the engine is gone or fails after all retries.
        """
        return _parse(await self._ask("/v1/chat/completions", request), temperature=temperature)

    async def continue_text(self, request: dict[str, Any], *, temperature: float) -> Answer:
        """What the target writes after a bare prompt, no template around it.

        Raises:
            As `complete`.
        """
        return _parse(await self._ask("/v1/completions", request), temperature=temperature)

    async def _ask(self, path: str, request: dict[str, Any]) -> dict[str, Any]:
        body = {"model": self._model, "return_token_ids": True, **request}
        retrying = AsyncRetrying(
            retry=retry_if_exception_type((_RetryableError, httpx.TransportError)),
            stop=stop_after_attempt(MAX_ATTEMPTS),
            wait=_wait_s,
            reraise=True,
        )

        try:
            async for attempt in retrying:
                with attempt:
                    return await self._post(path, body)
        except (_RetryableError, httpx.TransportError) as error:
            raise EngineError(
                f"the engine did not answer in {MAX_ATTEMPTS} attempts",
                got=f"{self._url}: {error or type(error).__name__}",
                fix="See the engine's log. The answers that came are kept; run again to go on.",
            ) from error

        raise AssertionError("unreachable: the loop returns or raises")

    async def _post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        response = await self._client.post(path, json=body)
        if response.status_code == httpx.codes.OK:
            result: dict[str, Any] = response.json()
            return result

        problem = f"HTTP {response.status_code}: {_error_text(response)}"
        if response.status_code == httpx.codes.NOT_FOUND:
            raise EngineError(
                "the engine does not serve that model",
                got=f"{self._model} at {self._url}: {problem}",
            )
        if response.status_code == httpx.codes.TOO_MANY_REQUESTS or response.status_code >= 500:
            raise _RetryableError(problem, retry_after_s=_retry_after_s(response))

        raise AnswerRefusedError(problem)

    @property
    def _client(self) -> httpx.AsyncClient:
        assert self._http is not None, "session() is not open"
        return self._http


def _parse(result: dict[str, Any], *, temperature: float) -> Answer:
    choice = result["choices"][0]
    token_ids = tuple(choice.get("token_ids") or ())
    text = choice["message"].get("content") if "message" in choice else choice["text"]
    return Answer(
        text=text or "",
        token_ids=token_ids,
        prompt_token_ids=tuple(result.get("prompt_token_ids") or ()) if token_ids else (),
        num_tokens=int(result["usage"]["completion_tokens"]),
        truncated=choice["finish_reason"] == "length",
        temperature=temperature,
    )


def _error_text(response: httpx.Response) -> str:
    try:
        body = response.json()
        text = str(body.get("error", body).get("message", body))
    except (ValueError, AttributeError):
        text = response.text
    # Numbers out, so that refusals of one kind are counted as one reason.
    return re.sub(r"\d+", "N", text)[:120]


def _retry_after_s(response: httpx.Response) -> float | None:
    try:
        return float(response.headers["retry-after"])
    except (KeyError, ValueError):
        return None


@dataclass
class Tally:
    """What a run has done so far; shared with its reporter."""

    num_conversations: int
    prior_tokens: float
    """Guess of the answer tokens of one conversation, before any has finished."""
    num_prior: int
    """Weight of that guess, in conversations: as many as are in flight. Short answers finish first
    and mislead.
    """
    num_done: int = 0
    num_tokens: int = 0
    """Answer tokens of finished requests."""

    @property
    def expected_tokens(self) -> float:
        """Estimate of the answer tokens of the whole run."""
        seen = self.num_tokens + self.num_prior * self.prior_tokens
        weight = self.num_done + self.num_prior
        return self.num_conversations * seen / weight


async def watch_tokens(client: AnswerClient, progress: Progress, tally: Tally) -> None:
    """Report rate and time left every few seconds until cancelled.

    Tokens come from the engine's own counter where it has one, because with many requests in flight
    answers finish in waves; else from the finished answers.
    """
    first = await client.num_generated_tokens()
    started = last_time = time.monotonic()
    last_tokens = 0.0
    while True:
        await asyncio.sleep(REPORT_INTERVAL_S)
        counter = await client.num_generated_tokens() if first is not None else None
        tokens = float(tally.num_tokens) if counter is None or first is None else counter - first
        now = time.monotonic()
        rate = max(0.0, tokens - last_tokens) / (now - last_time)
        left_s = (
            max(0.0, tally.expected_tokens - tokens) * (now - started) / tokens
            if tokens > 0
            else None
        )
        left = "first tokens pending" if left_s is None else f"about {left_s:.0f} s left"
        progress(f"{rate:.0f} tok/s, {left}", tally.num_done, tally.num_conversations)
        last_time, last_tokens = now, tokens
