"""The gate, conducted: arms served, measured in turns, put into a report, decided on, shown. One
order for everyone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

from components.contracts import (
    AcceptanceReport,
    Arm,
    ArmEndpoint,
    CheckpointRef,
    CompatibilityTable,
    GateDecision,
    PlainAnswer,
    PlainAnswers,
    SampledOutputs,
    Schedule,
    SpeedPoint,
    TargetRef,
    TrainServedGap,
    WarmPrefixPoint,
)
from components.evaluation.acceptance import Measured
from components.evaluation.draft_schedule import choose_schedule
from components.evaluation.groups import acceptance_groups
from components.evaluation.outputs.sampled_draws import draw_outputs
from components.evaluation.report import MeasuredLength, build_report
from components.evaluation.requests.compatibility import compatibility_of
from components.evaluation.rules.asked import Asked, expected_loads
from components.evaluation.rules.decide import decide
from components.evaluation.rules.looks import at_look
from components.evaluation.rules.rivals import (
    MeasuredRival,
    beaten_by,
    measure_rival,
    rivals_of,
    with_rivals,
)
from components.evaluation.speed import measure_speed
from components.evaluation.warm_prefix import measure_warm_prefix
from components.reporting.gate.acceptance_plots import plot_acceptance
from components.reporting.gate.page import write_gate_page
from components.serving.engines.command import resolve_device
from components.settings.signing import signing_key
from components.stages.engines import (
    drafting_engine,
    plain_engine,
    rival_engine,
    scheduled_engine,
    stop_drafting_engine,
    stop_rival_engine,
    stop_scheduled_engine,
)
from components.stages.gate.measuring import (
    at_temperature,
    measure_gap,
    measure_length,
    measure_scheduled,
    measured_ratios,
    peak_memory,
    sampled_prompts,
    shorter_drafts,
)
from components.stages.gate.run import Contest, GateRun, Step, at_once

PLAIN_ANSWERS = "plain_answers.json"
"""File beside the report, and in the release: what no draft answered to the gate's prompts."""

Arms = Mapping[str, ArmEndpoint]


@dataclass(frozen=True)
class Outputs:
    """Acceptance by arm, and no draft against itself by requests in flight."""

    measured: dict[str, Measured]
    itself: dict[int, Measured]


def measure_gate(run: GateRun, contest: Contest, step: Step = at_once) -> AcceptanceReport:
    """Serve the arms, measure them and build the report.

    Raises:
        EvaluationError, EngineError, TrainingError: an arm could not be measured.
    """
    settings = run.recipe.evaluation
    candidate = contest.candidate
    arms = step("serve the arms", lambda: serve_arms(run, contest))

    outputs = _outputs(run, arms, step)
    if contest.untrained is not None and settings.num_untrained_prompts > 0:
        outputs.measured[Arm.UNTRAINED] = step(
            "measure untrained", lambda: _untrained(run, contest)
        )
    further = (
        step("measure further temperatures", lambda: _further(run, arms))
        if settings.temperatures[1:]
        else {}
    )
    sampled = (
        step("draw sampled outputs", lambda: _sampled(run, arms))
        if max(settings.temperatures) > 0
        else ()
    )
    lengths = (
        step("measure shorter drafts", lambda: _lengths(run, contest, arms))
        if settings.draft_lengths
        else []
    )
    rivals = step("measure rivals", lambda: _rivals(run, contest, arms)) if settings.rivals else []
    table = step("send every kind of request", lambda: _compatibility(run, contest, arms))
    prefix = (
        step("measure the shared prefix", lambda: _warm_prefix(run, arms))
        if settings.warm_prefix
        else ()
    )
    gap = None
    if run.recipe.gate.max_train_served_gap is not None:
        gap = step("train-served gap", lambda: _gap(run, contest, arms))

    speed = step("measure speed", lambda: _speed(run, arms))
    if settings.measure_schedule:
        schedule = choose_schedule(measured_ratios(speed, candidate, lengths))
        speed |= step(
            "measure the shipped schedule", lambda: _speed_of_schedule(run, contest, arms, schedule)
        )

    report = build_report(
        contest.target,
        measured=outputs.measured,
        itself=outputs.itself,
        speed=speed,
        prompts=run.prompts,
        recipe=run.recipe,
        size=run.size,
        look=contest.look,
        further=further,
        sampled_outputs=sampled,
        draft_lengths=lengths,
        warm_prefix=prefix,
        compatibility=table,
        train_served_gap=gap,
        peak_memory_bytes=peak_memory(list(arms.values()), run.engines),
    )
    report = with_rivals(report, rivals) if rivals else report
    _keep_answers(outputs.measured[Arm.NO_DRAFT]).write(run.out_dir / PLAIN_ANSWERS)
    report.write(run.out_dir / "acceptance_report.json")
    return report


