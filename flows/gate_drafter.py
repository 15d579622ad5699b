"""Measure a drafter on vLLM as served, decide, and register it when it passes."""

from __future__ import annotations

from prefect import flow

from components.contracts import CheckpointRef
from components.training.job import TrainingResult
from tasks.evaluation import (
    GateOutcome,
    decide_gate,
    measure_and_report,
    measure_arm,
    measure_further,
    measure_lengths,
    measure_train_served,
    measure_untrained,
    serve_arms,
)
from tasks.loop import open_loop
from tasks.registry import find_champion, mlflow_run_of, register_if_passed
from tasks.targets import PUBLISHED, find_target


@flow(name="gate-drafter", log_prints=True)
def gate_drafter(
    recipe: str = "demo",
    budget: str | None = None,
    target: str = PUBLISHED,
    checkpoint: CheckpointRef | None = None,
    untrained: CheckpointRef | None = None,
    compare_champion: bool = True,
) -> GateOutcome:
    """Candidate, champion (if any) and no draft over held-out prompts; then the written decision.

    Args:
        recipe, budget, target: as in `curate_data`.
        checkpoint: candidate; None takes the latest training's.
        compare_champion: measure the champion too; a re-bound drafter is its own champion, so there it is left out.
        untrained: what training is compared with, measured on a few prompts if the recipe asks for any.
    """
    with open_loop(recipe, budget=budget) as loop:
        found = find_target(loop, target)
        if checkpoint is None:
            training = loop.recall("training", TrainingResult)
            checkpoint, untrained = training.checkpoint, training.untrained
        champion = find_champion(loop) if compare_champion else None
        arms = serve_arms(loop, found, checkpoint, champion.checkpoint if champion else None)
        measured = {arm.arm: measure_arm(loop, arm) for arm in arms}
        if untrained is not None and loop.recipe.evaluation.num_untrained_prompts > 0:
            measured["untrained"] = measure_untrained(loop, found, untrained)
        further = measure_further(loop, arms) if len(loop.recipe.evaluation.temperatures) > 1 else {}
        lengths = measure_lengths(loop, found, checkpoint, arms) if loop.recipe.evaluation.draft_lengths else []
        gap = measure_train_served(loop, found, checkpoint, arms)
        report = measure_and_report(loop, found, arms, measured, further, lengths, checkpoint, gap)
        decision = decide_gate(loop, report)
        run_id = mlflow_run_of(loop, found)
        release = register_if_passed(loop, found, checkpoint, report=report, decision=decision, mlflow_run_id=run_id)
        return GateOutcome(report=report, decision=decision, release=release)
