"""Answers of a served drafter to the token, to hold against what was trained."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import httpx

from components.contracts import ArmEndpoint, Progress, ServedAnswer
from components.errors import EvaluationError
from components.evaluation.engine_client import (
    Completion,
    EngineClient,
    PromptTooLongError,
    answer_all,
)
from components.evaluation.prompts import Prompt
from components.settings import EvaluationSettings


def collect_answers(
    endpoint: ArmEndpoint,
    prompts: Sequence[Prompt],
    *,
    settings: EvaluationSettings,
    temperature: float = 0.0,
    request_timeout_s: float = 300,
    progress: Progress | None = None,
    transport: httpx.AsyncBaseTransport | None = None,
) -> tuple[ServedAnswer, ...]:
    """Answer every prompt on an engine with a drafter; prompts that are too long are left out.

    Raises:
        EvaluationError: engine gone or too slow, no speculative metrics in an answer, or no answer
            of two tokens.
    """
    client = EngineClient(
        endpoint,
        temperature=temperature,
        max_tokens=settings.max_tokens,
        timeout_s=request_timeout_s,
        transport=transport,
    )

    answers = asyncio.run(
        _collect(client, prompts, settings.acceptance_requests_in_flight, progress)
    )
    kept = tuple(answer for answer in answers if answer.num_steps > 0)

    if not kept:
        raise EvaluationError(
            f"arm '{endpoint.arm}' took no step with a draft", got=f"{len(prompts)} prompts"
        )
    return kept


async def _collect(
    client: EngineClient, prompts: Sequence[Prompt], num_in_flight: int, progress: Progress | None
) -> list[ServedAnswer]:
    async with client:
        answers = await answer_all(
            client,
            prompts,
            num_in_flight=num_in_flight,
            what="answers",
            with_token_ids=True,
            progress=progress,
        )

    return [
        _served(client, prompt, answer)
        for prompt, answer in zip(prompts, answers, strict=True)
        if not isinstance(answer, PromptTooLongError)
    ]


def _served(client: EngineClient, prompt: Prompt, answer: Completion) -> ServedAnswer:
    if answer.speculation is None:
        raise EvaluationError(
            f"arm '{client.endpoint.arm}' serves no drafter, or says nothing of it",
            expected="metrics.speculative_decoding in each response",
            fix="Start the engine with --per-request-spec-decode-metrics summary and its "
            "speculative config.",
        )

    return ServedAnswer(
        prompt_id=prompt.prompt_id,
        prompt_token_ids=answer.prompt_token_ids,
        token_ids=answer.token_ids,
        num_steps=answer.speculation.num_steps,
        accepted_by_position=answer.speculation.accepted_by_position,
    )
