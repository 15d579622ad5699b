"""Many questions on one long shared prefix, cold and warm: what a prefix cache is worth, and what
a drafter makes of it.

Each question is asked twice, with the same tokens: once under a cache salt that the engine never
saw (cold: the whole prompt is computed), once under a salt whose prefix it has (warm: only the
question is). vLLM takes one block less from the cache for drafters that read hidden states: it
drops the last cached block, because the states of its last token are needed and are not kept. So a
drafting arm computes up to a block more of a warm prompt than no draft does.

The prefix is the reference manual that Python itself carries. It is no held-out text: acceptance
here is to be compared cold with warm, not with a slice's.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Sequence
from statistics import median

import httpx

from components.contracts import ArmEndpoint, Progress, WarmPrefixPoint
from components.errors import EvaluationError
from components.evaluation.engine_client import Completion, EngineClient
from components.evaluation.prompts import Prompt, make_prompt
from components.settings import EvaluationSettings, WarmPrefixSettings

SLICE = "warm_prefix"
CHARS_PER_TOKEN = 4
"""Of English text, about; the engine's own count is in the record."""

_INSTRUCTION = "Answer questions about the following text in a few sentences.\n\n"
_PRIMING = "Is the text above written in English?"
_QUESTIONS = (
    "Summarise the text in two sentences.",
    "List three terms that the text defines.",
    "What is the first thing that the text explains?",
    "Who is the text written for?",
    "Write a title for the text.",
    "Which part of the text is hardest to understand, and why?",
    "Give one example that the text mentions.",
    "Explain the main idea of the text to a beginner.",
    "Write one exam question about the text.",
    "What does the text say about errors?",
    "Which words occur most often in the text?",
    "Rewrite the first sentence of the text in simpler words.",
    "What is left unexplained in the text?",
    "Name two rules that the text states.",
    "What would a reader do after reading the text?",
    "Is the text a tutorial or a reference? Give a reason.",
    "Write a short example that follows the text.",
    "What does the text say about names?",
    "Which exception to a rule does the text mention?",
    "Describe the structure of the text.",
    "What is the last thing that the text explains?",
    "Turn the main points of the text into a list.",
    "What does the text compare?",
    "Write a note to a colleague about the text.",
)


def warm_prefix_prompts(settings: WarmPrefixSettings) -> tuple[Prompt, ...]:
    """The questions, each behind the same long system message; the first one only fills the cache.

    Returns:
        `num_questions` + 1 prompts.

    Raises:
        EvaluationError: this Python does not carry its manual, or not enough of it.
    """
    prefix = _INSTRUCTION + _manual(settings.prefix_tokens * CHARS_PER_TOKEN)
    system = {"role": "system", "content": prefix}
    return tuple(
        make_prompt(SLICE, (system, {"role": "user", "content": question}))
        for question in (_PRIMING, *_QUESTIONS[: settings.num_questions])
    )


def measure_warm_prefix(
    endpoint: ArmEndpoint,
    *,
    settings: EvaluationSettings,
    request_timeout_s: float = 300,
    salt: str | None = None,
    progress: Progress | None = None,
    transport: httpx.AsyncBaseTransport | None = None,
) -> WarmPrefixPoint:
    """Ask each question cold and warm, one request at a time, cold first and warm first in turns.

    The engine must serve nobody else meanwhile, and must have its prefix cache on (vLLM's default).
    Must not be called from a running event loop.

    Args:
        endpoint: the arm.
        settings: `warm_prefix` must be set; temperature and max_tokens are those of all arms.
        request_timeout_s: bound on each request.
        salt: what the cache salts of this measurement begin with; None: a random one, so that
            measuring again is cold again.
        progress: called after each question.
        transport: for tests; None opens real connections.

    Raises:
        EvaluationError: no `warm_prefix` in the settings, an engine that fails, answers without a
            token or takes a cold prompt from its cache, or a drafting arm without speculative
            metrics.
    """
    if settings.warm_prefix is None:
        raise EvaluationError("evaluation.warm_prefix is not set, so there is nothing to measure")
    client = EngineClient(
        endpoint,
        temperature=settings.temperature,
        max_tokens=settings.max_tokens,
        timeout_s=request_timeout_s,
        transport=transport,
    )

    prompts = warm_prefix_prompts(settings.warm_prefix)
    salt = secrets.token_hex(8) if salt is None else salt
    cold, warm = asyncio.run(_measure(client, prompts, salt, progress))
    return _point(endpoint, cold, warm)


