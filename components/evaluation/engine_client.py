"""A measuring client of one vLLM engine: completions with the engine's own speculative metrics, and
its counters.

Requests carry no `seed`.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Coroutine, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any, Self, TypeVar

import httpx
from prometheus_client.parser import text_string_to_metric_families

from components.contracts import ArmEndpoint, Progress
from components.errors import EvaluationError
from components.evaluation.outputs.greedy_answers import NUM_TOP_LOGPROBS, TopLogprobs
from components.evaluation.prompts import Prompt

SPEC_PREFIX = "vllm:spec_decode_num_"
NUM_DRAFTS = "vllm:spec_decode_num_drafts"
NUM_DRAFT_TOKENS = "vllm:spec_decode_num_draft_tokens"
NUM_ACCEPTED = "vllm:spec_decode_num_accepted_tokens"
NUM_ACCEPTED_AT = "vllm:spec_decode_num_accepted_tokens_per_pos"
GENERATION_TOKENS = "vllm:generation_tokens"
PROMPT_TOKENS = "vllm:prompt_tokens"

ResultT = TypeVar("ResultT")

_LOGPROBS = {
    "logprobs": True,
    "top_logprobs": NUM_TOP_LOGPROBS,
    # As ids: distinct tokens with the same text could not be told apart.
    "return_tokens_as_token_ids": True,
}

WARM_UP_TEXT = "Count from one to ten in words, then from ten to one."
TOO_LONG_MARKS = (
    "maximum context length",
    "max_model_len",
    "longer than the maximum",
    "is too long",
)


class PromptTooLongError(EvaluationError):
    """The prompt and its answer do not fit into the engine's context length."""


@dataclass(frozen=True)
class Speculation:
    """What the engine says about one request: `histogram[j]` target steps accepted exactly j draft
    tokens.
    """

    histogram: tuple[int, ...]
    num_draft_tokens: int

    @property
    def num_steps(self) -> int:
        """Target steps that verified a draft."""
        return sum(self.histogram)

    @property
    def num_accepted(self) -> int:
        """Draft tokens accepted."""
        return sum(j * count for j, count in enumerate(self.histogram))

    @property
    def accepted_by_position(self) -> tuple[int, ...]:
        """Accepted drafts at positions 1..K: steps that accepted at least k (drafts are accepted
        left to right).
        """
        return tuple(sum(self.histogram[k:]) for k in range(1, len(self.histogram)))


@dataclass(frozen=True)
class Completion:
    """One answered request; `token_times` holds (seconds since the request, tokens so far) when
    streamed, token ids and the best tokens at each position are there when asked for.
    """

    text: str
    num_prompt_tokens: int
    num_output_tokens: int
    latency_s: float
    speculation: Speculation | None
    token_times: tuple[tuple[float, int], ...] = ()
    prompt_token_ids: tuple[int, ...] = ()
    token_ids: tuple[int, ...] = ()
    top_logprobs: tuple[TopLogprobs, ...] = ()
    num_cached_tokens: int | None = None
    """Prompt tokens taken from the prefix cache; None where the engine does not say."""


PromptOrMessages = Prompt | Sequence[dict[str, Any]]
"""What is asked: a prompt, with its tools and template variables, or bare messages."""


