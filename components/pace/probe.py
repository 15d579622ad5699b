"""How fast an engine answers and reads on this machine, watched for seconds.

Rates are slopes of the engine's own counter of generated tokens between its first growth, when all
first requests have been read, and the end of the watch: prompts being read, and answers that end
early, do not blur them.
"""

from __future__ import annotations

import asyncio
import itertools
import re
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import httpx

from components.errors import EngineError

T = TypeVar("T")

POLL_S = 0.25
PATIENCE = 4.0
"""How many times the watch's own length the first tokens may take; an engine that slow still gets a
figure.
"""
ANSWER_TOKENS = 64
READ_PROMPTS, READ_TOKENS = 8, 192
"""Prompts of other tokens each, so that none is found in the prefix cache."""
_GENERATED = re.compile(r"^vllm:generation_tokens_total(?:\{[^}]*\})? (\S+)$", re.MULTILINE)


@dataclass(frozen=True)
class Counted:
    """The engine's counter at one moment."""

    at_s: float
    num_tokens: float


def slope(samples: Sequence[Counted]) -> float | None:
    """Tokens per second from the first growth of the counter to its last; None while it has not
    grown twice.

    Args:
        samples: in order of time; the first is from before the work.
    """
    grown = [new for old, new in itertools.pairwise(samples) if new.num_tokens > old.num_tokens]
    if len(grown) < 2:
        return None
    first, last = grown[0], grown[-1]
    return (last.num_tokens - first.num_tokens) / (last.at_s - first.at_s)


class EngineProbe:
    """Measures one engine.

    Args:
        engine_url: base URL, without `/v1`.
        model: served model name.
        vocab_size: token ids below this are sent as prompts.
        timeout_s: of one request.
        transport: for tests; None uses the network.
    """

    def __init__(
        self,
        engine_url: str,
        model: str,
        *,
        vocab_size: int,
        timeout_s: float,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        self._url = engine_url.rstrip("/")
        self._model = model
        self._vocab_size = vocab_size
        self._timeout_s = timeout_s
        self._transport = transport
        # Other prompts in each probe.
        self._numbers = itertools.count(int(time.time()) % 1000 * 1000)

    def warm_up(self) -> None:
        """The first answer of an engine, which takes longer than any later one.

        Raises:
            EngineError: as `answer_rate`.
        """
        asyncio.run(self._with_client(lambda http: self._ask(http, num_prompt=8, num_answer=2)))

    def answer_rate(self, in_flight: int, *, seconds: float) -> float:
        """Answer tokens per second with that many requests in flight; what they answer is thrown
        away.

        Raises:
            EngineError: the engine does not answer, or has no counter of generated tokens.
        """
        return asyncio.run(
            self._with_client(lambda http: self._answer_rate(http, in_flight, seconds))
        )

    def watch(self, *, seconds: float) -> float | None:
        """Answer tokens per second of whatever the engine is asked by others meanwhile; None where
        that was nothing.

        Raises:
            EngineError: as `answer_rate`.
        """
        return asyncio.run(self._with_client(lambda http: self._slope_within(http, seconds)))

    def reading_rate(self) -> float:
        """Tokens of prompts read per second.

        Raises:
            EngineError: as `answer_rate`.
        """
        return asyncio.run(self._with_client(self._reading_rate))

    async def _with_client(self, work: Callable[[httpx.AsyncClient], Coroutine[Any, Any, T]]) -> T:
        timeout = httpx.Timeout(self._timeout_s, connect=10.0, pool=None)
        limits = httpx.Limits(max_connections=None)
        try:
            async with httpx.AsyncClient(
                base_url=self._url, timeout=timeout, limits=limits, transport=self._transport
            ) as http:
                return await work(http)
        except httpx.HTTPError as error:
            raise EngineError(
                "the engine could not be probed",
                got=f"{self._url}: {error or type(error).__name__}",
            ) from error

    async def _answer_rate(self, http: httpx.AsyncClient, in_flight: int, seconds: float) -> float:
        async def lane() -> None:
            while True:
                await self._ask(http, num_prompt=16, num_answer=ANSWER_TOKENS)

        lanes = [asyncio.create_task(lane()) for _ in range(in_flight)]
        watch = asyncio.create_task(self._slope_within(http, seconds))
        try:
            done, _ = await asyncio.wait([watch, *lanes], return_when=asyncio.FIRST_COMPLETED)
            for task in done - {watch}:
                task.result()  # lanes end by an error only
            rate = await watch
        finally:
            for task in (watch, *lanes):
                task.cancel()
            await asyncio.gather(watch, *lanes, return_exceptions=True)
        if rate is None:
            raise EngineError(
                "the engine gave no second token in the probe",
                got=f"{PATIENCE * seconds:.0f} s",
                expected="tokens",
            )
        return rate

    async def _slope_within(self, http: httpx.AsyncClient, seconds: float) -> float | None:
        """The slope over `seconds` from the first growth; later where the counter grew only once
        until then.
        """
        samples = [await self._count(http)]
        started_s = samples[0].at_s
        grown_s = float("inf")
        while True:
            await asyncio.sleep(POLL_S)
            samples.append(await self._count(http))
            if samples[-1].num_tokens > samples[0].num_tokens:
                grown_s = min(grown_s, samples[-1].at_s)
            now_s = samples[-1].at_s
            rate = slope(samples)
            if (
                rate is not None and now_s >= grown_s + seconds
            ) or now_s >= started_s + PATIENCE * seconds:
                return rate

    async def _reading_rate(self, http: httpx.AsyncClient) -> float:
        started_s = time.monotonic()
        asked = (self._ask(http, num_prompt=READ_TOKENS, num_answer=1) for _ in range(READ_PROMPTS))
        await asyncio.gather(*asked)
        return READ_PROMPTS * READ_TOKENS / (time.monotonic() - started_s)

    async def _count(self, http: httpx.AsyncClient) -> Counted:
        response = await http.get("/metrics")
        response.raise_for_status()
        values = [float(value) for value in _GENERATED.findall(response.text)]
        if not values:
            raise EngineError(
                "the engine does not count generated tokens", got=f"{self._url}/metrics"
            )
        return Counted(time.monotonic(), sum(values))

    async def _ask(self, http: httpx.AsyncClient, *, num_prompt: int, num_answer: int) -> None:
        number = next(self._numbers)
        prompt = [
            (number * 7919 + place * 104729) % self._vocab_size for place in range(num_prompt)
        ]
        body = {
            "model": self._model,
            "prompt": prompt,
            "max_tokens": num_answer,
            "ignore_eos": True,
            "temperature": 0,
        }

        response = await http.post("/v1/completions", json=body)
        response.raise_for_status()
