"""What only the whole loop does: re-measure, re-bind, and tell the story of the run."""

from __future__ import annotations

from dataclasses import dataclass
from prefect import task
from prefect.cache_policies import NO_CACHE
from prefect.logging import get_run_logger

from components.contracts import (
    CanaryReport,
    CheckpointRef,
    DatasetRef,
    PolicyDecision,
    Release,
    TargetChange,
    TargetRef,
    append_line,
    now_utc,
)
from components.drafter.checkpoint import rebind_checkpoint
from components.errors import RegistryError
from components.evaluation.acceptance import Measured
from components.evaluation.statistics import acceptance_length
from components.reporting.report import LifecycleReport, markdown, render_terminal, write_report
from components.targets.changes import policy_after_measurement
from components.training.job import TrainingResult
from tasks.artifacts import publish_image, publish_markdown
from tasks.evaluation import GateOutcome
from tasks.loop import Loop


@dataclass
class Story:
    """What happened in one lifecycle, filled in as it happens; the report is made from it."""

    target: TargetRef | None = None
    champion: Release | None = None
    change: TargetChange | None = None
    policy: PolicyDecision | None = None
    dataset: DatasetRef | None = None
    training: TrainingResult | None = None
    gate: GateOutcome | None = None
    canary: CanaryReport | None = None


@task(name="decide after measurement", cache_policy=NO_CACHE)
def decide_action(loop: Loop, change: TargetChange, champion: Release, measured: Measured) -> PolicyDecision:
    """Acceptance holds: re-bind. Acceptance falls: retrain. The decision is appended to decisions.jsonl."""
    if champion.acceptance_length is None:
        raise RegistryError(f"release {champion.model_name} v{champion.version} carries no acceptance length")
    now = acceptance_length(measured.prompts)
    action = policy_after_measurement(
        old_acceptance_length=champion.acceptance_length, new_acceptance_length=now, settings=loop.recipe.watch
    )
    decision = PolicyDecision(
        model_name=champion.model_name,
        champion_version=champion.version,
        kinds=change.kinds,
        old_acceptance_length=champion.acceptance_length,
        new_acceptance_length=now,
        required_share=loop.recipe.watch.rebind_acceptance_share,
        action=action,
        created_at=now_utc(),
    )
    append_line(loop.state_dir / "decisions.jsonl", decision.model_dump_json())
    get_run_logger().info(
        "champion v%d on the changed target: acceptance length %.3f, its release %.3f -> %s",
        champion.version,
        now,
        champion.acceptance_length,
        action,
    )
    return decision


@task(name="re-bind champion", cache_policy=NO_CACHE)
def rebind_champion(loop: Loop, target: TargetRef, champion: Release) -> CheckpointRef:
    """Same weights, new fingerprint: a new candidate that still has to pass gate and canary."""
    return rebind_checkpoint(champion.checkpoint, target=target, destination=loop.run_dir / "rebound")
