"""Two real changes of a target, published where the watch looks, and what the loop made of each."""

from __future__ import annotations

import time
from datetime import datetime
from pathlib import Path
from uuid import UUID

from prefect import get_client, task
from prefect.cache_policies import NO_CACHE
from prefect.logging import get_run_logger

from components.contracts import ChangeAction, TargetRef, now_utc
from components.curation.sources.human_chats import human_chats
from components.errors import ConfigError, ServiceError
from components.reporting.render import markdown, write_report
from components.reporting.report import (
    ArmFigures,
    LifecycleReport,
    TargetChangeReport,
    orchestration_share,
)
from components.targets.finetune_process import finetune_in_process
from components.targets.publish import publish_target
from components.targets.quantize import quantize_int8_w8a8
from tasks.artifacts import progress_reporter, publish_image, publish_markdown
from tasks.loop import Loop
from tasks.targets import watched_path
from tasks.watch import WatchOutcome

FINETUNE_STEPS, FINETUNE_LEARNING_RATE, FINETUNE_CHATS = 40, 1e-4, 400
LIFECYCLE_TIMEOUT_S = 3600.0
POLL_S = 2.0
LOG_EVERY_S = 10.0


@task(name="quantize target to INT8 W8A8", cache_policy=NO_CACHE)
def quantize(loop: Loop, target: TargetRef) -> Path:
    """Per-channel INT8 weights, dynamic per-token INT8 activations, in compressed-tensors'
    format.
    """
    destination = loop.run_dir / "targets" / "int8-w8a8"
    with loop.stage("quantize target"):
        return quantize_int8_w8a8(
            Path(target.path), destination, progress=progress_reporter("quantize target")
        )


@task(name="fine-tune target", cache_policy=NO_CACHE)
def finetune(loop: Loop, target: TargetRef) -> Path:
    """A real fine-tune of the target's weights on human chats: its style moves, and with it its
    states.
    """
    destination = loop.run_dir / "targets" / "finetuned"
    with loop.stage("fine-tune target"):
        losses = finetune_in_process(
            Path(target.path),
            destination,
            num_steps=FINETUNE_STEPS,
            learning_rate=FINETUNE_LEARNING_RATE,
            texts=human_chats(target, num_chats=FINETUNE_CHATS),
            progress=progress_reporter("fine-tune target"),
        )
    get_run_logger().info("fine-tuned: loss %.3f -> %.3f nats per token", losses[0], losses[-1])
    return destination


@task(name="publish target", cache_policy=NO_CACHE)
def publish(loop: Loop, path: Path) -> datetime:
    """Swap the watched link: from now on this is the target in production. Returns when.

    Raises:
        ConfigError: the recipe's target is watched at its source, where nothing of ours may write.
    """
    watched = watched_path(loop.recipe, loop.state_dir)
    if watched is None or loop.recipe.watch.path:
        raise ConfigError(
            "this recipe's target is published by somebody else",
            got=f"target.source {loop.recipe.target.source}, watch.path {loop.recipe.watch.path}",
            expected="a package target without watch.path, as in configs/demo.yaml",
        )
    publish_target(path, watched=watched)
    get_run_logger().info("published %s", path.name)
    return now_utc()


@task(name="wait for lifecycle", cache_policy=NO_CACHE)
def wait_for_run(run_id: str | None, *, timeout_s: float) -> None:
    """Wait until a flow run of another process ends well; a line at least every 10 s.

    Raises:
        ServiceError: it failed, was cancelled, or takes too long.
    """
    if run_id is None:
        raise ServiceError(
            "the watch saw no change, so no lifecycle runs",
            fix="Was the same target published twice?",
        )
    log, started, logged = get_run_logger(), time.monotonic(), float("-inf")
    with get_client(sync_client=True) as client:
        while True:
            run = client.read_flow_run(UUID(run_id))
            state = run.state
            if state is not None and state.is_final():
                break
            waited_s = time.monotonic() - started
            if waited_s > timeout_s:
                raise ServiceError(
                    f"lifecycle run {run.name} takes too long", expected=f"{timeout_s:g} s at most"
                )
            if time.monotonic() - logged >= LOG_EVERY_S:
                log.info(
                    "lifecycle run %s: %s, %.0f s",
                    run.name,
                    state.name if state else "unknown",
                    waited_s,
                )
                logged = time.monotonic()
            time.sleep(POLL_S)
    if not state.is_completed():
        raise ServiceError(f"lifecycle run {run.name} ended as {state.name}", got=state.message)


@task(name="report change", cache_policy=NO_CACHE)
def change_report(
    loop: Loop, name: str, seen: WatchOutcome, published_at: datetime
) -> TargetChangeReport:
    """What the lifecycle run that just ended made of the change: old drafter, new drafter and no
    draft.
    """
    run = loop.recall("lifecycle", LifecycleReport)
    arms = run.acceptance.arms if run.acceptance else {}
    old = ArmFigures.of(arms["champion"]) if "champion" in arms else None
    if old is None and run.remeasured_acceptance_length is not None:
        # Re-bound: the same weights serve on, so their speed is the candidate's.
        speed = ArmFigures.of(arms["candidate"]).output_tokens_per_s if "candidate" in arms else {}
        old = ArmFigures(
            acceptance_length=run.remeasured_acceptance_length, output_tokens_per_s=speed
        )
    started_at = run.stages[0].started_at
    loop.timings.extend(run.stages)
    return TargetChangeReport(
        name=name,
        kinds=seen.change.kinds,
        action=run.action or ChangeAction.NOTHING,
        reason=run.policy_reason or seen.change.reason,
        released_acceptance_length=run.champion.acceptance_length if run.champion else None,
        old_drafter=old,
        new_drafter=ArmFigures.of(arms["candidate"]) if "candidate" in arms else None,
        no_draft=ArmFigures.of(arms["no_draft"]) if "no_draft" in arms else None,
        detected_s=(started_at - published_at).total_seconds(),
        stages=run.stages,
        total_s=run.total_s,
        gate=run.gate,
        canary=run.canary,
        release=run.release,
        outcome=run.outcome,
    )


@task(name="report", cache_policy=NO_CACHE)
def second_act_report(
    loop: Loop, source: TargetRef, changes: list[TargetChangeReport]
) -> LifecycleReport:
    """Both changes side by side; report.json, report.md and plots, shown as Prefect artifacts."""
    total_s = (now_utc() - loop.started_at).total_seconds()
    stages = tuple(sorted(loop.timings, key=lambda stage: stage.started_at))
    report = LifecycleReport(
        recipe=loop.recipe.name,
        budget=loop.budget,
        target=source,
        stages=stages,
        total_s=total_s,
        orchestration_share=orchestration_share(stages, total_s),
        peak_memory_mib=loop.memory.peak_mib,
        target_changes=tuple(changes),
        urls=loop.urls,
        outcome="; ".join(
            f"{change.name}: {change.action}, {change.outcome}" for change in changes
        ),
    )
    files = write_report(report, loop.run_dir / "report")
    loop.remember("second-act", report)
    publish_markdown(
        "target changes", markdown(report), description="What the loop made of two target changes"
    )
    for name, png in files.plots.items():
        publish_image(f"target changes {name}", png, description=name.replace("_", " "))
    get_run_logger().info("%s; report: %s", report.outcome, files.json)
    return report
