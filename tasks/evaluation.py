"""Measure the arms as served, decide, and show it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from prefect import task
from prefect.cache_policies import NO_CACHE
from prefect.logging import get_run_logger

from components.contracts import (
    AcceptanceReport,
    ArmEndpoint,
    CheckpointRef,
    GateDecision,
    Record,
    Release,
    SpeedPoint,
    TargetRef,
    TrainServedGap,
)
from components.evaluation.acceptance import Measured
from components.evaluation.decide import decide
from components.evaluation.measure import MeasuredLength, build_report
from components.evaluation.prompts import Prompt, load_prompts
from components.evaluation.schedule import Schedule, choose_schedule
from components.evaluation.speed import measure_speed
from components.reporting.acceptance_plots import plot_acceptance
from components.reporting.gate_page import write_gate_page
from components.settings import EvaluationSettings
from tasks.artifacts import markdown_table, progress_reporter, publish_image, publish_markdown
from tasks.engines import (
    drafting_engine,
    plain_engine,
    scheduled_engine,
    stop_drafting_engine,
    stop_scheduled_engine,
)
from tasks.loop import Loop
from tasks.measuring import (
    CANDIDATE,
    CHAMPION,
    NO_DRAFT,
    at_temperature,
    measure_gap,
    measure_length,
    measure_scheduled,
    measure_surviving,
    measured_ratios,
    peak_memory,
    sampled_prompts,
    shorter_drafts,
)
from tasks.retry import is_transient

UNTRAINED = "untrained"


class GateOutcome(Record):
    """What the gate flow hands on: the measurement, the decision, and the release if it passed."""

    report: AcceptanceReport
    decision: GateDecision
    release: Release | None


@task(name="serve the arms", cache_policy=NO_CACHE)
def serve_arms(
    loop: Loop, target: TargetRef, candidate: CheckpointRef, champion: CheckpointRef | None
) -> tuple[ArmEndpoint, ...]:
    """Candidate, champion (if it is another drafter) and no draft, each on its own engine, all up at once."""
    with loop.stage("engine start"):
        engines = {
            NO_DRAFT: plain_engine(loop, target),
            CANDIDATE: drafting_engine(loop, target, candidate, name=CANDIDATE),
        }
        if champion is not None and champion.digest != candidate.digest:
            # It may be bound to the target's last version: measuring it here is how we learn what it is still worth.
            engines[CHAMPION] = drafting_engine(loop, target, champion, name=CHAMPION, allow_unbound=True)
        for engine in engines.values():
            engine.wait_ready()
    return tuple(engine.endpoint(arm) for arm, engine in engines.items())


@task(
    name="measure acceptance", cache_policy=NO_CACHE, retries=1, retry_delay_seconds=5, retry_condition_fn=is_transient
)
def measure_arm(loop: Loop, endpoint: ArmEndpoint) -> Measured:
    """One arm over the held-out prompts, as the engine itself counts."""
    return _measure(loop, endpoint, load_prompts(loop.recipe.evaluation))


@task(name="measure untrained", cache_policy=NO_CACHE)
def measure_untrained(loop: Loop, target: TargetRef, untrained: CheckpointRef) -> Measured:
    """What training is compared with (random weights, or the parent as it was), on a few prompts."""
    prompts = load_prompts(loop.recipe.evaluation)
    stride = max(1, len(prompts) // loop.recipe.evaluation.num_untrained_prompts)  # some of every slice
    with loop.stage("engine start"):
        engine = drafting_engine(loop, target, untrained, name=UNTRAINED)
        engine.wait_ready()
    try:
        return _measure(loop, engine.endpoint(UNTRAINED), prompts[::stride])
    finally:
        stop_drafting_engine(loop, target, untrained)


@task(name="remeasure champion", cache_policy=NO_CACHE)
def measure_champion(loop: Loop, target: TargetRef, champion: CheckpointRef) -> Measured:
    """The champion on a target it is not bound to: what the target's change did to it."""
    with loop.stage("engine start"):
        engine = drafting_engine(loop, target, champion, name=CHAMPION, allow_unbound=True)
        engine.wait_ready()
    return _measure(loop, engine.endpoint(CHAMPION), load_prompts(loop.recipe.evaluation))


@task(name="measure further temperatures", cache_policy=NO_CACHE)
def measure_further(loop: Loop, endpoints: Sequence[ArmEndpoint]) -> dict[float, dict[str, Measured]]:
    """The drafting arms at the recipe's further temperatures, on a few prompts of every slice."""
    settings = loop.recipe.evaluation
    prompts = sampled_prompts(load_prompts(settings), settings)
    drafting = [endpoint for endpoint in endpoints if endpoint.num_draft_tokens]
    return {
        temperature: {
            endpoint.arm: _measure(loop, endpoint, prompts, settings=at_temperature(settings, temperature))
            for endpoint in drafting
        }
        for temperature in settings.temperatures[1:]
    }


def _measure(
    loop: Loop, endpoint: ArmEndpoint, prompts: Sequence[Prompt], *, settings: EvaluationSettings | None = None
) -> Measured:
    chosen = settings or loop.recipe.evaluation
    with loop.stage(f"measure {endpoint.arm}") as clock:
        measured = measure_surviving(
            endpoint,
            prompts,
            settings=chosen,
            engines=loop.engines,
            journals=loop.run_dir / "measurements",
            request_timeout_s=loop.recipe.engine.request_timeout_s,
            progress=progress_reporter(f"acceptance {endpoint.arm}"),
        )
        clock.num_tokens = sum(p.num_output_tokens for p in measured.prompts)
    return measured