async def _measure(
    client: EngineClient, prompts: Sequence[Prompt], salt: str, progress: Progress | None
) -> tuple[list[Completion], list[Completion]]:
    cold: list[Completion] = []
    warm: list[Completion] = []
    first, *questions = prompts
    async with client:
        await client.warm_up(num_requests=1)
        await client.stream(first, cache_salt=f"{salt}-warm")
        for number, prompt in enumerate(questions):
            asks = [(cold, f"{salt}-{number}"), (warm, f"{salt}-warm")]
            for answers, cache_salt in asks if number % 2 == 0 else reversed(asks):
                answers.append(await client.stream(prompt, cache_salt=cache_salt))
            if progress is not None:
                progress("questions", number + 1, len(questions))

    return cold, warm


def _point(
    endpoint: ArmEndpoint, cold: Sequence[Completion], warm: Sequence[Completion]
) -> WarmPrefixPoint:
    if not all(answer.token_times for answer in (*cold, *warm)):
        raise EvaluationError(f"arm '{endpoint.arm}' answered a request without a single token")
    cached_cold = _cached(cold)
    if cached_cold:
        raise EvaluationError(
            f"arm '{endpoint.arm}' took prompts from its cache that it never saw",
            got=f"{cached_cold:g} cached tokens of a prompt with a new cache salt",
            expected="0",
            fix="Measure on vLLM, which keeps salted prompts apart.",
        )

    return WarmPrefixPoint(
        arm=endpoint.arm,
        num_questions=len(warm),
        num_prompt_tokens=median(answer.num_prompt_tokens for answer in warm),
        ttft_cold_ms=_ttft_ms(cold),
        ttft_warm_ms=_ttft_ms(warm),
        acceptance_cold=_acceptance(endpoint, cold),
        acceptance_warm=_acceptance(endpoint, warm),
        cached_cold=cached_cold,
        cached_warm=_cached(warm),
    )


def _ttft_ms(answers: Sequence[Completion]) -> float:
    return median(answer.token_times[0][0] * 1e3 for answer in answers)


def _cached(answers: Sequence[Completion]) -> float | None:
    told = [answer.num_cached_tokens for answer in answers if answer.num_cached_tokens is not None]
    return median(told) if len(told) == len(answers) else None


def _acceptance(endpoint: ArmEndpoint, answers: Sequence[Completion]) -> float | None:
    """(accepted + steps) / steps; None with no drafter, or where no answer was long enough."""
    if endpoint.num_draft_tokens == 0:
        return None
    told = [answer.speculation for answer in answers]
    if any(one is None for one in told):
        raise EvaluationError(
            f"arm '{endpoint.arm}' serves no drafter, or says nothing of it",
            expected="metrics.speculative_decoding in each response",
            fix="Start the engine with --per-request-spec-decode-metrics summary.",
        )
    num_steps = sum(one.num_steps for one in told if one is not None)
    num_accepted = sum(one.num_accepted for one in told if one is not None)
    return (num_accepted + num_steps) / num_steps if num_steps else None


def _manual(num_chars: int) -> str:
    """The first `num_chars` characters of the language reference that Python carries, whole
    words.
    """
    try:
        from pydoc_data.topics import topics
    except ImportError:
        raise EvaluationError(
            "this Python does not carry its manual (module pydoc_data)",
            fix="Install Python's whole standard library, or set evaluation.warm_prefix to null.",
        ) from None

    text = "\n\n".join(topics[name].strip() for name in sorted(topics))
    if len(text) < num_chars:
        raise EvaluationError(
            "evaluation.warm_prefix.prefix_tokens is more than Python's manual holds",
            got=num_chars // CHARS_PER_TOKEN,
            expected=f"at most {len(text) // CHARS_PER_TOKEN}",
        )

    return text[:num_chars].rsplit(None, 1)[0]
