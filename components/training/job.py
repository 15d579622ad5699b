"""What a trainer process is given and what it hands back, as JSON files."""

from __future__ import annotations

from typing import Self

from pydantic import Field, model_validator

from components.contracts import (
    Calibration,
    CheckpointRef,
    DatasetRef,
    Record,
    StoreEndpoint,
    StreamReport,
    TargetRef,
)
from components.settings import DrafterSettings, StreamSettings, TrainingSettings

RESULT_FILE = "result.json"
"""Written last into a job's output folder."""


class TrainingJob(Record):
    """One training run."""

    drafter: DrafterSettings
    training: TrainingSettings
    stream: StreamSettings
    target: TargetRef
    dataset: DatasetRef
    engine_urls: tuple[str, ...] = Field(
        description="extraction engines, base URLs without /v1; none where all states are read "
        "from the cache"
    )
    model: str = Field(description="served model name of the engines")
    engine_timeout_s: float = Field(
        default=300.0,
        gt=0,
        description="for engines that are still starting; the drafter is built meanwhile",
    )
    store: StoreEndpoint
    stream_run_id: str = Field(description="as the engines' connector was given it")
    tracking_uri: str | None = Field(default=None, description="MLflow; None: no live metrics")
    mlflow_run_id: str | None = None
    output_dir: str = Field(description="state, checkpoints and result.json")
    parent: CheckpointRef | None = Field(
        default=None, description="champion whose weights are the start"
    )
    resume: bool = Field(
        default=False, description="continue from the newest state in output_dir, if there is one"
    )
    num_threads: int | None = Field(
        default=None, ge=1, description="CPU threads; None: torch decides"
    )

    @model_validator(mode="after")
    def _require_engines(self) -> Self:
        if (self.stream.mode == "offline") != (not self.engine_urls):
            raise ValueError(
                f"{len(self.engine_urls)} extraction engines in stream mode {self.stream.mode}"
            )
        return self


class CurvePoint(Record):
    """Training figures, means since the point before."""

    step: int
    elapsed_s: float
    num_tokens: int = Field(description="streamed tokens trained on so far")
    loss: float
    acceptance_length: float = Field(
        description="greedy, teacher-forced, on the training blocks, with the bonus token"
    )
    expected_acceptance_length: float = Field(
        description="by rejection sampling, from the distributions"
    )
    learning_rate: float
    grad_norm: float
    wait_share: float = Field(description="share of time spent waiting for states, 0 to 1")


class ValidationPoint(Record):
    """Teacher-forced figures on the validation packs, every supervised token an anchor; lengths
    count the bonus.
    """

    step: int
    elapsed_s: float
    num_anchors: int
    loss: float
    acceptance_length: float = Field(description="greedy, mean over anchors")
    acceptance_interval: tuple[float, float] = Field(
        description="95 %, bootstrap over conversations"
    )
    walked_acceptance_length: float = Field(
        description="greedy, tokens per step when each answer is walked as served"
    )
    expected_acceptance_length: float = Field(
        description="by rejection sampling at temperature 1, mean over anchors"
    )
    expected_interval: tuple[float, float] | None = None
    acceptance_by_position: tuple[float, ...] = Field(
        description="share of anchors whose drafts 1..k are all accepted"
    )
    interval_by_position: tuple[tuple[float, float], ...] = ()
    acceptance_by_slice: dict[str, float] = Field(
        default_factory=dict, description="greedy, by source of the conversations"
    )
    interval_by_slice: dict[str, tuple[float, float]] = Field(default_factory=dict)


class TrainingResult(Record):
    """What a finished training run hands back; `checkpoint` is the one of longest greedy
    acceptance.
    """

    checkpoint: CheckpointRef
    untrained: CheckpointRef = Field(
        description="the same drafter with random weights, or the parent as it was"
    )
    stream: StreamReport
    curve: tuple[CurvePoint, ...]
    validation: tuple[ValidationPoint, ...]
    num_steps: int
    num_trained_tokens: int
    trainer_s: float = Field(description="wall time of the loop, waits and validation included")
    wait_s: float = Field(description="of it, waiting for hidden states")
    draft_vocab_coverage: dict[str, float] = Field(
        description="share of supervised tokens by split; empty: not pruned"
    )
    calibration: Calibration | None = Field(
        default=None, description="of the checkpoint's confidence head, if it has one"
    )
    stopped_by: str = Field(description="'data', 'steps', 'time' or 'acceptance'")
    num_planned_steps: int | None = Field(
        default=None,
        description="steps that all data would have taken; told where time ended training "
        "before them",
    )

    @property
    def ended(self) -> str:
        """Where training ended, and by what."""
        if self.stopped_by == "time":
            of = f" of about {self.num_planned_steps}" if self.num_planned_steps else ""
            return f"cut short at step {self.num_steps}{of} by training.max_trainer_s"
        by = {"data": "with its data", "steps": "by training.num_steps"}.get(
            self.stopped_by, "because acceptance no longer grew"
        )
        return f"ended {by} at step {self.num_steps}"
