"""Measure a drafter on vLLM as served, decide, and register it when it passes."""

from __future__ import annotations

from prefect import flow

from components.contracts import CheckpointRef
from components.stages.gate.in_run import GateOutcome, measure_arms
from components.stages.targets import PUBLISHED
from components.training.job import TrainingResult
from flows.flow_run.run import run_of
from tasks.gate import as_task, decide_on
from tasks.registry import find_champion, mlflow_run_of, register_if_passed
from tasks.targets import find_target


@flow(name="gate-drafter", log_prints=True)
def gate_drafter(
    recipe: str = "demo",
    size: str | None = None,
    target: str = PUBLISHED,
    checkpoint: CheckpointRef | None = None,
    untrained: CheckpointRef | None = None,
) -> GateOutcome:
    """Candidate, champion (if it is another drafter) and no draft over held-out prompts; then the
    written decision.

    Args:
        recipe, size, target: as in `curate_data`.
        checkpoint: candidate; None takes the latest training's.
        untrained: what training is compared with, measured on a few prompts if the recipe asks for
            any.
    """
    with run_of(recipe, size=size) as run:
        found = find_target(run, target)
        if checkpoint is None:
            training = run.recall("training", TrainingResult)
            checkpoint, untrained = training.checkpoint, training.untrained
        release = find_champion(run)
        champion = release.checkpoint if release else None

        report = measure_arms(
            run, found, checkpoint, champion=champion, untrained=untrained, step=as_task
        )
        decision = decide_on(run, report, checkpoint, champion)

        run_id = mlflow_run_of(run, found)
        registered = register_if_passed(
            run,
            found,
            checkpoint,
            champion=champion,
            report=report,
            decision=decision,
            mlflow_run_id=run_id,
        )
        return GateOutcome(report=report, decision=decision, release=registered)
