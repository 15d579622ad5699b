"""What only the whole loop does: decide about a changed target, re-bind, and tell the story of
the run.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

from components.contracts import (
    Arm,
    CanaryReport,
    CheckpointRef,
    DatasetRef,
    Release,
    TargetChange,
    TargetRef,
    append_line,
    digest_json,
    now_utc,
)
from components.drafter.checkpoint import rebind_checkpoint
from components.evaluation.acceptance import Measured
from components.evaluation.report import paired_acceptance_lengths
from components.registry.releases import acceptance_report_of
from components.reporting.render import markdown, write_report
from components.reporting.report import LifecycleReport, ReportedPoint, orchestration_share
from components.serving.rollout.production import ProductionEngine
from components.stages.engines import stop_drafting_engine
from components.stages.gate.in_run import GateOutcome
from components.stages.registry import registry_of
from components.stages.run import Run
from components.targets.changes import MeasuredPolicy, policy_after_measurement
from components.training.job import TrainingResult


@dataclass
class Story:
    """What happened in one lifecycle, filled in as it happens; the report is made from it."""

    target: TargetRef
    champion: Release | None
    change: TargetChange
    policy: MeasuredPolicy | None = None
    dataset: DatasetRef | None = None
    training: TrainingResult | None = None
    gate: GateOutcome | None = None
    canary: CanaryReport | None = None

    def outcome(self, serving: str) -> str:
        """One sentence: what came of the run, and what serves now.

        Args:
            serving: of `serving_now`.
        """
        if self.gate is None:
            return "stopped before the gate"
        if self.canary is None:
            return f"the gate said {self.gate.decision.verdict}: {serving}"
        release = self.gate.release
        if self.canary.promoted and release is not None:
            return f"promoted: {release.model_name} version {release.version} is champion"
        return f"the canary was rolled back ({self.canary.reason}): {serving}"


def serving_now(
    production: ProductionEngine | None, releases: Sequence[Release | None], *, url: str
) -> str:
    """What answers at the endpoint, as the record of the engine in production has it.

    Args:
        production: the engine that serves and still runs; None: there is none.
        releases: that may be the ones it serves, the latest first.
        url: of the endpoint.
    """
    if production is None:
        return f"nothing serves, {url} answers HTTP 503"
    digest = production.endpoint.checkpoint_digest
    if digest is None:
        return f"the target serves without a drafter at {url}"
    for release in releases:
        if release is not None and release.checkpoint.digest == digest:
            return f"version {release.version} of {release.model_name} serves at {url}"
    return f"the drafter {digest[:12]} serves at {url}"


def _serving(run: Run, story: Story) -> str:
    production = ProductionEngine.find(run.state_dir / "run")
    releases = (story.gate.release if story.gate else None, story.champion)
    return serving_now(production, releases, url=run.urls["chat completions"])


def decide_action(
    run: Run, change: TargetChange, champion: Release, measured: Measured
) -> MeasuredPolicy:
    """Acceptance holds: re-bind. Acceptance falls: retrain. The decision is appended to
    decisions.jsonl.
    """
    released = acceptance_report_of(registry_of(run), champion)
    evaluation = run.recipe.evaluation
    is_comparable = (released.temperature, released.max_tokens) == (
        evaluation.temperature,
        evaluation.max_tokens,
    )
    before = released.arms[Arm.CANDIDATE].prompts if is_comparable else ()

    old, new, num_prompts = paired_acceptance_lengths(before, measured.prompts)
    policy = policy_after_measurement(
        old_acceptance_length=old,
        new_acceptance_length=new,
        num_prompts=num_prompts,
        settings=run.recipe.watch,
    )

    entry = {
        "at": now_utc().isoformat(),
        "model_name": champion.model_name,
        "champion_version": champion.version,
        "change": change.model_dump(mode="json"),
        "policy": policy.model_dump(mode="json"),
    }

    append_line(
        run.state_dir / "decisions.jsonl", json.dumps({**entry, "digest": digest_json(entry)})
    )
    run.reporter.info("champion v%d: %s", champion.version, policy.reason)
    return policy


def rebind_champion(run: Run, target: TargetRef, champion: Release) -> CheckpointRef:
    """Same weights, new fingerprint: a new candidate that still has to pass gate and canary."""
    # The same weights are served again under the new binding.
    stop_drafting_engine(run, target, champion.checkpoint)
    return rebind_checkpoint(
        champion.checkpoint, target=target, destination=run.run_dir / "rebound"
    )


def write_lifecycle_report(run: Run, story: Story) -> LifecycleReport:
    """report.json, report.md and plots; the same in MLflow and as Prefect artifacts."""
    report = _build(run, story)
    files = write_report(report, run.run_dir / "report")
    run.remember("lifecycle", report)
    run.reporter.markdown("drafter report", markdown(report), description=report.outcome)
    for name, png in files.plots.items():
        run.reporter.image(f"report {name}", png, description=name.replace("_", " "))
    if run.mlflow_run_ids:
        registry_of(run).log_artifact(
            run.mlflow_run_ids[-1], run.run_dir / "report", folder="report"
        )
    run.reporter.info("%s; report: %s", report.outcome, files.json)
    return report


def _build(run: Run, story: Story) -> LifecycleReport:
    """A part is None where its stage was not reached, so that a run that failed has its report,
    too.
    """
    total_s = (now_utc() - run.started_at).total_seconds()
    stages = tuple(sorted(run.timings, key=lambda stage: stage.started_at))
    training = story.training
    gate = story.gate
    serving = _serving(run, story)

    return LifecycleReport(
        recipe=run.recipe.name,
        size=run.size,
        target=story.target,
        stages=stages,
        total_s=total_s,
        orchestration_share=orchestration_share(stages, total_s),
        dataset=story.dataset,
        stream=training.stream if training else None,
        training_curve=_curve(training) if training else (),
        checkpoint=training.checkpoint if training else None,
        calibration=training.calibration if training else None,
        acceptance=gate.report if gate else None,
        gate=gate.decision if gate else None,
        canary=story.canary,
        release=gate.release if gate else None,
        peak_memory_mib=run.memory.peak_mib,
        urls=run.urls,
        change=story.change,
        action=story.policy.action if story.policy else story.change.action,
        policy_reason=story.policy.reason if story.policy else None,
        champion=story.champion,
        remeasured_acceptance_length=story.policy.new_acceptance_length if story.policy else None,
        pace=run.plan,
        training_ended=training.ended if training else None,
        serving=serving,
        outcome=story.outcome(serving),
    )


def _curve(training: TrainingResult) -> tuple[ReportedPoint, ...]:
    """Training loss by step, with the acceptance length wherever it was validated."""
    validated = {point.step: point.acceptance_length for point in training.validation}
    loss = {point.step: point.loss for point in training.curve} | {
        p.step: p.loss for p in training.validation
    }
    return tuple(
        ReportedPoint(step=step, loss=loss[step], acceptance_length=validated.get(step))
        for step in sorted(loss)
    )
