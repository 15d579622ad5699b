"""Extraction engine and trainer, at the same time."""

from __future__ import annotations

import json
import logging
import re
import uuid
from collections.abc import Callable
from pathlib import Path

from prefect import task
from prefect.cache_policies import NO_CACHE
from prefect.logging import get_run_logger

from components.contracts import CheckpointRef, DatasetRef, TargetRef
from components.errors import FingerprintMismatchError
from components.hidden_states.store import sweep_run
from components.pace.plan import training_limit
from components.reporting.calibration_plots import reliability_diagram
from components.serving.engines.command import resolve_device
from components.serving.engines.keeper import EngineKeeper
from components.settings import TrainingSettings
from components.stages.engines import extraction_engine, extraction_key
from components.training.job import TrainingJob, TrainingResult
from components.training.launch import run_trainer
from tasks.artifacts import progress_artifact, publish_image
from tasks.loop import Loop
from tasks.registry import registry_of

_PERCENT = re.compile(r"training\s+(\d+) %")
TRAINER_TIMEOUT_S = 7 * 24 * 3600.0


@task(
    name="train on streamed hidden states", cache_policy=NO_CACHE, timeout_seconds=TRAINER_TIMEOUT_S
)
def train_on_stream(
    loop: Loop,
    target: TargetRef,
    dataset: DatasetRef,
    *,
    parent: CheckpointRef | None,
    mlflow_run_id: str,
) -> TrainingResult:
    """Engine -> connector -> Mooncake -> trainer process; every state is used once and nothing
    touches disk.

    With `stream.mode` hybrid, states are kept on disk too and read from there when they come again;
    with offline all of them are, and no engine runs.

    Not retried by Prefect: the trainer resumes from its own checkpoint when the flow runs again.
    """
    stream_run_id = f"{loop.recipe.target.name}-{uuid.uuid4().hex[:12]}"
    log = get_run_logger()
    with loop.stage("train") as clock:
        engine, keeper = None, None
        if loop.recipe.stream.mode != "offline":
            engine = extraction_engine(
                loop,
                target,
                stream_run_id=stream_run_id,
                num_hidden_layers=_num_hidden_layers(Path(target.path)),
            )
            keeper = EngineKeeper(
                loop.engines,
                extraction_key(target, stream_run_id),
                engine,
                on_restart=lambda number: log.warning(
                    "the extraction engine died; restart %d", number
                ),
            )
        job = TrainingJob(
            drafter=loop.recipe.drafter,
            training=_within_pace(loop),
            stream=loop.recipe.stream,
            target=target,
            dataset=dataset,
            engine_urls=(engine.url,) if engine else (),
            model=target.name,
            store=loop.endpoints.store,
            stream_run_id=stream_run_id,
            tracking_uri=loop.endpoints.mlflow_url,
            mlflow_run_id=mlflow_run_id,
            output_dir=str(loop.run_dir / "training"),
            parent=parent,
            engine_timeout_s=loop.recipe.engine.startup_timeout_s,
        )
        try:
            # The trainer starts, and builds its drafter, while the engine starts.
            result = run_trainer(
                job,
                device=resolve_device(loop.recipe.engine),
                on_line=_shown(log.info),
                timeout_s=TRAINER_TIMEOUT_S,
                check=keeper.check if keeper else None,
            )
        finally:
            if engine is not None:
                loop.engines.stop(extraction_key(target, stream_run_id))
            sweep_run(loop.endpoints.store, stream_run_id)
        clock.num_tokens = result.stream.num_tokens
    log.log(
        logging.WARNING if result.stopped_by == "time" else logging.INFO,
        "training %s",
        result.ended,
    )
    loop.remember("training", result)
    if result.calibration is not None:
        png = reliability_diagram(result.calibration, loop.run_dir / "plots" / "reliability.png")
        publish_image(
            "confidence head reliability", png, description="Calibration of the confidence head"
        )
        registry_of(loop).log_artifact(mlflow_run_id, png, folder="training")
    return result


def _within_pace(loop: Loop) -> TrainingSettings:
    """The recipe's training; with a limit on its time, where the run goes by the machine's pace."""
    training, plan = loop.recipe.training, loop.plan
    if plan is None:
        return training
    limit_s = round(training_limit(plan, left_s=loop.left_s))
    get_run_logger().info(
        "pace: training should take %.0f s for %d steps, and ends after %d s in any case",
        plan.stages["train"],
        plan.training_steps,
        limit_s,
    )
    own_s = training.max_trainer_s
    return training.model_copy(
        update={"max_trainer_s": limit_s if own_s is None else min(own_s, limit_s)}
    )


@task(name="check dataset", cache_policy=NO_CACHE)
def require_same_target(dataset: DatasetRef, target: TargetRef) -> None:
    """Refuse a dataset whose answers another target wrote.

    Raises:
        FingerprintMismatchError: the dataset is bound to another target.
    """
    if dataset.fingerprint != target.fingerprint:
        raise FingerprintMismatchError(
            "the dataset was written by another target",
            got=f"dataset {dataset.digest[:12]} of target {dataset.fingerprint.digest[:12]}",
            expected=f"target {target.fingerprint.digest[:12]}",
            fix="Run the deployment curate-data for this target.",
        )


def _shown(log: Callable[[str], None]) -> Callable[[str], None]:
    """Log the trainer's lines, and keep a progress artifact at the latest one that says how far it
    is.
    """
    show = progress_artifact("training")

    def on_line(line: str) -> None:
        log(line)
        if (match := _PERCENT.match(line)) is not None:
            show(float(match[1]), line.strip())

    return on_line


def _num_hidden_layers(target_path: Path) -> int:
    return int(json.loads((target_path / "config.json").read_text())["num_hidden_layers"])
