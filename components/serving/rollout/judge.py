"""Judges one step of a canary from the requests it served. Pure: records in, verdict and reason
out.

Rules, in this order; the first that speaks decides.

1. errors: the splitter finds the candidate down, or its share of failed requests is above
   `max_error_share` -> unhealthy, at once. A failure that names no slot (the splitter answered)
   counts against the candidate: in doubt the newcomer is to blame. So does a request that the
   candidate failed and the splitter then gave to the baseline: the client saw an answer, the judge
   must not.
2. outputs: greedy answers to the gate's prompts are not the target's own by the gate's rule on
   losslessness -> unhealthy, at once.
3. too early: the step is shorter than `step_s`, or the candidate answered fewer than `min_requests`
   -> undecided.
4. draft coverage, (steps + accepted) / generated tokens, is below `min_draft_coverage`, over at
   least `min_requests_for_statistics` requests -> unhealthy: the drafter is not used, whatever
   acceptance says.
5. acceptance length, (accepted + steps) / steps, is below `min_acceptance_share` of the gate's,
   over at least `min_steps_for_acceptance` steps that drafted -> unhealthy. Where a schedule drafts
   nothing at the step's load, a handful of such steps remain (the last tokens of the last request),
   and their mean says nothing.
6. latency: the candidate's p95 is above `max_latency_ratio` times the baseline's in the same step,
   both over at least `min_requests_for_statistics` requests -> unhealthy.

What a rule had too little data for is named in the reason.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

from components.contracts import CanaryStep, Slot
from components.serving.rollout.traffic import RequestRecord
from components.settings import CanarySettings


@dataclass(frozen=True, kw_only=True)
class SlotTraffic:
    """What one slot did during a step.

    Attributes:
        num_requests: answered or failed.
        num_errors: failed.
        num_tokens: generated, over answered requests.
        num_steps: speculative target steps.
        num_accepted: accepted draft tokens.
        latencies_s: of answered requests, ascending.
        first_error: words of the first failure.
    """

    num_requests: int
    num_errors: int
    num_tokens: int
    num_steps: int
    num_accepted: int
    latencies_s: tuple[float, ...]
    first_error: str | None

    @property
    def num_answered(self) -> int:
        """Requests answered with a completion."""
        return self.num_requests - self.num_errors

    @property
    def acceptance_length(self) -> float | None:
        """(accepted + steps) / steps, the bonus token included; None with no speculative step."""
        return (self.num_accepted + self.num_steps) / self.num_steps if self.num_steps else None

    @property
    def draft_coverage(self) -> float | None:
        """(steps + accepted) / generated tokens; None with no token."""
        return (self.num_steps + self.num_accepted) / self.num_tokens if self.num_tokens else None


def summarise(records: Sequence[RequestRecord], slot: Slot) -> SlotTraffic:
    """Add up one slot's records; failures that name no slot go to the candidate."""
    mine = [record for record in records if (record.slot or Slot.CANDIDATE) == slot]
    answered = [record for record in mine if record.ok]
    return SlotTraffic(
        num_requests=len(mine),
        num_errors=len(mine) - len(answered),
        num_tokens=sum(record.num_tokens for record in answered),
        num_steps=sum(record.num_steps for record in answered),
        num_accepted=sum(record.num_accepted for record in answered),
        latencies_s=tuple(sorted(record.latency_s for record in answered)),
        first_error=next((record.error for record in mine if not record.ok), None),
    )


