"""Two real changes of a target, published where the watch looks, and what the loop made of each."""

from __future__ import annotations

import time
from pathlib import Path
from uuid import UUID

from prefect import get_client, task
from prefect.cache_policies import NO_CACHE
from prefect.logging import get_run_logger

from components.contracts import TargetRef
from components.curation.human_chats import human_chats
from components.errors import ConfigError, ServiceError
from components.targets.finetune import finetune_target
from components.targets.publish import publish_target
from components.targets.quantize import quantize_int8_w8a8
from tasks.artifacts import progress_reporter
from tasks.loop import Loop
from tasks.targets import watched_path

FINETUNE_STEPS, FINETUNE_LEARNING_RATE, FINETUNE_CHATS = 40, 1e-4, 400
POLL_S = 2.0
LOG_EVERY_S = 10.0


@task(name="quantize target to INT8 W8A8", cache_policy=NO_CACHE)
def quantize(loop: Loop, target: TargetRef) -> Path:
    """Per-channel INT8 weights, dynamic per-token INT8 activations, in compressed-tensors' format."""
    destination = loop.run_dir / "targets" / "int8-w8a8"
    with loop.stage("quantize target"):
        return quantize_int8_w8a8(Path(target.path), destination, progress=progress_reporter("quantize target"))


@task(name="fine-tune target", cache_policy=NO_CACHE)
def finetune(loop: Loop, target: TargetRef) -> Path:
    """A real fine-tune of the target's weights on human chats: its style moves, and with it its states."""
    destination = loop.run_dir / "targets" / "finetuned"
    with loop.stage("fine-tune target"):
        losses = finetune_target(
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
def publish(loop: Loop, path: Path) -> None:
    """Swap the watched link: from now on this is the target in production.

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


@task(name="wait for lifecycle", cache_policy=NO_CACHE)
def wait_for_run(run_id: str, *, timeout_s: float) -> None:
    """Wait until a flow run of another process ends well; a line at least every 10 s.

    Raises:
        ServiceError: it failed, was cancelled, or takes too long.
    """
    log, started, logged = get_run_logger(), time.monotonic(), float("-inf")
    with get_client(sync_client=True) as client:
        while True:
            run = client.read_flow_run(UUID(run_id))
            state = run.state
            if state is not None and state.is_final():
                break
            waited_s = time.monotonic() - started
            if waited_s > timeout_s:
                raise ServiceError(f"lifecycle run {run.name} takes too long", expected=f"{timeout_s:g} s at most")
            if time.monotonic() - logged >= LOG_EVERY_S:
                log.info("lifecycle run %s: %s, %.0f s", run.name, state.name if state else "unknown", waited_s)
                logged = time.monotonic()
            time.sleep(POLL_S)
    if not state.is_completed():
        raise ServiceError(f"lifecycle run {run.name} ended as {state.name}", got=state.message)
