"""What is measured of the served drafters."""

from __future__ import annotations

import re
from typing import Annotated, Self

from pydantic import Discriminator, Field, Tag, model_validator

from components.contracts import RivalMethod
from components.settings.base import Settings
from components.settings.sections.evaluation_slice import SliceSettings, WarmPrefixSettings


def _kind_of_slice(value: object) -> str:
    return "source" if isinstance(value, dict | SliceSettings) else "number"


Slice = Annotated[
    Annotated[int, Tag("number")] | Annotated[SliceSettings, Tag("source")],
    Discriminator(_kind_of_slice),
]
"""A number of a built-in slice's prompts, or a source; told apart first, so that errors are of the
one that was meant."""


class EvaluationSettings(Settings):
    """What is measured of the drafters as vLLM serves them: the evidence that the gate decides on.

    Every arm (candidate, champion, no draft) answers the same prompts. Further temperatures, draft
    lengths and rivals cost time and, but for the temperatures, one more engine each.
    """

    slices: dict[str, Slice] = Field(
        description="Prompts per held-out slice: a number for a built-in one (mt_bench, humaneval,"
        " gsm_symbolic, conversations), or a source of one's own, as"
        " `ours: {kind: file, path: ./prompts.jsonl, num_prompts: 40}`."
    )
    warm_prefix: WarmPrefixSettings | None = Field(
        default=None,
        description="Questions on one long shared prefix, cold and warm, for each arm; null does"
        " not measure them.",
    )
    max_tokens: int = Field(
        default=96,
        ge=8,
        description="Longest answer in tokens, wherever acceptance or speed is measured.",
    )
    temperatures: tuple[float, ...] = Field(
        default=(0.0,),
        min_length=1,
        description="Sampling temperatures: the first is measured in full, the others on"
        " `num_sampled_prompts` prompts. Above 0 outputs are compared by draws.",
    )
    num_sampled_prompts: int = Field(
        default=16,
        ge=2,
        description="Prompts, spread over all slices, for each further temperature and each of"
        " `draft_lengths`.",
    )
    acceptance_requests_in_flight: int = Field(
        default=4,
        ge=1,
        description="Requests in flight while acceptance and draws are measured.",
    )
    speed_requests_in_flight: tuple[int, ...] = Field(
        default=(1, 4, 8),
        description="Loads that speed is measured at, in requests in flight; the schedule of draft"
        " tokens is chosen from them, so name those that production sees.",
    )
    speed_requests: int = Field(
        default=4,
        ge=1,
        description="Requests per arm and round, each round other prompts; a round with more in"
        " flight sends as many as those.",
    )
    speed_repeats: int = Field(
        default=6,
        ge=1,
        description="Interleaved rounds at each load. They are the units of `gate.min_speedup`:"
        " one round decides nothing, and many small ones decide more than a few large ones."
        " Medians are shown.",
    )
    draft_lengths: tuple[int, ...] = Field(
        default=(),
        description="Numbers of draft tokens below the drafter's own to measure too, each on one"
        " more engine: acceptance over `num_sampled_prompts`, and speed. The release's schedule"
        " takes the fastest at each load.",
    )
    rivals: tuple[RivalMethod, ...] = Field(
        default=(),
        description="Ways of drafting without a drafter to measure beside the candidate, each on"
        " one more engine over all prompts: `ngram`, and `suffix`, which needs the package"
        " arctic-inference. What comes of it is told and decides nothing.",
    )
    rival_draft_tokens: int = Field(
        default=5,
        ge=1,
        description="Most draft tokens of a rival per target step.",
    )
    ngram_lookup: tuple[int, int] = Field(
        default=(2, 5),
        description="Shortest and longest run of tokens that the rival `ngram` looks up.",
    )
    num_untrained_prompts: int = Field(
        default=8,
        ge=0,
        description="Least number of prompts that the untrained drafter is measured on, to show"
        " what training is worth; 0 does not measure it and saves an engine's start.",
    )
    num_gap_prompts: int = Field(
        default=16,
        ge=1,
        description="Least number of prompts, spread over all slices, for"
        " `gate.max_train_served_gap`, where that is set.",
    )
    max_excluded_share: float = Field(
        default=0.1,
        ge=0,
        lt=1,
        description="Share of the prompts that the engine may refuse as too long; they are left"
        " out of every arm, and more of them are an error.",
    )
    measure_schedule: bool = Field(
        default=False,
        description="Whether the speed of the schedule that would be shipped is measured itself,"
        " on one more engine; without that it is taken from the lengths it is made of.",
    )
    prompts_per_checkpoint: int = Field(
        default=64,
        ge=1,
        description="Prompts that are checked and kept together while acceptance is measured: what"
        " an engine that dies costs at most.",
    )
    num_draw_prompts: int = Field(
        default=4,
        ge=1,
        description="Prompts whose first tokens are drawn many times at each temperature above 0,"
        " with the drafter and without it, for the test of losslessness there.",
    )
    num_draws: int = Field(
        default=128,
        ge=20,
        description="Draws of each of those prompts on each of the two engines; more find smaller"
        " differences.",
    )
    draw_tokens: int = Field(
        default=4,
        ge=2,
        description="Tokens of each draw; the first comes from the prefill and never from a draft.",
    )

    @model_validator(mode="after")
    def _named(self) -> Self:
        # Names stand before the slash of every prompt id, in file names and on the page.
        bad = [name for name in self.slices if not re.fullmatch(r"[A-Za-z0-9_.-]+", name)]
        if bad:
            raise ValueError(f"slices: '{bad[0]}' is no name of letters, digits, '_', '.' and '-'")
        return self

    @model_validator(mode="after")
    def _distinct(self) -> Self:
        if min(self.temperatures) < 0 or len(set(self.temperatures)) != len(self.temperatures):
            raise ValueError("temperatures must differ and not be negative")
        if min(self.draft_lengths, default=1) < 1 or len(set(self.draft_lengths)) != len(
            self.draft_lengths
        ):
            raise ValueError("draft_lengths must differ and be at least 1")
        if len(set(self.rivals)) != len(self.rivals):
            raise ValueError("rivals must differ")
        if not 1 <= self.ngram_lookup[0] <= self.ngram_lookup[1]:
            raise ValueError("ngram_lookup must be two lengths of at least 1, the shorter first")
        return self

    @property
    def num_prompts_by_slice(self) -> dict[str, int]:
        """Prompts asked for, by slice, whether built-in or one's own."""
        return {
            name: one.num_prompts if isinstance(one, SliceSettings) else one
            for name, one in self.slices.items()
        }

    @property
    def own_slices(self) -> dict[str, SliceSettings]:
        """The slices with a source of one's own."""
        return {n: one for n, one in self.slices.items() if isinstance(one, SliceSettings)}

    @property
    def temperature(self) -> float:
        """The one that all prompts, the losslessness check and the speed are measured at."""
        return self.temperatures[0]
