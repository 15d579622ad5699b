"""Tokens per target step over all steps, those without a draft included, from the counts that vLLM
gives.

vLLM counts the target steps that had a draft. A drafter drafts at every step; a rival drafts only
where it finds something to copy, and a length over those steps flatters it: upstream figures show
3.63 over drafted steps where all steps give 1.95. So both are compared by tokens kept per target
step, all steps counted.

The prefill gives the first of an answer's N tokens, and every target step after it commits one
token and the drafts it accepted. With A drafts accepted in all and c tokens cut off behind the end
of the answer (an end token, a stop string, max_tokens),

    N - 1 = steps + A - c,   so   steps = N - 1 - A + c,   length = (N - 1) / steps.

vLLM does not tell c. It is 0 unless the last step accepted drafts, and never above the most that
one step accepted, a_max. So steps lie between

    fewest = max(steps with a draft, N - 1 - A)   and   most = min(N - 1, N - 1 - A + a_max).

`fewest` is exact for whatever drafts at every step (then it is the first of the two), so it is what
the candidate is given. Answers of one token have no step and do not count. Where the engine
preempts a request, what it computes again is not counted by it, nor here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from components.contracts import PromptMeasurement
from components.evaluation.statistics.ratios import Array, ratio_of_sums


@dataclass(frozen=True)
class StepBounds:
    """Tokens kept behind the prefill's, and the fewest and most target steps that can have given
    them.
    """

    num_kept: int
    fewest: int
    most: int


def step_bounds(prompt: PromptMeasurement) -> StepBounds:
    """Bounds of one request's target steps after its prefill, from the engine's counts; see the
    module's docstring.
    """
    kept = max(0, prompt.num_output_tokens - 1)
    accepted_in_one = sum(count > 0 for count in prompt.accepted_by_position)
    fewest = min(kept, max(prompt.num_steps, kept - prompt.num_accepted_tokens))
    most = min(kept, kept - prompt.num_accepted_tokens + accepted_in_one)
    return StepBounds(kept, fewest, max(fewest, most))


def all_step_sums(
    prompts: Sequence[PromptMeasurement], *, at_most: bool = False
) -> tuple[Array, Array]:
    """Per prompt, [P] each: tokens kept behind the prefill's, and target steps, at their fewest or
    at their most.
    """
    bounds = [step_bounds(prompt) for prompt in prompts]
    steps = [one.most if at_most else one.fewest for one in bounds]
    return np.array([one.num_kept for one in bounds], float), np.array(steps, float)


def all_step_length(prompts: Sequence[PromptMeasurement], *, at_most: bool = False) -> float:
    """Tokens kept per target step, steps without a draft included; 1.0 without any step.

    Args:
        prompts: of one arm.
        at_most: take the most steps that the counts allow, so the least length, instead of the
            fewest.
    """
    tokens, steps = all_step_sums(prompts, at_most=at_most)
    return ratio_of_sums(tokens, steps) if steps.sum() else 1.0
