"""Two real changes of a target, published where the watch looks, and what the loop made of each."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path

from components.contracts import Arm, ChangeAction, TargetRef, now_utc
from components.curation.sources.human_chats import human_chats
from components.errors import ConfigError
from components.reporting.render import markdown, write_report
from components.reporting.report import (
    ArmFigures,
    LifecycleReport,
    TargetChangeReport,
    orchestration_share,
)
from components.stages.run import Run
from components.stages.targets import WatchOutcome, watched_path
from components.targets.finetune_process import finetune_in_process
from components.targets.publish import publish_target
from components.targets.quantize import quantize_int8_w8a8

FINETUNE_STEPS, FINETUNE_LEARNING_RATE, FINETUNE_CHATS = 40, 1e-4, 400


def quantize(run: Run, target: TargetRef) -> Path:
    """Per-channel INT8 weights, dynamic per-token INT8 activations, in compressed-tensors'
    format.
    """
    destination = run.run_dir / "targets" / "int8-w8a8"
    with run.stage("quantize target"):
        return quantize_int8_w8a8(
            Path(target.path), destination, progress=run.reporter.progress("quantize target")
        )


def finetune(run: Run, target: TargetRef) -> Path:
    """A real fine-tune of the target's weights on human chats: its style moves, and with it its
    states.
    """
    destination = run.run_dir / "targets" / "finetuned"
    with run.stage("fine-tune target"):
        losses = finetune_in_process(
            Path(target.path),
            destination,
            num_steps=FINETUNE_STEPS,
            learning_rate=FINETUNE_LEARNING_RATE,
            texts=human_chats(target, num_chats=FINETUNE_CHATS),
            progress=run.reporter.progress("fine-tune target"),
        )
    run.reporter.info("fine-tuned: loss %.3f -> %.3f nats per token", losses[0], losses[-1])
    return destination


def publish(run: Run, path: Path) -> datetime:
    """Swap the watched link: from now on this is the target in production. Returns when.

    Raises:
        ConfigError: the recipe's target is watched at its source, where nothing of ours may write.
    """
    watched = watched_path(run.recipe, run.state_dir)
    if watched is None or run.recipe.watch.path:
        raise ConfigError(
            "this recipe's target is published by somebody else",
            got=f"target.source {run.recipe.target.source}, watch.path {run.recipe.watch.path}",
            expected="a package target without watch.path, as in configs/demo.yaml",
        )
    publish_target(path, watched=watched)
    run.reporter.info("published %s", path.name)
    return now_utc()


def change_report(
    run: Run, name: str, seen: WatchOutcome, published_at: datetime
) -> TargetChangeReport:
    """What the lifecycle run that just ended made of the change: old drafter, new drafter and no
    draft.
    """
    done = run.recall("lifecycle", LifecycleReport)
    arms = done.acceptance.arms if done.acceptance else {}
    old = ArmFigures.of(arms[Arm.CHAMPION]) if Arm.CHAMPION in arms else None
    if old is None and done.remeasured_acceptance_length is not None:
        # Re-bound: the same weights serve on, so their speed is the candidate's.
        speed = (
            ArmFigures.of(arms[Arm.CANDIDATE]).output_tokens_per_s if Arm.CANDIDATE in arms else {}
        )
        old = ArmFigures(
            acceptance_length=done.remeasured_acceptance_length, output_tokens_per_s=speed
        )

    started_at = done.stages[0].started_at
    run.timings.extend(done.stages)
    return TargetChangeReport(
        name=name,
        kinds=seen.change.kinds,
        action=done.action or ChangeAction.NOTHING,
        reason=done.policy_reason or seen.change.reason,
        released_acceptance_length=done.champion.acceptance_length if done.champion else None,
        old_drafter=old,
        new_drafter=ArmFigures.of(arms[Arm.CANDIDATE]) if Arm.CANDIDATE in arms else None,
        no_draft=ArmFigures.of(arms[Arm.NO_DRAFT]) if Arm.NO_DRAFT in arms else None,
        detected_s=(started_at - published_at).total_seconds(),
        stages=done.stages,
        total_s=done.total_s,
        gate=done.gate,
        canary=done.canary,
        release=done.release,
        outcome=done.outcome,
    )


def second_act_report(
    run: Run, source: TargetRef, changes: list[TargetChangeReport]
) -> LifecycleReport:
    """Both changes side by side; report.json, report.md and plots, shown as Prefect artifacts."""
    total_s = (now_utc() - run.started_at).total_seconds()
    stages = tuple(sorted(run.timings, key=lambda stage: stage.started_at))
    report = LifecycleReport(
        recipe=run.recipe.name,
        size=run.size,
        target=source,
        stages=stages,
        total_s=total_s,
        orchestration_share=orchestration_share(stages, total_s),
        peak_memory_mib=run.memory.peak_mib,
        target_changes=tuple(changes),
        urls=run.urls,
        outcome="; ".join(
            f"{change.name}: {change.action}, {change.outcome}" for change in changes
        ),
    )

    files = write_report(report, run.run_dir / "report")
    run.remember("second-act", report)
    run.reporter.markdown(
        "target changes", markdown(report), description="What the loop made of two target changes"
    )
    for name, png in files.plots.items():
        run.reporter.image(f"target changes {name}", png, description=name.replace("_", " "))

    run.reporter.info("%s; report: %s", report.outcome, files.json)
    return report
