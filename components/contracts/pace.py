"""What a run found its machine to do, and the amounts it chose by it."""

from __future__ import annotations

from pydantic import Field

from components.contracts.record import Record


class MachineProbe(Record):
    """Figures of one machine under one recipe, measured in the first minute or two of a run."""

    engine_up_s: float = Field(
        gt=0, description="from the plain engine's start to its first answer to /health"
    )
    tokens_per_s: dict[int, float] = Field(
        min_length=1, description="answer tokens per second by requests in flight"
    )
    prompt_tokens_per_s: float = Field(gt=0, description="tokens of prompts read per second")
    training_step_s: float = Field(gt=0, description="median of a few steps, alone on the machine")
    trainer_up_s: float = Field(
        gt=0, description="from the start of the trainer's process to its first step"
    )
    duration_s: float = Field(
        ge=0, description="of the probe itself, work that was of use included"
    )


class Amounts(Record):
    """How much of everything a run does."""

    num_conversations: int
    slices: dict[str, int] = Field(
        description="evaluation prompts by slice, of those that have a number"
    )
    speed_requests_in_flight: tuple[int, ...]
    num_untrained_prompts: int
    canary_step_s: float


class PacePlan(Record):
    """What was chosen, from what, and how long it should take."""

    probe: MachineProbe
    full: Amounts = Field(description="the recipe's own")
    chosen: Amounts
    available_s: float = Field(description="left for the run when the plan was made")
    full_s: float = Field(description="expected time of the recipe's own amounts from then on")
    stages: dict[str, float] = Field(
        description="expected seconds of the chosen amounts from then on, by stage"
    )
    training_steps: int = Field(description="expected optimizer steps")
    given_up: tuple[str, ...] = Field(
        default=(), description="what is less than the recipe's own, in order"
    )
    fits: bool = Field(description="whether the chosen amounts are expected to end in time")

    @property
    def expected_s(self) -> float:
        """Expected time from the plan on."""
        return sum(self.stages.values())