def judge_step(
    records: Sequence[RequestRecord],
    *,
    settings: CanarySettings,
    gate_acceptance_length: float | None,
    elapsed_s: float,
    min_draft_coverage: float | None = None,
    num_redispatched: int = 0,
    candidate_status: str | None = None,
    output_fault: str | None = None,
) -> tuple[bool | None, str]:
    """Judge a step by the rules of this module.

    Args:
        records: requests of this step so far.
        settings: limits.
        gate_acceptance_length: what the gate measured; None switches rule 5 off.
        elapsed_s: since the step began.
        min_draft_coverage: 0 to 1; None switches rule 4 off (a schedule that stops drafting under
            load).
        num_redispatched: requests of this step that the candidate failed and the baseline answered.
        output_fault: why the candidate's outputs are not the target's own; None: nothing says so.
        candidate_status: the splitter's word for a candidate that takes no traffic (DOWN); None
            when it is up.

    Returns:
        (verdict, reason): True healthy, False unhealthy, None not decided yet.
    """
    candidate, baseline = summarise(records, Slot.CANDIDATE), summarise(records, Slot.BASELINE)
    if candidate_status is not None:
        return False, f"the splitter finds the candidate {candidate_status}"

    num_requests, num_errors = (
        candidate.num_requests + num_redispatched,
        candidate.num_errors + num_redispatched,
    )

    if num_errors > settings.max_error_share * num_requests:
        first = candidate.first_error or "the splitter sent them to the baseline instead"
        limit = f"allowed {settings.max_error_share:.1%}"
        return False, f"{num_errors} of {num_requests} candidate requests failed, {limit}: {first}"
    if output_fault is not None:
        return False, output_fault
    if candidate.num_answered < settings.min_requests:
        return (
            None,
            f"the candidate answered {candidate.num_answered} of {settings.min_requests} "
            "requests needed",
        )
    if elapsed_s < settings.step_s:
        return None, f"{elapsed_s:.1f} of {settings.step_s:g} s"

    return _judge_statistics(
        candidate,
        baseline,
        settings=settings,
        gate_acceptance_length=gate_acceptance_length,
        min_draft_coverage=min_draft_coverage,
    )


def _judge_statistics(
    candidate: SlotTraffic,
    baseline: SlotTraffic,
    *,
    settings: CanarySettings,
    gate_acceptance_length: float | None,
    min_draft_coverage: float | None,
) -> tuple[bool, str]:
    """The rules that need a number of requests, after those that a single one decides; the first
    that fails ends it.
    """
    notes = [f"{candidate.num_errors} of {candidate.num_requests} failed"]
    enough = settings.min_requests_for_statistics
    coverage, length = candidate.draft_coverage, candidate.acceptance_length
    if min_draft_coverage is not None and coverage is not None and candidate.num_answered >= enough:
        notes.append(f"draft coverage {coverage:.2f}, at least {min_draft_coverage:.2f}")
        if coverage < min_draft_coverage:
            return False, notes[-1]

    if gate_acceptance_length is not None:
        if length is None or candidate.num_steps < settings.min_steps_for_acceptance:
            needed = settings.min_steps_for_acceptance
            notes.append(
                f"acceptance not judged ({candidate.num_steps} drafted steps, {needed} needed)"
            )
        else:
            least = settings.min_acceptance_share * gate_acceptance_length
            notes.append(
                f"acceptance length {length:.3f}, at least {least:.3f} (gate "
                f"{gate_acceptance_length:.3f})"
            )
            if length < least:
                return False, notes[-1]

    if min(candidate.num_answered, baseline.num_answered) < enough:
        numbers = (
            f"{candidate.num_answered} and {baseline.num_answered} requests, {enough} of "
            "each needed"
        )
        notes.append(f"latency not judged ({numbers})")
    else:
        ratio = percentile(candidate.latencies_s, 95) / percentile(baseline.latencies_s, 95)
        notes.append(
            f"p95 latency {ratio:.2f} x baseline, at most {settings.max_latency_ratio:.2f}"
        )
        if ratio > settings.max_latency_ratio:
            return False, notes[-1]

    return True, "; ".join(notes)


def percentile(ascending: Sequence[float], percent: float) -> float:
    """Nearest-rank percentile of a non-empty ascending sequence."""
    rank = max(1, math.ceil(percent / 100 * len(ascending)))
    return ascending[rank - 1]


def build_step(
    records: Sequence[RequestRecord],
    *,
    weight_percent: int,
    started_at: datetime,
    duration_s: float,
    healthy: bool,
    reason: str,
) -> CanaryStep:
    """The record of a finished step."""
    slots = {slot: summarise(records, slot) for slot in Slot}

    def latency(slot: Slot, percent: float) -> float | None:
        return percentile(slots[slot].latencies_s, percent) if slots[slot].latencies_s else None

    return CanaryStep(
        weight_percent=weight_percent,
        started_at=started_at,
        duration_s=duration_s,
        num_requests={slot: traffic.num_requests for slot, traffic in slots.items()},
        num_errors={slot: traffic.num_errors for slot, traffic in slots.items()},
        acceptance_length=slots[Slot.CANDIDATE].acceptance_length,
        draft_coverage=slots[Slot.CANDIDATE].draft_coverage,
        latency_p50_s={slot: latency(slot, 50) for slot in slots},
        latency_p95_s={slot: latency(slot, 95) for slot in slots},
        healthy=healthy,
        reason=reason,
    )
