"""The gate as a part of a run: measure the arms as served, decide, show it."""

from __future__ import annotations

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
from components.reporting.markdown_table import markdown_table
from components.stages.gate.conduct import decide_gate, measure_gate, remeasure_champion
from components.stages.gate.looks import next_look, record_look
from components.stages.gate.run import Contest, GateRun, Step, at_once
from components.stages.gate.same_weights import champion_to_beat
from components.stages.prompts import prompts_of
from components.stages.run import Run


class GateOutcome(Record):
    """What the gate hands on: the measurement, the decision, and the release if it passed."""

    report: AcceptanceReport
    decision: GateDecision
    release: Release | None


def gate_run(run: Run) -> GateRun:
    """The gate's part of this run."""
    return GateRun(
        recipe=run.recipe,
        size=run.size,
        prompts=prompts_of(run.recipe),
        engines=run.engines,
        cache_dir=run.state_dir,
        out_dir=run.run_dir,
        stage=run.stage,
        progress_of=run.reporter.progress,
        tell=run.reporter.info,
    )


def measure_arms(
    run: Run,
    target: TargetRef,
    candidate: CheckpointRef,
    *,
    champion: CheckpointRef | None,
    untrained: CheckpointRef | None,
    step: Step = at_once,
) -> AcceptanceReport:
    """All arms of a gate. A champion with the candidate's weights is left out: it is no rival.

    Args:
        run: the gate belongs to it.
        target: that all arms serve.
        candidate: the drafter to decide on.
        champion: the one in service.
        untrained: what training is compared with.
        step: does each step; see `Step`.

    Raises:
        EvaluationError, EngineError, TrainingError: an arm could not be measured.
    """
    rival = champion if champion_to_beat(candidate, champion) else None
    look = next_look(run.state_dir, target.fingerprint, candidate)
    return measure_gate(gate_run(run), Contest(target, candidate, rival, untrained, look), step)


def measure_champion(run: Run, target: TargetRef, champion: CheckpointRef) -> Measured:
    """The champion on a target it is not bound to: what the target's change did to it."""
    return remeasure_champion(gate_run(run), target, champion)


def decide_on(
    run: Run, report: AcceptanceReport, candidate: CheckpointRef, champion: CheckpointRef | None
) -> GateDecision:
    """Apply the recipe's rules; the decision is written beside the report and shown."""
    gate = gate_run(run)
    to_beat = champion_to_beat(candidate, champion)
    decision = decide_gate(gate, report, Asked(run.recipe, run.size, tuple(gate.prompts), to_beat))
    record_look(run.state_dir, report, decision)
    _publish(run, decision)
    return decision


def _publish(run: Run, decision: GateDecision) -> None:
    plots = run.run_dir / "plots"
    for png in sorted(plots.glob("*.png")):
        run.reporter.image(f"gate {png.stem}", png, description=png.stem.replace("_", " "))

    rows = [
        (r.rule, r.verdict, _number(r.value), _number(r.threshold), r.detail)
        for r in decision.rules
    ]
    table = markdown_table(("rule", "verdict", "value", "threshold", "detail"), rows)
    page = plots / "gate.html"
    words = (
        f"## Gate: **{decision.verdict}**\n\n{table}\n\n"
        f"Page with tables and plots: `{page}`, and in the MLflow run."
    )
    run.reporter.markdown("gate decision", words, description="Gate decision")
    run.reporter.info("the gate said %s: %s", decision.verdict, page)


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}"
