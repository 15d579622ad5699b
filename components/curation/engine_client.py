"""One asynchronous client of a vLLM OpenAI endpoint: retries with jitter, back-off, token ids, token rate."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import httpx
from tenacity import AsyncRetrying, RetryCallState, retry_if_exception_type, stop_after_attempt, wait_random_exponential

from components.contracts import Progress
from components.curation.conversation import Answer
from components.errors import EngineError

MAX_ATTEMPTS = 6
REPORT_INTERVAL_S = 4.0
_BACKOFF = wait_random_exponential(multiplier=0.5, max=20)
_GENERATED = re.compile(r"^vllm:generation_tokens_total(?:\{[^}]*\})? (\S+)$", re.MULTILINE)


class RefusedError(Exception):
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


class EngineClient:
    """Client of one engine. Requests hold their slot while they back off, so a busy engine gets fewer, not more."""

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
            raise EngineError("no engine answers", got=f"{self._url}: {error or type(error).__name__}") from error
        return str(response.json().get("version", "unknown")) if response.status_code == httpx.codes.OK else "unknown"

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
            RefusedError: the engine will not answer this request (4xx).
            EngineError: the engine is gone or fails after all retries.
        """
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
                    return _parse(await self._post(body), temperature=temperature)
        except (_RetryableError, httpx.TransportError) as error:
            raise EngineError(
                f"the engine did not answer in {MAX_ATTEMPTS} attempts",
                got=f"{self._url}: {error or type(error).__name__}",
                fix="See the engine's log. The answers that came are kept; run again to go on.",
            ) from error
        raise AssertionError("unreachable: the loop returns or raises")

    async def _post(self, body: dict[str, Any]) -> dict[str, Any]:
        response = await self._client.post("/v1/chat/completions", json=body)
        if response.status_code == httpx.codes.OK:
            result: dict[str, Any] = response.json()
            return result
        problem = f"HTTP {response.status_code}: {_error_text(response)}"
        if response.status_code == httpx.codes.NOT_FOUND:
            raise EngineError("the engine does not serve that model", got=f"{self._model} at {self._url}: {problem}")
        if response.status_code == httpx.codes.TOO_MANY_REQUESTS or response.status_code >= 500:
            raise _RetryableError(problem, retry_after_s=_retry_after_s(response))
        raise RefusedError(problem)

    @property
    def _client(self) -> httpx.AsyncClient:
        assert self._http is not None, "session() is not open"
        return self._http


def _parse(result: dict[str, Any], *, temperature: float) -> Answer:
    choice = result["choices"][0]
    token_ids = tuple(choice.get("token_ids") or ())
    return Answer(
        text=choice["message"].get("content") or "",
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


async def watch_tokens(client: EngineClient, progress: Progress, *, total: int, num_done: Callable[[], int]) -> None:
    """Report rate and time left every few seconds until cancelled.

    The rate is the engine's own token counter, because with many requests in flight answers finish in waves. The time
    left assumes the conversations still open take as long as those finished; until the first, it is not known.
    """
    started = time.monotonic()
    last_time, last_tokens = started, await client.num_generated_tokens()
    while True:
        await asyncio.sleep(REPORT_INTERVAL_S)
        now, tokens = time.monotonic(), await client.num_generated_tokens()
        rate = (
            "" if tokens is None or last_tokens is None else f"{(tokens - last_tokens) / (now - last_time):.0f} tok/s, "
        )
        done = num_done()
        left = f"about {(now - started) / done * (total - done):.0f} s left" if done else "first answers pending"
        progress(f"regenerate: {rate}{left}", done, total)
        last_time, last_tokens = now, tokens
