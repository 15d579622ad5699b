"""Many answers to a few prompts at a temperature, with the drafter and without: two samples of one
distribution.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import httpx

from components.contracts import ArmEndpoint, Progress, SampledOutputs
from components.errors import EvaluationError
from components.evaluation.engine_client import EngineClient, PromptTooLongError, answer_all
from components.evaluation.prompts import Prompt
from components.settings import EvaluationSettings


def draw_outputs(
    candidate: ArmEndpoint,
    plain: ArmEndpoint,
    prompts: Sequence[Prompt],
    *,
    settings: EvaluationSettings,
    request_timeout_s: float = 300,
    progress: Progress | None = None,
    transports: tuple[httpx.AsyncBaseTransport | None, httpx.AsyncBaseTransport | None] = (
        None,
        None,
    ),
) -> SampledOutputs:
    """Draw the first `settings.draw_tokens` tokens of `num_draw_prompts` prompts `num_draws` times
    on both engines.

    At `settings.temperature`, which must be above 0. Must not be called from a running event loop.

    Args:
        candidate: engine with the drafter.
        plain: engine without one.
        prompts: the first ones are taken, which mix the slices.
        settings: amounts, temperature and requests in flight.
        request_timeout_s: bound on each request.
        progress: told after each answer.
        transports: for tests, of candidate and plain.

    Raises:
        EvaluationError: temperature 0, an engine that fails, or a prompt that does not fit.
    """
    if settings.temperature <= 0:
        raise EvaluationError(
            "greedy outputs are not drawn", got=f"temperature {settings.temperature:g}"
        )

    chosen = list(prompts[: settings.num_draw_prompts])
    drawn = []
    for endpoint, transport in zip((candidate, plain), transports, strict=True):
        client = EngineClient(
            endpoint,
            temperature=settings.temperature,
            max_tokens=settings.draw_tokens,
            timeout_s=request_timeout_s,
            transport=transport,
        )
        drawn.append(asyncio.run(_draw(client, chosen, settings, progress)))

    return SampledOutputs(temperature=settings.temperature, drafted=drawn[0], plain=drawn[1])


async def _draw(
    client: EngineClient,
    prompts: Sequence[Prompt],
    settings: EvaluationSettings,
    progress: Progress | None,
) -> dict[str, tuple[tuple[int, ...], ...]]:
    repeated = [prompt for _ in range(settings.num_draws) for prompt in prompts]
    async with client:
        answers = await answer_all(
            client,
            repeated,
            num_in_flight=settings.acceptance_requests_in_flight,
            what="draws",
            with_token_ids=True,
            progress=progress,
        )

    drawn: dict[str, list[tuple[int, ...]]] = {prompt.prompt_id: [] for prompt in prompts}
    for prompt, answer in zip(repeated, answers, strict=True):
        if isinstance(answer, PromptTooLongError):
            raise answer
        drawn[prompt.prompt_id].append(answer.token_ids)

    return {prompt_id: tuple(draws) for prompt_id, draws in drawn.items()}
