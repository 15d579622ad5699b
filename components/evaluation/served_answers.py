"""Answers of a served drafter to the token, to hold against what was trained."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import httpx

from components.contracts import ArmEndpoint, Progress, ServedAnswer
from components.errors import EvaluationError
from components.evaluation.engine_client import EngineClient, PromptTooLongError, all_or_first_error
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
        EvaluationError: engine gone or too slow, no speculative metrics in an answer, or no answer of two tokens.
    """
    client = EngineClient(
        endpoint,
        temperature=temperature,
        max_tokens=settings.max_tokens,
        timeout_s=request_timeout_s,
        transport=transport,
    )
    answers = asyncio.run(_collect(client, prompts, settings.acceptance_concurrency, progress))
    kept = tuple(answer for answer in answers if answer is not None and answer.num_steps > 0)
    if not kept:
        raise EvaluationError(f"arm '{endpoint.arm}' took no step with a draft", got=f"{len(answers)} prompts")
    return kept


async def _collect(
    client: EngineClient, prompts: Sequence[Prompt], concurrency: int, progress: Progress | None
) -> list[ServedAnswer | None]:
    slots = asyncio.Semaphore(concurrency)
    num_done = 0

    async def answer(prompt: Prompt) -> ServedAnswer | None:
        nonlocal num_done
        async with slots:
            try:
                completion = await client.complete(prompt.messages, with_token_ids=True)
            except PromptTooLongError:
                return None
            finally:
                num_done += 1
                if progress is not None:
                    progress(f"answers of {client.endpoint.arm}", num_done, len(prompts))
        if completion.speculation is None:
            raise EvaluationError(
                f"arm '{client.endpoint.arm}' serves no drafter, or says nothing of it",
                expected="metrics.speculative_decoding in each response",
                fix="Start the engine with --per-request-spec-decode-metrics summary and its speculative config.",
            )
        return ServedAnswer(
            prompt_id=prompt.prompt_id,
            prompt_token_ids=completion.prompt_token_ids,
            token_ids=completion.token_ids,
            num_steps=completion.speculation.num_steps,
            accepted_by_position=completion.speculation.accepted_by_position,
        )

    async with client:
        return await all_or_first_error(answer(prompt) for prompt in prompts)