def decide_gate(run: GateRun, report: AcceptanceReport, asked: Asked) -> GateDecision:
    """Apply the recipe's rules; decision, plots and page are written beside the report."""
    decision = decide(
        report,
        settings=run.recipe.gate,
        asked=asked,
        expected_fingerprint=report.target.fingerprint,
        signing_key=signing_key(),
    )

    decision.write(run.out_dir / "gate_decision.json")
    plots = run.out_dir / "plots"
    plot_acceptance(report, plots, decision=decision)
    texts = {prompt.prompt_id: prompt.text for prompt in run.prompts}
    groups = acceptance_groups(arm for arm in report.arms.values() if arm.arm != Arm.UNTRAINED)
    rivals = beaten_by(report, at_look(run.recipe.gate, report.look))
    write_gate_page(
        report, decision, plots / "gate.html", prompts=texts, groups=groups, rivals=rivals
    )

    return decision


def serve_arms(run: GateRun, contest: Contest) -> dict[str, ArmEndpoint]:
    """Candidate, champion (if it is another drafter) and no draft, each on its own engine, all up
    at once.
    """
    target = contest.target
    with run.stage("engine start"):
        engines = {
            Arm.NO_DRAFT: plain_engine(run, target),
            Arm.CANDIDATE: drafting_engine(run, target, contest.candidate, name=Arm.CANDIDATE),
        }
        champion = contest.rival_champion
        if champion is not None:
            # It may be bound to the target's last version: measuring it here is how we learn what
            # it is still worth.
            engines[Arm.CHAMPION] = drafting_engine(
                run, target, champion, name=Arm.CHAMPION, allow_unbound=True
            )
        for arm, engine in engines.items():
            engine.wait_ready(progress=run.progress_of(f"start of {arm}"))

    return {arm: engine.endpoint(arm) for arm, engine in engines.items()}


def remeasure_champion(run: GateRun, target: TargetRef, champion: CheckpointRef) -> Measured:
    """The champion on a target it is not bound to: what the target's change did to it."""
    with run.stage("engine start"):
        engine = drafting_engine(run, target, champion, name=Arm.CHAMPION, allow_unbound=True)
        engine.wait_ready(progress=run.progress_of("start of the champion"))
    return run.measure(engine.endpoint(Arm.CHAMPION))


def _outputs(run: GateRun, arms: Arms, step: Step) -> Outputs:
    """No draft before and after the others, so that it is measured against itself in turns with
    them.
    """
    plain = arms[Arm.NO_DRAFT]
    loads = expected_loads(run.recipe, num_draft_tokens=arms[Arm.CANDIDATE].num_draft_tokens)

    measured: dict[str, Measured] = {
        Arm.NO_DRAFT: step(
            "measure no_draft", lambda: run.measure(plain, with_logprobs=bool(loads))
        )
    }
    itself = {
        load: step(f"measure no_draft at {load} in flight", partial(_again, run, plain, load))
        for load in loads[1:]
    }
    for arm, endpoint in arms.items():
        if arm != Arm.NO_DRAFT:
            measured[arm] = step(f"measure {arm}", partial(run.measure, endpoint))
    itself |= {
        load: step("measure no_draft once more", partial(_again, run, plain, load))
        for load in loads[:1]
    }
    return Outputs(measured, itself)


