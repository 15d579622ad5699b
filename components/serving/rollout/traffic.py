"""Replays prompts through the splitter, as clients would ask, and records, per request, which slot
answered, and how.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import cycle
from typing import Any

import httpx

from components.contracts import Slot
from components.errors import RolloutError
from components.serving.rollout.splitter import ARM_HEADER

Message = Mapping[str, Any]
RequestBody = Sequence[Message] | Mapping[str, Any]
"""Chat messages, or a mapping with `messages` and what else the request carries."""
Watch = Callable[[Sequence["RequestRecord"], float], bool]
"""Called as watch(records so far, elapsed seconds) after each answer and every WATCH_EVERY_S; True
ends the replay.
"""

WATCH_EVERY_S = 0.5
ERROR_PAUSE_S = 0.2
"""Pause of one sender after a failed request, so that a dead service is not asked thousands of
times a second.
"""


@dataclass(frozen=True, kw_only=True)
class RequestRecord:
    """One request as the client saw it.

    Attributes:
        slot: that answered, from the response header; None when no engine did.
        ok: answered with 200 and a completion.
        latency_s: from sending to the complete answer.
        num_tokens: generated tokens.
        num_steps: speculative target steps; 0 with no drafter.
        num_accepted: accepted draft tokens.
        prompt: index of the prompt among those replayed.
        token_ids: of the answer, an end token included.
        was_cut: it ended at its length limit.
        error: what went wrong, short; None when ok.
    """

    slot: Slot | None
    ok: bool
    latency_s: float
    num_tokens: int = 0
    num_steps: int = 0
    num_accepted: int = 0
    prompt: int = 0
    token_ids: tuple[int, ...] = ()
    was_cut: bool = False
    error: str | None = None


def replay(
    url: str,
    model: str,
    prompts: Sequence[RequestBody],
    *,
    requests_in_flight: int,
    max_tokens: int,
    temperature: float = 0.0,
    duration_s: float | None = None,
    num_requests: int | None = None,
    watch: Watch | None = None,
    request_timeout_s: float = 120.0,
) -> list[RequestRecord]:
    """Send the prompts, over and over, keeping `requests_in_flight` open, until one of the bounds
    is met.

    Requests in flight at that moment are waited for, so every request that was sent is in the
    result.

    Args:
        url: base URL, without /v1.
        model: served model name.
        prompts: chat messages of each prompt, or a mapping with `messages` and what else its
            request carries, as tools; taken in order, from the start again at the end.
        requests_in_flight: concurrent senders.
        max_tokens: limit per answer.
        temperature: of sampling. No seed is sent.
        duration_s: send no new request after this long.
        num_requests: send this many.
        watch: may end the replay early.
        request_timeout_s: a request that takes longer is an error.

    Raises:
        RolloutError: no prompts, or no bound at all.
    """
    if not prompts:
        raise RolloutError("there are no prompts to replay")
    if duration_s is None and num_requests is None and watch is None:
        raise RolloutError("a replay needs a bound: duration_s, num_requests or watch")

    body = {
        "model": model,
        "max_tokens": max_tokens,
        "temperature": temperature,
        "return_token_ids": True,
    }
    bodies = cycle(enumerate([{**body, **_asked(prompt)} for prompt in prompts]))

    replayer = _Replayer(url, bodies, duration_s=duration_s, num_requests=num_requests, watch=watch)
    return asyncio.run(replayer.run(requests_in_flight, request_timeout_s=request_timeout_s))


def _asked(prompt: RequestBody) -> dict[str, Any]:
    return (
        dict(prompt)
        if isinstance(prompt, Mapping)
        else {"messages": [dict(message) for message in prompt]}
    )


class _Replayer:
    """State shared by the senders of one replay."""

    def __init__(
        self,
        url: str,
        bodies: Iterator[tuple[int, dict[str, Any]]],
        *,
        duration_s: float | None,
        num_requests: int | None,
        watch: Watch | None,
    ) -> None:
        self._url = f"{url.rstrip('/')}/v1/chat/completions"
        self._bodies = bodies
        self._duration_s = duration_s
        self._num_left = num_requests
        self._watch = watch
        self._records: list[RequestRecord] = []
        self._started_at = time.monotonic()
        self._is_over = False

    async def run(self, num_senders: int, *, request_timeout_s: float) -> list[RequestRecord]:
        limits = httpx.Limits(max_connections=num_senders, max_keepalive_connections=num_senders)
        async with httpx.AsyncClient(timeout=request_timeout_s, limits=limits) as client:
            senders = [asyncio.create_task(self._send_all(client)) for _ in range(num_senders)]
            watcher = asyncio.create_task(self._watch_often())
            try:
                await asyncio.gather(*senders)
                if watcher.done():
                    watcher.result()  # the watch raised between two answers
            finally:
                for task in (*senders, watcher):
                    task.cancel()
                await asyncio.gather(*senders, watcher, return_exceptions=True)

        return self._records

    async def _send_all(self, client: httpx.AsyncClient) -> None:
        while self._may_send():
            prompt, body = next(self._bodies)
            record = replace(await self._send(client, body), prompt=prompt)
            self._records.append(record)
            self._look()
            if not record.ok and not self._is_over:
                await asyncio.sleep(ERROR_PAUSE_S)

    def _may_send(self) -> bool:
        if self._is_over or (
            self._duration_s is not None and self._elapsed_s() >= self._duration_s
        ):
            return False
        if self._num_left is not None:
            self._num_left -= 1
            return self._num_left >= 0
        return True

    async def _watch_often(self) -> None:
        while True:
            await asyncio.sleep(WATCH_EVERY_S)
            self._look()

    def _look(self) -> None:
        if self._watch is None or self._is_over:
            return
        self._is_over = True  # also when the watch raises: the senders must not go on without it
        self._is_over = self._watch(self._records, self._elapsed_s())

    def _elapsed_s(self) -> float:
        return time.monotonic() - self._started_at

    async def _send(self, client: httpx.AsyncClient, body: dict[str, Any]) -> RequestRecord:
        started_at = time.monotonic()
        try:
            response = await client.post(self._url, json=body)
        except httpx.HTTPError as error:
            return RequestRecord(
                slot=None,
                ok=False,
                latency_s=time.monotonic() - started_at,
                error=f"{type(error).__name__}: {error}",
            )
        return read_response(response, latency_s=time.monotonic() - started_at)


def read_response(response: httpx.Response, *, latency_s: float) -> RequestRecord:
    """The record of one complete HTTP answer."""
    named = response.headers.get(ARM_HEADER)
    slot = Slot(named) if named in list(Slot) else None
    if response.status_code != httpx.codes.OK:
        words = " ".join(response.text.split())[:120]
        return RequestRecord(
            slot=slot, ok=False, latency_s=latency_s, error=f"HTTP {response.status_code}: {words}"
        )

    try:
        answer = response.json()
        choice = answer["choices"][0]
        metrics = (answer.get("metrics") or {}).get("speculative_decoding") or {}
        return RequestRecord(
            slot=slot,
            ok=True,
            latency_s=latency_s,
            num_tokens=int(answer["usage"]["completion_tokens"]),
            num_steps=int(metrics.get("num_spec_steps") or 0),
            num_accepted=int(metrics.get("num_accepted_draft_tokens") or 0),
            token_ids=tuple(choice.get("token_ids") or ()),
            was_cut=choice.get("finish_reason") == "length",
        )
    except (ValueError, KeyError, IndexError, TypeError, AttributeError) as error:
        return RequestRecord(
            slot=slot, ok=False, latency_s=latency_s, error=f"not a completion: {error!r}"
        )
