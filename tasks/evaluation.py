"""Measure the arms as served, decide, and show it."""

from __future__ import annotations

from prefect import task
from prefect.cache_policies import NO_CACHE
from prefect.logging import get_run_logger

from components.contracts import (
    AcceptanceReport,
    CheckpointRef,
    GateDecision,
    Record,
    Release,
    TargetRef,
)
from components.evaluation.acceptance import Measured
from components.evaluation.rules.asked import Asked
from components.stages.gate.conduct import decide_gate, measure_gate, remeasure_champion
from components.stages.gate.looks import next_look, record_look
from components.stages.gate.run import Contest, GateRun
from components.stages.gate.same_weights import champion_to_beat
from components.stages.prompts import prompts_of
from tasks.artifacts import markdown_table, progress_reporter, publish_image, publish_markdown
from tasks.loop import Loop
from tasks.steps import as_task


class GateOutcome(Record):
    """What the gate flow hands on: the measurement, the decision, and the release if it passed."""

    report: AcceptanceReport
    decision: GateDecision
    release: Release | None


def gate_run(loop: Loop) -> GateRun:
    """The gate's part of this run."""
    return GateRun(
        recipe=loop.recipe,
        budget=loop.budget,
        prompts=prompts_of(loop.recipe),
        engines=loop.engines,
        cache_dir=loop.state_dir,
        out_dir=loop.run_dir,
        stage=loop.stage,
        progress_of=progress_reporter,
        tell=get_run_logger().info,
    )


def measure_arms(
    loop: Loop,
    target: TargetRef,
    candidate: CheckpointRef,
    *,
    champion: CheckpointRef | None,
    untrained: CheckpointRef | None,
) -> AcceptanceReport:
    """All arms of a gate, each step a task. A champion with the candidate's weights is left out: it
    is no rival.
    """
    rival = champion if champion_to_beat(candidate, champion) else None
    look = next_look(loop.state_dir, target.fingerprint, candidate)
    return measure_gate(gate_run(loop), Contest(target, candidate, rival, untrained, look), as_task)


@task(name="remeasure champion", cache_policy=NO_CACHE)
def measure_champion(loop: Loop, target: TargetRef, champion: CheckpointRef) -> Measured:
    """The champion on a target it is not bound to: what the target's change did to it."""
    return remeasure_champion(gate_run(loop), target, champion)


@task(name="decide", cache_policy=NO_CACHE)
def decide_on(
    loop: Loop, report: AcceptanceReport, candidate: CheckpointRef, champion: CheckpointRef | None
) -> GateDecision:
    """Apply the recipe's rules; the decision is written beside the report and shown as
    artifacts.
    """
    run = gate_run(loop)
    asked = Asked(
        loop.recipe, loop.budget, tuple(run.prompts), champion_to_beat(candidate, champion)
    )
    decision = decide_gate(run, report, asked)
    record_look(loop.state_dir, report, decision)
    _publish(loop, decision)
    return decision


def _publish(loop: Loop, decision: GateDecision) -> None:
    plots = loop.run_dir / "plots"
    for png in sorted(plots.glob("*.png")):
        publish_image(f"gate {png.stem}", png, description=png.stem.replace("_", " "))
    rows = [
        (r.rule, r.verdict, _number(r.value), _number(r.threshold), r.detail)
        for r in decision.rules
    ]
    table = markdown_table(("rule", "verdict", "value", "threshold", "detail"), rows)
    page = plots / "gate.html"
    words = (
        f"## Gate: **{decision.verdict}**\n\n{table}\n\nPage with tables and plots: "
        f"`{page}`, and in the MLflow run."
    )
    publish_markdown("gate decision", words, description="Gate decision")
    get_run_logger().info("the gate said %s: %s", decision.verdict, page)


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}"