def _keep_answers(plain: Measured) -> PlainAnswers:
    """No draft's answers, by which a rollout tells whether outputs are still the target's."""
    return PlainAnswers(
        answers={
            name: PlainAnswer(token_ids=answer.token_ids, top=answer.top)
            for name, answer in plain.answers.items()
        }
    )


def _again(run: GateRun, plain: ArmEndpoint, num_in_flight: int) -> Measured:
    settings = run.recipe.evaluation.model_copy(
        update={"acceptance_requests_in_flight": num_in_flight}
    )
    return run.measure(
        plain,
        settings=settings,
        with_logprobs=True,
        name=f"{Arm.NO_DRAFT}-again-at-{num_in_flight}",
    )


def _untrained(run: GateRun, contest: Contest) -> Measured:
    """What training is compared with (random weights, or the parent as it was), on a few
    prompts.
    """
    assert contest.untrained is not None
    # Some of every slice.
    stride = max(1, len(run.prompts) // run.recipe.evaluation.num_untrained_prompts)
    with run.stage("engine start"):
        engine = drafting_engine(run, contest.target, contest.untrained, name=Arm.UNTRAINED)
        engine.wait_ready(progress=run.progress_of("start of the untrained drafter"))
    try:
        return run.measure(engine.endpoint(Arm.UNTRAINED), prompts=run.prompts[::stride])
    finally:
        stop_drafting_engine(run, contest.target, contest.untrained)


def _further(run: GateRun, arms: Arms) -> dict[float, dict[str, Measured]]:
    """The drafting arms at the recipe's further temperatures, on a few prompts of every slice."""
    settings = run.recipe.evaluation
    prompts = sampled_prompts(run.prompts, settings)
    return {
        temperature: {
            arm: run.measure(
                endpoint, prompts=prompts, settings=at_temperature(settings, temperature)
            )
            for arm, endpoint in arms.items()
            if endpoint.num_draft_tokens
        }
        for temperature in settings.temperatures[1:]
    }


def _sampled(run: GateRun, arms: Arms) -> tuple[SampledOutputs, ...]:
    """First tokens drawn many times with the candidate and without a drafter, at each temperature
    above 0.
    """
    settings = run.recipe.evaluation
    with run.stage("draw sampled outputs"):
        return tuple(
            draw_outputs(
                arms[Arm.CANDIDATE],
                arms[Arm.NO_DRAFT],
                run.prompts,
                settings=at_temperature(settings, temperature),
                request_timeout_s=run.recipe.engine.request_timeout_s,
                progress=run.progress_of("sampled outputs"),
            )
            for temperature in settings.temperatures
            if temperature > 0
        )


def _lengths(run: GateRun, contest: Contest, arms: Arms) -> list[MeasuredLength]:
    """The candidate with each of the recipe's fewer draft tokens, one more engine at a time."""
    lengths = []
    for shorter in shorter_drafts(contest.candidate, run.recipe.evaluation):
        with run.stage("engine start"):
            engine = drafting_engine(
                run, contest.target, shorter, name=f"draft-{shorter.num_draft_tokens}"
            )
            engine.wait_ready(progress=run.progress_of("start of a shorter draft"))
        try:
            with run.stage("measure shorter drafts"):
                one = measure_length(
                    engine.endpoint(Arm.CANDIDATE),
                    arms[Arm.NO_DRAFT],
                    run.prompts,
                    settings=run.recipe.evaluation,
                    engines=run.engines,
                    journals=run.out_dir / "measurements",
                    request_timeout_s=run.recipe.engine.request_timeout_s,
                    progress=run.progress_of(f"{shorter.num_draft_tokens} draft tokens"),
                )
        finally:
            stop_drafting_engine(run, contest.target, shorter)
        lengths.append(one)

    return lengths


def _rivals(run: GateRun, contest: Contest, arms: Arms) -> list[MeasuredRival]:
    """Drafting that needs no drafter, over the same prompts, one more engine at a time."""
    settings = run.recipe.evaluation
    measured = []
    for rival in rivals_of(settings):
        with run.stage("engine start"):
            engine = rival_engine(run, contest.target, rival)
            engine.wait_ready(progress=run.progress_of(f"start of {rival.method}"))
        try:
            one = measure_rival(
                engine.endpoint(rival.method),
                arms[Arm.NO_DRAFT],
                run.prompts,
                measure=lambda endpoint, prompts: run.measure(endpoint, prompts=prompts),
                speed=lambda endpoints, prompts: measure_speed(
                    endpoints,
                    prompts,
                    settings=settings,
                    request_timeout_s=run.recipe.engine.request_timeout_s,
                    progress=run.progress_of("speed of rivals"),
                ),
            )
        finally:
            stop_rival_engine(run, contest.target, rival)
        measured.append(one)

    return measured


def _compatibility(run: GateRun, contest: Contest, arms: Arms) -> CompatibilityTable:
    """Requests that the plain engine serves and the drafting one does not; measured once per engine
    version.
    """
    with run.stage("send every kind of request"):
        return compatibility_of(
            arms[Arm.NO_DRAFT],
            arms[Arm.CANDIDATE],
            method=contest.candidate.algorithm,
            device=resolve_device(run.recipe.engine),
            folder=run.cache_dir / "compatibility",
            timeout_s=run.recipe.engine.request_timeout_s,
            progress=run.progress_of("kinds of request"),
        )


def _warm_prefix(run: GateRun, arms: Arms) -> tuple[WarmPrefixPoint, ...]:
    """Each arm on many questions behind one long prefix, cold and warm."""
    with run.stage("measure the shared prefix"):
        return tuple(
            measure_warm_prefix(
                endpoint,
                settings=run.recipe.evaluation,
                request_timeout_s=run.recipe.engine.request_timeout_s,
                progress=run.progress_of(f"shared prefix {arm}"),
            )
            for arm, endpoint in arms.items()
        )


def _gap(run: GateRun, contest: Contest, arms: Arms) -> TrainServedGap:
    """The candidate teacher-forced, through reference decoding and as served."""
    with run.stage("train-served gap"):
        return measure_gap(
            arms[Arm.CANDIDATE],
            run.prompts,
            target=contest.target,
            checkpoint=contest.candidate,
            recipe=run.recipe,
            out_dir=run.out_dir / "train_served",
            progress=run.progress_of("train-served gap"),
            on_line=lambda line: run.tell(f"train-served gap: {line.what}"),
        )


def _speed(run: GateRun, arms: Arms) -> dict[str, tuple[SpeedPoint, ...]]:
    """tok/s by requests in flight, arms interleaved."""
    with run.stage("measure speed"):
        return measure_speed(
            list(arms.values()),
            run.prompts,
            settings=run.recipe.evaluation,
            request_timeout_s=run.recipe.engine.request_timeout_s,
            progress=run.progress_of("speed"),
        )


def _speed_of_schedule(
    run: GateRun, contest: Contest, arms: Arms, schedule: Schedule
) -> Mapping[str, tuple[SpeedPoint, ...]]:
    """The schedule that would be shipped, as it would be served: one more engine, for as long as
    this takes.
    """
    if len({row[2] for row in schedule}) < 2:
        return {}  # one K at every load: the candidate's own speed is the schedule's
    with run.stage("engine start"):
        engine = scheduled_engine(run, contest.target, contest.candidate, schedule)
        engine.wait_ready(progress=run.progress_of("start of the shipped schedule"))

    try:
        with run.stage("measure schedule"):
            return measure_scheduled(
                engine.endpoint(Arm.CANDIDATE),
                arms[Arm.NO_DRAFT],
                run.prompts,
                settings=run.recipe.evaluation,
                request_timeout_s=run.recipe.engine.request_timeout_s,
                progress=run.progress_of("shipped schedule"),
            )
    finally:
        stop_scheduled_engine(run, contest.target, contest.candidate, schedule)
