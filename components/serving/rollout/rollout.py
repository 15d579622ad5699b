"""Rolls a candidate out: traffic share up step by step while the judge is content, to zero at the
first bad sign.

Whatever happens (an unhealthy step, an exception, Ctrl-C), the candidate's weight is zero before
this module returns or raises, unless every step was healthy.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Literal, get_args

from components.contracts import (
    Arm,
    ArmEndpoint,
    CanaryReport,
    CanaryStep,
    Progress,
    Schedule,
    Slot,
    now_utc,
)
from components.errors import ConfigError, DSparkError, RolloutError, SplitterError
from components.serving.rollout.judge import build_step, judge_step
from components.serving.rollout.splitter import Splitter
from components.serving.rollout.traffic import RequestBody, RequestRecord, replay
from components.settings import CanarySettings

PROGRESS_EVERY_S = 4.0
MAX_ROLLBACK_TRIES = 3

BaselineKind = Literal[Arm.CHAMPION, Arm.NO_DRAFT]

CheckOutputs = Callable[[Sequence[RequestRecord]], str | None]


def run_canary(
    *,
    splitter: Splitter,
    candidate: ArmEndpoint,
    baseline: ArmEndpoint,
    baseline_kind: BaselineKind,
    candidate_digest: str,
    prompts: Sequence[RequestBody],
    settings: CanarySettings,
    gate_acceptance_length: float | None,
    model: str,
    on_step: Callable[[CanaryStep], None] | None = None,
    schedule: Schedule = (),
    temperature: float = 0.0,
    request_timeout_s: float = 120.0,
    check_outputs: CheckOutputs | None = None,
    progress: Progress | None = None,
) -> CanaryReport:
    """Roll the candidate out over `settings.weights_percent`; promoted means it serves all traffic
    at the end.

    Args:
        splitter: HAProxy with the slots `candidate` and `baseline`.
        candidate: running engine with the new drafter.
        baseline: running engine that serves if the candidate does not.
        baseline_kind: 'champion' or 'no_draft'; a rollback names it.
        candidate_digest: digest of the candidate's checkpoint, for the report.
        prompts: replayed as traffic, over and over, as `replay` takes them.
        settings: shares, durations and limits.
        gate_acceptance_length: what the gate measured; None judges no acceptance.
        model: served model name, the same on both engines.
        on_step: called with each finished step.
        schedule: the candidate's (from, to, K) rows. Where it stops drafting under load, coverage
            is not judged, and the last step is replayed at the highest load that still drafts, so
            that acceptance always is.
        temperature: of the replayed requests.
        request_timeout_s: a request that takes longer is an error.
        check_outputs: says of a step's records why the candidate's outputs are not the target's
            own; None: not checked.
        progress: called every few seconds.

    Raises:
        ConfigError: shares that do not rise to 100 %, or an unknown baseline kind.
        RolloutError: something failed that is not the candidate's health; the candidate's weight is
            zero.
        SplitterError: HAProxy did not take the engines; traffic goes where it went before, or to
            the baseline.
    """
    _check(candidate, baseline, model=model, baseline_kind=baseline_kind, settings=settings)
    # Outside of the `try`: until the baseline is placed, the slot `candidate` may hold what serves
    # all traffic.
    _place(splitter, candidate=candidate, baseline=baseline)

    def run_step(weight_percent: int) -> CanaryStep:
        return _Step(
            splitter,
            weight_percent=weight_percent,
            requests_in_flight=_load(settings, schedule, weight_percent),
            settings=settings,
            gate_acceptance_length=gate_acceptance_length,
            min_draft_coverage=_coverage_limit(settings, schedule),
            check_outputs=check_outputs,
            progress=progress,
        ).run(model, prompts, temperature=temperature, request_timeout_s=request_timeout_s)

    promoted = False
    try:
        steps = _climb(settings.weights_percent, run_step, on_step)
        promoted = all(step.healthy for step in steps)
    except DSparkError as error:
        raise RolloutError(
            f"the canary was broken off; traffic is on the baseline ({baseline_kind})",
            got=str(error),
        ) from error
    finally:
        if not promoted:
            withdraw(splitter)
    return _report(
        steps, candidate_digest=candidate_digest, baseline_kind=baseline_kind, promoted=promoted
    )


def _climb(
    weights_percent: Sequence[int],
    run_step: Callable[[int], CanaryStep],
    on_step: Callable[[CanaryStep], None] | None,
) -> list[CanaryStep]:
    """One step per share, up to and including the first unhealthy one."""
    steps: list[CanaryStep] = []
    for weight_percent in weights_percent:
        steps.append(run_step(weight_percent))
        if on_step is not None:
            on_step(steps[-1])
        if not steps[-1].healthy:
            break
    return steps


def withdraw(splitter: Splitter) -> None:
    """Take all traffic from the candidate: weight zero, no new request; those in flight finish.

    Raises:
        RolloutError: HAProxy did not take it; the candidate may still get traffic.
    """
    for attempt in range(MAX_ROLLBACK_TRIES):
        try:
            splitter.set_weight_percent(0)
            splitter.drain(Slot.CANDIDATE)
            return
        except SplitterError as error:
            if attempt + 1 == MAX_ROLLBACK_TRIES:
                raise RolloutError(
                    "the candidate could not be taken out of traffic",
                    got=str(error),
                    fix="Stop its engine: HAProxy then sends everything to the baseline.",
                ) from error
            time.sleep(0.5)


class _Step:
    """One traffic share, held until the judge has decided."""

    def __init__(
        self,
        splitter: Splitter,
        *,
        weight_percent: int,
        requests_in_flight: int,
        settings: CanarySettings,
        gate_acceptance_length: float | None,
        min_draft_coverage: float | None,
        check_outputs: CheckOutputs | None,
        progress: Progress | None,
    ) -> None:
        self._splitter = splitter
        self._weight_percent = weight_percent
        self._requests_in_flight = requests_in_flight
        self._settings = settings
        self._gate_acceptance_length = gate_acceptance_length
        self._min_draft_coverage = min_draft_coverage
        self._check_outputs = check_outputs
        self._progress = progress
        self._next_word_s = PROGRESS_EVERY_S
        self._num_redispatched_before = 0
        self._healthy: bool | None = None
        self._reason = ""

    def run(
        self,
        model: str,
        prompts: Sequence[RequestBody],
        *,
        temperature: float,
        request_timeout_s: float,
    ) -> CanaryStep:
        """Set the share, replay traffic until the verdict, and put the step on record."""
        started_at = now_utc()
        start_s = time.monotonic()
        self._num_redispatched_before = self._splitter.state()[Slot.CANDIDATE].num_redispatched
        self._splitter.set_weight_percent(self._weight_percent)
        records = replay(
            self._splitter.frontend_url,
            model,
            prompts,
            requests_in_flight=self._requests_in_flight,
            max_tokens=self._settings.max_tokens,
            temperature=temperature,
            watch=self._watch,
            request_timeout_s=request_timeout_s,
        )

        duration_s = time.monotonic() - start_s
        if self._healthy:
            # Requests that were in flight count too.
            self._judge(records, max(duration_s, self._settings.step_s))

        return build_step(
            records,
            weight_percent=self._weight_percent,
            started_at=started_at,
            duration_s=duration_s,
            healthy=bool(self._healthy),
            reason=self._reason,
        )

    def _watch(self, records: Sequence[RequestRecord], elapsed_s: float) -> bool:
        self._judge(records, elapsed_s)
        if self._healthy is None and elapsed_s >= self._settings.max_step_s:
            self._healthy = False
            self._reason = f"undecided after {elapsed_s:.0f} s: {self._reason}"

        if self._healthy is False:
            # At once, before the requests in flight are waited for.
            self._splitter.set_weight_percent(0)

        if self._progress is not None and elapsed_s >= self._next_word_s:
            self._next_word_s = elapsed_s + PROGRESS_EVERY_S
            self._progress(
                f"canary at {self._weight_percent} %",
                int(elapsed_s),
                int(self._settings.max_step_s),
            )

        return self._healthy is not None

    def _judge(self, records: Sequence[RequestRecord], elapsed_s: float) -> None:
        slot = self._splitter.state()[Slot.CANDIDATE]
        self._healthy, self._reason = judge_step(
            records,
            settings=self._settings,
            gate_acceptance_length=self._gate_acceptance_length,
            elapsed_s=elapsed_s,
            min_draft_coverage=self._min_draft_coverage,
            num_redispatched=slot.num_redispatched - self._num_redispatched_before,
            candidate_status=None if slot.is_up else slot.status,
            output_fault=self._check_outputs(records) if self._check_outputs is not None else None,
        )


def _place(splitter: Splitter, *, candidate: ArmEndpoint, baseline: ArmEndpoint) -> None:
    """Baseline into its slot and under all traffic first; only then is the candidate's slot
    touched.

    The slot `candidate` may still hold the champion of the last rollout, at 100 %.
    """
    splitter.assign(Slot.BASELINE, baseline.url)
    splitter.set_weight_percent(0)
    splitter.assign(Slot.CANDIDATE, candidate.url)


def _check(
    candidate: ArmEndpoint,
    baseline: ArmEndpoint,
    *,
    model: str,
    baseline_kind: BaselineKind,
    settings: CanarySettings,
) -> None:
    if baseline_kind not in get_args(BaselineKind):
        raise ConfigError(
            "no such kind of baseline",
            got=baseline_kind,
            expected=" or ".join(get_args(BaselineKind)),
        )

    weights = settings.weights_percent
    if not weights or list(weights) != sorted(set(weights)) or weights[0] < 1 or weights[-1] != 100:
        raise ConfigError(
            "canary.weights_percent must rise and end at 100",
            got=list(weights),
            expected="such as [1, 5, 25, 50, 100]",
        )
    if not candidate.model == baseline.model == model:
        raise RolloutError(
            "clients use one model name, so both arms must serve it",
            got=f"candidate {candidate.model}, baseline {baseline.model}",
            expected=model,
        )


def _coverage_limit(settings: CanarySettings, schedule: Schedule) -> float | None:
    stops_drafting = any(row.num_draft_tokens == 0 for row in schedule)
    return None if stops_drafting else settings.min_draft_coverage


def _load(settings: CanarySettings, schedule: Schedule, weight_percent: int) -> int:
    """Requests kept open in a step: the recipe's, but in the last step no more than the schedule
    drafts for.

    Only there does every request reach the candidate, so that the load on it is known.
    """
    drafting = [
        row.last
        for row in schedule
        if row.num_draft_tokens > 0 and row.first <= settings.requests_in_flight
    ]
    if weight_percent < 100 or not drafting:
        return settings.requests_in_flight
    return min(settings.requests_in_flight, max(drafting))


def _report(
    steps: Sequence[CanaryStep],
    *,
    candidate_digest: str,
    baseline_kind: BaselineKind,
    promoted: bool,
) -> CanaryReport:
    last = steps[-1]
    what = "all steps healthy" if promoted else f"stopped at {last.weight_percent} %"
    return CanaryReport(
        candidate_digest=candidate_digest,
        baseline=baseline_kind,
        steps=tuple(steps),
        promoted=promoted,
        rolled_back_to=None if promoted else baseline_kind,
        reason=f"{what}: {last.reason}",
        created_at=now_utc(),
    )
