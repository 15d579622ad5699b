"""How long a run may take, and what it may give up for it."""

from __future__ import annotations

from pydantic import Field

from components.settings.base import Settings


class PaceSettings(Settings):
    """A run that takes its amounts from the machine: the recipe's own are the most it does.

    The machine is probed once the plain engine is up; what is chosen is said before it is done.
    Given up are, in this order: conversations with their share of training, speed at loads other
    than `gate.serving_requests_in_flight`, the untrained drafter, prompts per slice, length of a
    canary step. Rules and their levels never.
    """

    ends_within_s: float = Field(
        gt=0,
        description="Seconds from the start of the command to its last line; set-up counts where"
        " the flow is told when the command began, as `make demo` does.",
    )
    min_conversations: int = Field(
        default=200,
        ge=8,
        description="Conversations below which no drafter worth measuring is trained; training"
        " goes down with them.",
    )
    min_prompts_per_slice: int = Field(
        default=8,
        ge=2,
        description="Evaluation prompts that each built-in slice keeps, or all of a smaller one;"
        " slices of one's own are never shortened.",
    )
    min_canary_step_s: float = Field(
        default=6.0,
        gt=0,
        description="Seconds that each step of the canary keeps.",
    )
    probe_s: float = Field(
        default=15.0,
        gt=0,
        le=60,
        description="Seconds for which the engine's rate is watched under as many requests as"
        " curation has in flight; the load that acceptance is measured at is watched for three"
        " tenths of that.",
    )
    probe_steps: int = Field(
        default=3,
        ge=1,
        le=20,
        description="Training steps that are timed, after one that is not; their median counts.",
    )