class EngineClient:
    """Talks to one engine. Use as an async context manager.

    Args:
        endpoint: the engine and the model name to ask for.
        temperature: sampling temperature of every request.
        max_tokens: most tokens of an answer.
        timeout_s: bound on each request, whole.
        transport: for tests; None opens real connections.
    """

    def __init__(
        self,
        endpoint: ArmEndpoint,
        *,
        temperature: float,
        max_tokens: int,
        timeout_s: float,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        self.endpoint = endpoint
        self._sampling = {"temperature": temperature, "max_tokens": max_tokens}
        self._timeout_s = timeout_s
        # The pool must never queue: its waiting would count as the engine's latency.
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=256)
        self._http = httpx.AsyncClient(
            base_url=endpoint.url.rstrip("/"),
            timeout=timeout_s,
            limits=limits,
            transport=transport,
            trust_env=False,
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self._http.aclose()

    async def complete(
        self,
        asked: PromptOrMessages,
        *,
        max_tokens: int | None = None,
        with_token_ids: bool = False,
        with_logprobs: bool = False,
    ) -> Completion:
        """Send one chat completion and wait for the whole answer.

        Args:
            asked: a prompt, or the messages of a chat.
            max_tokens: of this answer; None: the client's.
            with_token_ids: ask for the ids of prompt and answer.
            with_logprobs: ask for the best tokens at each position, and the ids too.

        Raises:
            PromptTooLongError: the engine refuses the prompt because of its length.
            EvaluationError: no answer in time, a refusal, or an answer that is not a completion.
        """
        started = time.perf_counter()
        async with self._bounded("chat completion"):
            payload = self._payload(asked, max_tokens)
            payload |= {"return_token_ids": True} if with_token_ids or with_logprobs else {}
            payload |= _LOGPROBS if with_logprobs else {}
            response = await self._http.post("/v1/chat/completions", json=payload)

        latency_s = time.perf_counter() - started
        self._check_status(response.status_code, response.text)
        try:
            body = response.json()
            text = body["choices"][0]["message"]["content"] or ""
            completion = self._completion(text, body, latency_s)
            if not with_token_ids and not with_logprobs:
                return completion
            prompt_ids = body["prompt_token_ids"]
            choice = body["choices"][0]
            return replace(
                completion,
                prompt_token_ids=tuple(prompt_ids),
                token_ids=tuple(choice["token_ids"]),
                top_logprobs=_top_logprobs(choice) if with_logprobs else (),
            )
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise self._bad_answer(error) from None

    async def stream(self, asked: PromptOrMessages, *, cache_salt: str | None = None) -> Completion:
        """As `complete`, streamed: `token_times` tells when each chunk arrived and how many tokens
        there were by then.

        Requests share cached prefixes only with those of the same `cache_salt`.

        Raises:
            As `complete`.
        """
        payload = self._payload(asked, None) | {
            "stream": True,
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        }
        if cache_salt is not None:
            payload["cache_salt"] = cache_salt

        started = time.perf_counter()
        text = ""
        last = dict[str, Any]()
        times = list[tuple[float, int]]()

        async with (
            self._bounded("streamed chat completion"),
            self._http.stream("POST", "/v1/chat/completions", json=payload) as response,
        ):
            if response.is_error:
                self._check_status(
                    response.status_code, (await response.aread()).decode(errors="replace")
                )
            try:
                async for event in _events(response):
                    last = event
                    num_tokens = int(event["usage"]["completion_tokens"])
                    if num_tokens > (times[-1][1] if times else 0):
                        times.append((time.perf_counter() - started, num_tokens))
                    text += "".join(
                        choice["delta"].get("content") or "" for choice in event["choices"]
                    )
                return self._completion(text, last, time.perf_counter() - started, tuple(times))
            except (KeyError, IndexError, TypeError, ValueError) as error:
                raise self._bad_answer(error) from None

    async def counters(self) -> dict[str, float]:
        """The engine's counters for this model, summed over its `engine` labels.

        Keys are metric names without '_total'; per-position ones end in '{position="k"}', k from 0.

        Raises:
            EvaluationError: /metrics does not answer or belongs to an engine that serves another
                model.
        """
        async with self._bounded("metrics"):
            response = await self._http.get("/metrics")
        self._check_status(response.status_code, response.text)
        counters: dict[str, float] = {}
        models = set()

        for family in text_string_to_metric_families(response.text):
            if (
                not family.name.startswith((SPEC_PREFIX, GENERATION_TOKENS, PROMPT_TOKENS))
                or family.type != "counter"
            ):
                continue
            for sample in (
                sample for sample in family.samples if sample.name == f"{family.name}_total"
            ):
                models.add(sample.labels.get("model_name"))
                if sample.labels.get("model_name") == self.endpoint.model:
                    position = sample.labels.get("position")
                    key = (
                        family.name
                        if position is None
                        else f'{family.name}{{position="{position}"}}'
                    )
                    counters[key] = counters.get(key, 0.0) + sample.value

        if GENERATION_TOKENS not in counters:
            raise EvaluationError(
                f"the metrics of arm '{self.endpoint.arm}' are not those of its engine",
                got=f"{self.endpoint.url}/metrics with counters of "
                f"{', '.join(sorted(map(str, models))) or 'no model'}",
                expected=self.endpoint.model,
                fix="Point the arm's url at the engine that serves this model.",
            )

        return counters

    async def version(self) -> str:
        """vLLM's version as the engine reports it. Raises EvaluationError when it does not."""
        async with self._bounded("version"):
            response = await self._http.get("/version")
        self._check_status(response.status_code, response.text)
        try:
            return str(response.json()["version"])
        except (KeyError, TypeError, ValueError) as error:
            raise self._bad_answer(error) from None

    async def warm_up(self, *, num_requests: int, max_tokens: int = 16) -> None:
        """Answer `num_requests` short requests at once, so that first-time costs stay out of what
        is measured.
        """
        message = {"role": "user", "content": WARM_UP_TEXT}
        await all_or_first_error(
            self.complete([message], max_tokens=max_tokens) for _ in range(num_requests)
        )

    def _payload(self, asked: PromptOrMessages, max_tokens: int | None) -> dict[str, Any]:
        messages = asked.messages if isinstance(asked, Prompt) else asked
        payload = {
            "model": self.endpoint.model,
            "messages": list(messages),
            "n": 1,
        } | self._sampling
        if isinstance(asked, Prompt):
            payload |= asked.request_options
        return payload if max_tokens is None else payload | {"max_tokens": max_tokens}

    @asynccontextmanager
    async def _bounded(self, what: str) -> AsyncIterator[None]:
        try:
            async with asyncio.timeout(self._timeout_s):
                yield
        except (TimeoutError, httpx.TimeoutException):
            raise EvaluationError(
                f"arm '{self.endpoint.arm}': no {what} within {self._timeout_s:g} s",
                got=self.endpoint.url,
            ) from None
        except httpx.HTTPError as error:
            raise EvaluationError(
                f"arm '{self.endpoint.arm}': the engine does not answer",
                got=f"{type(error).__name__} at {self.endpoint.url}",
                fix="Look at the end of the engine's log.",
            ) from None

    def _check_status(self, status: int, body: str) -> None:
        if status < 400:
            return
        refusal = " ".join(body.split())[:300]
        if status == 400 and any(mark in body for mark in TOO_LONG_MARKS):
            raise PromptTooLongError(
                "prompt and answer do not fit into the model's length", got=refusal
            )
        raise EvaluationError(
            f"arm '{self.endpoint.arm}': the engine refused a request",
            got=f"HTTP {status}: {refusal}",
        )

    def _completion(
        self,
        text: str,
        body: dict[str, Any],
        latency_s: float,
        times: tuple[tuple[float, int], ...] = (),
    ) -> Completion:
        usage = body["usage"]
        told = (body.get("metrics") or {}).get("speculative_decoding")
        speculation = None
        if told is not None:
            speculation = Speculation(
                tuple(map(int, told["acceptance_histogram"])), int(told["num_draft_tokens"])
            )

        cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
        return Completion(
            text=text,
            num_prompt_tokens=int(usage["prompt_tokens"]),
            num_output_tokens=int(usage["completion_tokens"]),
            latency_s=latency_s,
            speculation=speculation,
            token_times=times,
            num_cached_tokens=None if cached is None else int(cached),
        )

    def _bad_answer(self, error: Exception) -> EvaluationError:
        return EvaluationError(
            f"arm '{self.endpoint.arm}': the engine's answer is not what vLLM sends",
            got=f"{type(error).__name__}: {error}",
        )


async def all_or_first_error(coroutines: Iterable[Coroutine[Any, Any, ResultT]]) -> list[ResultT]:
    """Results in order; the first error is raised as it is, once all other coroutines are cancelled
    and have ended.
    """
    tasks = [asyncio.create_task(coroutine) for coroutine in coroutines]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def answer_all(
    client: EngineClient,
    prompts: Sequence[Prompt],
    *,
    num_in_flight: int,
    what: str,
    with_token_ids: bool = False,
    with_logprobs: bool = False,
    progress: Progress | None = None,
) -> list[Completion | PromptTooLongError]:
    """Answers in the order of the prompts, `what` in words for `progress`.

    The first error other than a long prompt cancels the rest and is raised.
    """
    slots = asyncio.Semaphore(num_in_flight)
    num_done = 0

    async def answer(prompt: Prompt) -> Completion | PromptTooLongError:
        nonlocal num_done
        async with slots:
            try:
                return await client.complete(
                    prompt, with_token_ids=with_token_ids, with_logprobs=with_logprobs
                )
            except PromptTooLongError as error:
                return error
            finally:
                num_done += 1
                if progress is not None:
                    progress(f"{what} of {client.endpoint.arm}", num_done, len(prompts))

    return await all_or_first_error(answer(prompt) for prompt in prompts)


def _top_logprobs(choice: dict[str, Any]) -> tuple[TopLogprobs, ...]:
    """Per position (token id, log-probability), the most probable first."""
    told = []
    for place in choice["logprobs"]["content"]:
        ids = [
            (int(one["token"].removeprefix("token_id:")), float(one["logprob"]))
            for one in place["top_logprobs"]
        ]
        told.append(tuple(sorted(ids, key=lambda item: -item[1])))
    return tuple(told)


async def _events(response: httpx.Response) -> AsyncIterator[dict[str, Any]]:
    async for line in response.aiter_lines():
        if line.startswith("data:") and (data := line[5:].strip()) != "[DONE]":
            yield json.loads(data)
