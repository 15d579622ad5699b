"""Extraction engine and trainer, at the same time."""

from __future__ import annotations

import json
import uuid
from pathlib import Path

from components.contracts import CheckpointRef, DatasetRef, TargetRef
from components.errors import FingerprintMismatchError
from components.hidden_states.store import sweep_run
from components.pace.plan import training_limit
from components.reporting.calibration_plots import reliability_diagram
from components.serving.engines.command import resolve_device
from components.serving.engines.keeper import EngineKeeper
from components.settings import TrainingSettings
from components.stages.engines import extraction_engine, extraction_key
from components.stages.registry import registry_of
from components.stages.run import Run
from components.training.job import TrainingJob, TrainingResult
from components.training.launch import run_trainer

TRAINER_TIMEOUT_S = 7 * 24 * 3600.0


def train_on_stream(
    run: Run,
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

    Not retried: a run that fails here trains anew when its flow is run again.
    """
    stream_run_id = f"{run.recipe.target.name}-{uuid.uuid4().hex[:12]}"
    with run.stage("train") as clock:
        engine, keeper = None, None
        if run.recipe.stream.mode != "offline":
            engine = extraction_engine(
                run,
                target,
                stream_run_id=stream_run_id,
                num_hidden_layers=_num_hidden_layers(Path(target.path)),
            )
            keeper = EngineKeeper(
                run.engines,
                extraction_key(target, stream_run_id),
                engine,
                on_restart=lambda number: run.reporter.warning(
                    "the extraction engine died; restart %d", number
                ),
            )
        job = TrainingJob(
            drafter=run.recipe.drafter,
            training=_within_pace(run),
            stream=run.recipe.stream,
            target=target,
            dataset=dataset,
            engine_urls=(engine.url,) if engine else (),
            model=target.name,
            store=run.endpoints.store,
            stream_run_id=stream_run_id,
            tracking_uri=run.endpoints.mlflow_url,
            mlflow_run_id=mlflow_run_id,
            output_dir=str(run.run_dir / "training"),
            parent=parent,
            engine_timeout_s=run.recipe.engine.startup_timeout_s,
        )
        try:
            # The trainer starts, and builds its drafter, while the engine starts.
            result = run_trainer(
                job,
                device=resolve_device(run.recipe.engine),
                on_line=run.reporter.child("training"),
                timeout_s=TRAINER_TIMEOUT_S,
                check=keeper.check if keeper else None,
            )
        finally:
            if engine is not None:
                run.engines.stop(extraction_key(target, stream_run_id))
            sweep_run(run.endpoints.store, stream_run_id)
        clock.num_tokens = result.stream.num_tokens

    tell = run.reporter.warning if result.stopped_by == "time" else run.reporter.info
    tell("training %s", result.ended)
    run.remember("training", result)
    if result.calibration is not None:
        png = reliability_diagram(result.calibration, run.run_dir / "plots" / "reliability.png")
        run.reporter.image(
            "confidence head reliability", png, description="Calibration of the confidence head"
        )
        registry_of(run).log_artifact(mlflow_run_id, png, folder="training")

    return result


def _within_pace(run: Run) -> TrainingSettings:
    """The recipe's training; with a limit on its time, where the run goes by the machine's pace."""
    training = run.recipe.training
    plan = run.plan
    if plan is None:
        return training

    limit_s = round(training_limit(plan, left_s=run.left_s))
    run.reporter.info(
        "pace: training should take %.0f s for %d steps, and ends after %d s in any case",
        plan.stages["train"],
        plan.training_steps,
        limit_s,
    )

    own_s = training.max_trainer_s
    return training.model_copy(
        update={"max_trainer_s": limit_s if own_s is None else min(own_s, limit_s)}
    )


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


def _num_hidden_layers(target_path: Path) -> int:
    return int(json.loads((target_path / "config.json").read_text())["num_hidden_layers"])