@task(name="measure shorter drafts", cache_policy=NO_CACHE)
def measure_lengths(
    loop: Loop, target: TargetRef, candidate: CheckpointRef, endpoints: Sequence[ArmEndpoint]
) -> list[MeasuredLength]:
    """The candidate with each of the recipe's fewer draft tokens, one more engine at a time."""
    plain = next(endpoint for endpoint in endpoints if endpoint.arm == NO_DRAFT)
    prompts, lengths = load_prompts(loop.recipe.evaluation), []
    for shorter in shorter_drafts(candidate, loop.recipe.evaluation):
        with loop.stage("engine start"):
            engine = drafting_engine(loop, target, shorter, name=f"draft-{shorter.num_draft_tokens}")
            engine.wait_ready()
        try:
            with loop.stage("measure shorter drafts"):
                one = measure_length(
                    engine.endpoint(CANDIDATE),
                    plain,
                    prompts,
                    settings=loop.recipe.evaluation,
                    engines=loop.engines,
                    journals=loop.run_dir / "measurements",
                    request_timeout_s=loop.recipe.engine.request_timeout_s,
                    progress=progress_reporter(f"{shorter.num_draft_tokens} draft tokens"),
                )
        finally:
            stop_drafting_engine(loop, target, shorter)
        lengths.append(one)
    return lengths


@task(name="train-served gap", cache_policy=NO_CACHE)
def measure_train_served(
    loop: Loop, target: TargetRef, candidate: CheckpointRef, endpoints: Sequence[ArmEndpoint]
) -> TrainServedGap | None:
    """The candidate teacher-forced, through reference decoding and as served; None where the recipe has no limit."""
    if loop.recipe.gate.max_train_served_gap is None:
        return None
    with loop.stage("train-served gap"):
        return measure_gap(
            next(one for one in endpoints if one.arm == CANDIDATE),
            load_prompts(loop.recipe.evaluation),
            target=target,
            checkpoint=candidate,
            recipe=loop.recipe,
            out_dir=loop.run_dir / "train_served",
            progress=progress_reporter("train-served gap"),
            on_line=get_run_logger().info,
        )


@task(name="measure speed and report", cache_policy=NO_CACHE)
def measure_and_report(
    loop: Loop,
    target: TargetRef,
    endpoints: Sequence[ArmEndpoint],
    measured: dict[str, Measured],
    further: dict[float, dict[str, Measured]],
    lengths: Sequence[MeasuredLength],
    candidate: CheckpointRef,
    gap: TrainServedGap | None,
) -> AcceptanceReport:
    """tok/s by concurrency, arms interleaved, then everything in one report."""
    settings: EvaluationSettings = loop.recipe.evaluation
    prompts = load_prompts(settings)
    with loop.stage("measure speed"):
        speed = measure_speed(endpoints, prompts, settings=settings, progress=progress_reporter("speed"))
    if settings.measure_schedule:
        schedule = choose_schedule(measured_ratios(speed, candidate, lengths))
        speed |= _speed_of_schedule(loop, target, endpoints, candidate, schedule)
    report = build_report(
        target=target,
        measured=measured,
        speed=speed,
        settings=settings,
        prompts=prompts,
        further=further,
        draft_lengths=lengths,
        train_served_gap=gap,
        peak_memory_bytes=peak_memory(endpoints, loop.engines),
    )
    report.write(loop.run_dir / "acceptance_report.json")
    return report


def _speed_of_schedule(
    loop: Loop,
    target: TargetRef,
    endpoints: Sequence[ArmEndpoint],
    candidate: CheckpointRef,
    schedule: Schedule,
) -> Mapping[str, tuple[SpeedPoint, ...]]:
    """The schedule that would be shipped, as it would be served: one more engine, for as long as this takes."""
    plain = next((endpoint for endpoint in endpoints if endpoint.arm == NO_DRAFT), None)
    if len({row[2] for row in schedule}) < 2 or plain is None:
        return {}  # one K at every load: the candidate's own speed is the schedule's
    with loop.stage("engine start"):
        engine = scheduled_engine(loop, target, candidate, schedule)
        engine.wait_ready()
    try:
        with loop.stage("measure schedule"):
            return measure_scheduled(
                engine.endpoint(CANDIDATE),
                plain,
                load_prompts(loop.recipe.evaluation),
                settings=loop.recipe.evaluation,
                progress=progress_reporter("shipped schedule"),
            )
    finally:
        stop_scheduled_engine(loop, target, candidate, schedule)


@task(name="decide", cache_policy=NO_CACHE)
def decide_gate(loop: Loop, report: AcceptanceReport) -> GateDecision:
    """Apply the recipe's rules; the decision is written beside the report and shown as an artifact."""
    decision = decide(report, settings=loop.recipe.gate, expected_fingerprint=report.target.fingerprint)
    decision.write(loop.run_dir / "gate_decision.json")
    plots = loop.run_dir / "plots"
    for name, png in plot_acceptance(report, plots, decision=decision).items():
        publish_image(f"gate {name}", png, description=name.replace("_", " "))
    texts = {prompt.prompt_id: prompt.messages[0]["content"] for prompt in load_prompts(loop.recipe.evaluation)}
    page = write_gate_page(report, decision, plots / "gate.html", prompts=texts)
    rows = [(r.rule, r.verdict, _number(r.value), _number(r.threshold), r.detail) for r in decision.rules]
    table = markdown_table(("rule", "verdict", "value", "threshold", "detail"), rows)
    words = (
        f"## Gate: **{decision.verdict}**\n\n{table}\n\nPage with tables and plots: `{page}`, and in the MLflow run."
    )
    publish_markdown("gate decision", words, description="Gate decision")
    get_run_logger().info("the gate said %s: %s", decision.verdict, page)
    return decision


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}"
