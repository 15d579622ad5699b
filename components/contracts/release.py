"""Registered versions of a drafter, and the log of which one an alias stood on."""

from __future__ import annotations

from datetime import datetime

from pydantic import Field

from components.contracts.checkpoint import CheckpointRef
from components.contracts.record import Record
from components.contracts.serving.arms import Schedule
from components.contracts.target import TargetRef


class Release(Record):
    """One registered version of a drafter, as it may be served."""

    model_name: str
    version: int
    checkpoint: CheckpointRef
    target: TargetRef
    gate_digest: str
    run_id: str
    speculative_schedule: Schedule = ()
    drafter_out_above: int | None = Field(
        default=None, description="as `GateDecision.drafter_out_above`"
    )
    acceptance_length: float | None = Field(
        default=None, description="as the gate measured it on `target`"
    )


class Promotion(Record):
    """One entry of a model's append-only promotions log; `previous_digest` chains it to the entry
    before.
    """

    index: int = Field(description="from 1")
    model_name: str
    alias: str = Field(description="champion, challenger, ...")
    from_version: int | None = Field(
        description="version the alias stood on before; None: it was not set"
    )
    to_version: int | None = Field(description="version it stands on now; None: it was removed")
    reason: str
    decision_digest: str = Field(description="of the gate decision or canary report that led to it")
    previous_digest: str | None = Field(description="digest of entry index - 1; None for the first")
    created_at: datetime
