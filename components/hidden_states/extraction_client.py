"""Asynchronous prefill requests to the extraction engines, on an event loop of their own thread."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine, Sequence
from concurrent.futures import Future
from types import TracebackType
from typing import Any, Self, TypeVar

import httpx
import numpy as np

from components.errors import EngineError
from components.hidden_states.checks import FaultyStatesError

_ResultT = TypeVar("_ResultT")


class EngineAwayError(EngineError):
    """Nothing answers at the engine's address, or it hung up: it died, or starts again."""


class ExtractionClient:
    """Sends prompts as token ids and asks for one greedy token; the states themselves travel
    through the store.

    Args:
        engine_urls: base URLs without /v1; samples go round them by index.
        timeout_s: of one request.
    """

    def __init__(
        self, engine_urls: Sequence[str], *, model: str, timeout_s: float, num_connections: int
    ) -> None:
        self._urls = [url.rstrip("/") for url in engine_urls]
        self._model = model
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._is_closed = False
        self._loop = asyncio.new_event_loop()
        self._http = httpx.AsyncClient(
            timeout=httpx.Timeout(timeout_s, connect=5.0),
            limits=httpx.Limits(
                max_connections=num_connections, max_keepalive_connections=num_connections
            ),
            trust_env=False,  # a proxy of the environment has no business between us and the engine
        )

        self._thread = threading.Thread(
            target=self._loop.run_forever, name="hidden-states-requests", daemon=True
        )
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def request(self, *, index: int, name: str, token_ids: np.ndarray) -> Future[int]:
        """Start one request; the future gives the target's greedy next token after the last
        position.

        The future raises EngineAwayError (not reachable), EngineError (broken, timed out) or
        FaultyStatesError (refused this sample).
        """
        url = self._urls[index % len(self._urls)]
        return self._submit(self._extract(url, name=name, token_ids=token_ids))

    def check_engines(self) -> None:
        """Ask each engine whether it serves the model.

        Raises:
            EngineError: one does not answer, or serves something else.
        """
        for url in self._urls:
            self._submit(self._check_engine(url)).result()

    def close(self) -> None:
        """Cancel what is in flight (vLLM aborts a request whose client is gone) and end the
        thread.
        """
        with self._lock:
            if self._is_closed:
                return
            ending = asyncio.run_coroutine_threadsafe(self._shut_down(), self._loop)
            self._is_closed = True
        try:
            ending.result(timeout=10)
        finally:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(timeout=10)

    def _submit(self, coroutine: Coroutine[Any, Any, _ResultT]) -> Future[_ResultT]:
        """Run a coroutine on the loop; after `close` it is not run, and its future is cancelled."""
        with self._lock:
            if not self._is_closed:
                return asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        coroutine.close()
        cancelled: Future[_ResultT] = Future()
        cancelled.cancel()
        return cancelled

    async def _extract(self, url: str, *, name: str, token_ids: np.ndarray) -> int:
        body = {
            "model": self._model,
            "prompt": token_ids.tolist(),
            "max_tokens": 1,
            "temperature": 0.0,
            "return_token_ids": True,
            "kv_transfer_params": {"hidden_states_key": name},
        }

        try:
            async with asyncio.timeout(self._timeout_s):
                response = await self._http.post(f"{url}/v1/completions", json=body)
        except (httpx.TimeoutException, TimeoutError):
            raise EngineError(
                "the extraction engine did not answer in time",
                got=url,
                expected=f"{self._timeout_s} s",
            ) from None
        except httpx.HTTPError as error:
            raise EngineAwayError(
                "the extraction engine is not reachable", got=f"{url}: {error!r}"
            ) from None

        return _next_token(response, url)

    async def _check_engine(self, url: str) -> None:
        try:
            response = await self._http.get(f"{url}/v1/models", timeout=10)
            models = [model["id"] for model in response.raise_for_status().json()["data"]]
        except (httpx.HTTPError, KeyError, ValueError) as error:
            raise EngineError(
                "the extraction engine is not reachable", got=f"{url}: {error!r}"
            ) from None
        if self._model not in models:
            raise EngineError(
                "the extraction engine serves another model", got=models, expected=self._model
            )

    async def _shut_down(self) -> None:
        tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._http.aclose()


def _next_token(response: httpx.Response, url: str) -> int:
    """The generated token; a refusal of this sample (4xx) is the sample's fault, everything else
    the engine's.
    """
    if response.is_client_error:
        raise FaultyStatesError("refused", "the engine refused a sample", got=response.text[:300])
    if response.is_error:
        raise EngineError(
            "the extraction engine failed",
            got=f"{url}: {response.status_code} {response.text[:300]}",
        )

    answer = response.json()
    transfer = answer.get("kv_transfer_params")
    if not transfer or "handle" not in transfer:
        raise EngineError(
            "the engine stored no hidden states",
            got=transfer,
            expected="kv_transfer_params with a handle",
            fix="Start it with the arguments of extraction_args().",
        )

    return int(answer["choices"][0]["token_ids"][0])
