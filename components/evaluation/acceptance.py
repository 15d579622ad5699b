"""Acceptance of one served arm over the evaluation prompts, as the engine itself counts it.

Two sources are read and must agree to the token: the metrics in each response
(`--per-request-spec-decode-metrics summary`) and the growth of the engine's own counters.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from components.contracts import ArmEndpoint, Progress, PromptMeasurement
from components.errors import EvaluationError
from components.evaluation.engine_client import (
    GENERATION_TOKENS,
    NUM_ACCEPTED,
    NUM_ACCEPTED_AT,
    NUM_DRAFT_TOKENS,
    NUM_DRAFTS,
    Completion,
    EngineClient,
    PromptTooLongError,
    Speculation,
    answer_all,
)
from components.evaluation.journal import Journal
from components.evaluation.outputs.greedy_answers import GreedyAnswer, digest_tokens
from components.evaluation.prompts import Prompt
from components.settings import EvaluationSettings

COUNTER_SETTLE_S = 5.0
"""vLLM answers a request just before it publishes the step's counters; how long to wait for them to
catch up.
"""


@dataclass(frozen=True)
class Measured:
    """One arm over the prompts.

    `counters` are growths over the measurement, warm-up excluded; `excluded` maps prompt id to the
    reason; `answers` are by prompt id.
    """

    endpoint: ArmEndpoint
    prompts: tuple[PromptMeasurement, ...]
    counters: dict[str, float]
    excluded: dict[str, str]
    engine_version: str
    answers: Mapping[str, GreedyAnswer] = field(default_factory=dict)


def measure_acceptance(
    endpoint: ArmEndpoint,
    prompts: Sequence[Prompt],
    *,
    settings: EvaluationSettings,
    request_timeout_s: float = 300,
    journal: Path | None = None,
    with_logprobs: bool = False,
    progress: Progress | None = None,
    transport: httpx.AsyncBaseTransport | None = None,
) -> Measured:
    """Answer every prompt once on `endpoint`, `settings.acceptance_requests_in_flight` at a time.

    `with_logprobs` asks for the best tokens at each position, so that other answers can be compared
    with these.

    The engine must serve nobody else meanwhile. A prompt that does not fit into the model's length
    is excluded with the reason, up to `settings.max_excluded_share` of them. Must not be called
    from a running event loop.

    Prompts are answered and checked against the engine's counters in groups of
    `settings.prompts_per_checkpoint`. With a `journal`, a file, groups that were checked are kept
    there: called again after the engine died, the same measurement goes on behind them, and no
    prompt is counted twice. Another measurement replaces the file.

    Raises:
        EvaluationError: engine gone, too slow or another one; no per-request metrics; the two
            counts differ; the engine restarted while it was measured; too many prompts excluded.
    """
    if not prompts:
        raise EvaluationError("no prompts to measure acceptance on")
    client = EngineClient(
        endpoint,
        temperature=settings.temperature,
        max_tokens=settings.max_tokens,
        timeout_s=request_timeout_s,
        transport=transport,
    )
    kept = Journal.of(journal, endpoint, settings, prompts, with_logprobs=with_logprobs)
    return asyncio.run(_measure(client, prompts, settings, kept, with_logprobs, progress))


async def _measure(
    client: EngineClient,
    prompts: Sequence[Prompt],
    settings: EvaluationSettings,
    journal: Journal,
    with_logprobs: bool,
    progress: Progress | None,
) -> Measured:
    todo = [prompt for prompt in prompts if prompt.prompt_id not in journal.done]
    async with client:
        if todo:
            await client.warm_up(num_requests=settings.acceptance_requests_in_flight)
            await _measure_groups(client, todo, settings, journal, with_logprobs, progress)
        version = await client.version()

    kept = journal.measurements
    excluded = {
        p.prompt_id: journal.excluded[p.prompt_id]
        for p in prompts
        if p.prompt_id in journal.excluded
    }
    _check_excluded(excluded, len(prompts), settings.max_excluded_share)

    measurements = tuple(kept[prompt.prompt_id] for prompt in prompts if prompt.prompt_id in kept)
    answers = {m.prompt_id: journal.answers[m.prompt_id] for m in measurements}
    return Measured(client.endpoint, measurements, journal.counters, excluded, version, answers)


async def _measure_groups(
    client: EngineClient,
    todo: Sequence[Prompt],
    settings: EvaluationSettings,
    journal: Journal,
    with_logprobs: bool,
    progress: Progress | None,
) -> None:
    before = await _settled_counters(client)
    for start in range(0, len(todo), settings.prompts_per_checkpoint):
        group = todo[start : start + settings.prompts_per_checkpoint]
        answers = await answer_all(
            client,
            group,
            num_in_flight=settings.acceptance_requests_in_flight,
            what="answers",
            with_token_ids=True,
            with_logprobs=with_logprobs,
            progress=_shifted(progress, start=start, total=len(todo)),
        )
        measurements = []
        given = {}
        excluded = {}
        for prompt, answer in zip(group, answers, strict=True):
            if isinstance(answer, PromptTooLongError):
                excluded[prompt.prompt_id] = str(answer)
            else:
                measurements.append(_measurement(client.endpoint, prompt, answer))
                given[prompt.prompt_id] = GreedyAnswer(answer.token_ids, answer.top_logprobs)
        after, growth = await _matching_counters(client, before, measurements)
        journal.append(measurements, given, excluded, growth)
        before = after


def _shifted(progress: Progress | None, *, start: int, total: int) -> Progress | None:
    if progress is None:
        return None
    return lambda what, num_done, _: progress(what, start + num_done, total)


def _measurement(endpoint: ArmEndpoint, prompt: Prompt, answer: Completion) -> PromptMeasurement:
    """What an answer tells; refused where engine and checkpoint disagree about drafting, for
    another drafter's counters would be taken for this one's.
    """
    speculation = answer.speculation
    if speculation is None:
        if endpoint.num_draft_tokens > 0:
            raise EvaluationError(
                f"arm '{endpoint.arm}' should serve a drafter, but its answers carry no "
                "speculative metrics",
                expected="metrics.speculative_decoding in each response",
                fix="Start the engine with --per-request-spec-decode-metrics summary and its "
                "speculative config.",
            )
        speculation = Speculation((), 0)

    if speculation.num_steps and endpoint.num_draft_tokens == 0:
        raise EvaluationError(
            f"arm '{endpoint.arm}' should serve no drafter, but its engine speculates"
        )
    if (
        endpoint.num_draft_tokens
        and len(speculation.accepted_by_position) != endpoint.num_draft_tokens
    ):
        raise EvaluationError(
            f"arm '{endpoint.arm}' drafts another number of tokens than its checkpoint says",
            got=len(speculation.accepted_by_position),
            expected=endpoint.num_draft_tokens,
        )

    return PromptMeasurement(
        prompt_id=prompt.prompt_id,
        slice=prompt.slice,
        num_prompt_tokens=answer.num_prompt_tokens,
        num_output_tokens=answer.num_output_tokens,
        num_steps=speculation.num_steps,
        num_draft_tokens=speculation.num_draft_tokens,
        num_accepted_tokens=speculation.num_accepted,
        accepted_by_position=speculation.accepted_by_position,
        latency_s=answer.latency_s,
        output_digest=digest_tokens(answer.token_ids),
        language=prompt.language,
    )


def _check_excluded(excluded: dict[str, str], num_prompts: int, max_share: float) -> None:
    if len(excluded) > max_share * num_prompts:
        prompt_id, reason = next(iter(excluded.items()))
        raise EvaluationError(
            "too many evaluation prompts do not fit into the model's length",
            got=f"{len(excluded)} of {num_prompts}, first {prompt_id}: {reason}",
            expected=f"at most {max_share:.0%}",
            fix="Raise engine.max_model_len, or lower evaluation.max_tokens.",
        )


def expected_counters(measurements: Sequence[PromptMeasurement]) -> dict[str, int]:
    """What the engine's counters must have grown by, from the per-request metrics of
    `measurements`.
    """
    expected = {
        GENERATION_TOKENS: sum(m.num_output_tokens for m in measurements),
        NUM_DRAFTS: sum(m.num_steps for m in measurements),
        NUM_DRAFT_TOKENS: sum(m.num_draft_tokens for m in measurements),
        NUM_ACCEPTED: sum(m.num_accepted_tokens for m in measurements),
    }
    num_positions = max((len(m.accepted_by_position) for m in measurements), default=0)
    for k in range(num_positions):
        expected[f'{NUM_ACCEPTED_AT}{{position="{k}"}}'] = sum(
            m.accepted_by_position[k] for m in measurements
        )
    return expected


def counter_growth(
    before: dict[str, float], after: dict[str, float], *, arm: str
) -> dict[str, float]:
    """Growth of every counter.

    Raises:
        EvaluationError: a counter fell or vanished, so the engine restarted in between.
    """
    for name, value in before.items():
        if after.get(name, 0.0) < value:
            raise EvaluationError(
                f"the engine of arm '{arm}' restarted while it was measured",
                got=f"{name} fell from {value:.0f} to {after.get(name, 0.0):.0f}",
                fix="Measure the arm again; nothing of this measurement is kept.",
            )
    return {name: value - before.get(name, 0.0) for name, value in after.items()}


async def _settled_counters(client: EngineClient) -> dict[str, float]:
    """Counters once they have stopped growing: the warm-up's last step may still be on its way."""
    previous = await client.counters()
    for _ in range(int(COUNTER_SETTLE_S / 0.2)):
        await asyncio.sleep(0.2)
        current = await client.counters()
        if current == previous:
            return current
        previous = current
    raise EvaluationError(
        f"the engine of arm '{client.endpoint.arm}' is busy with requests that are not the "
        "measurement's",
        fix="Measure an engine that no other client uses.",
    )


async def _matching_counters(
    client: EngineClient, before: dict[str, float], measurements: Sequence[PromptMeasurement]
) -> tuple[dict[str, float], dict[str, float]]:
    """Counters and their growth once that equals the per-request sums; an error naming both when it
    never does.
    """
    arm = client.endpoint.arm
    expected = expected_counters(measurements)
    for _ in range(int(COUNTER_SETTLE_S / 0.2)):
        counters = await client.counters()
        growth = counter_growth(before, counters, arm=arm)
        different = {name for name, value in expected.items() if growth.get(name, 0.0) != value}
        if not different:
            return counters, growth
        await asyncio.sleep(0.2)

    raise EvaluationError(
        f"arm '{arm}': the engine's counters and its per-request metrics differ",
        got="; ".join(
            f"{name} counter {growth.get(name, 0.0):.0f}, requests {expected[name]}"
            for name in different
        ),
        expected="equal to the token",
        fix="Make sure that no other client uses the engine while it is measured.",
    )
