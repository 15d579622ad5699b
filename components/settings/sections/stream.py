"""The stream of hidden states from engine to trainer."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from components.settings.base import Settings


class StreamSettings(Settings):
    """The stream of hidden states from the extraction engine, through the store, to the trainer.

    The budget bounds memory whatever the speed of either side; the checks stop a run whose states
    are not the target's before it trains on them.
    """

    aux_layer_ids: tuple[int, ...] = Field(
        min_length=1,
        description="Layers whose states the drafter reads: N is the residual stream after layer"
        " N, from 1 to one below the target's number of layers, each once. Three to five, spread"
        " over the depth, are usual.",
    )
    dtype: Literal["bfloat16", "float8_e4m3fn"] = Field(
        default="bfloat16",
        description="Format of the states on the wire and in the cache; float8_e4m3fn halves the"
        " bytes and rounds a state by 2.6 % (root mean square).",
    )
    budget_mib: int = Field(
        default=256,
        ge=16,
        description="Memory in MiB that the samples of one trainer process may take, in the store"
        " and in its own buffers together. Seven sixteenths of it must hold the longest sample,"
        " and `mooncake_segment_mib` a little more than that; raise it where the trainer waits.",
    )
    requests_in_flight: int = Field(
        default=16,
        ge=1,
        description="Prefill requests that one trainer process keeps open at the engine; raise it"
        " where the engine's batches are small and the budget is not used up.",
    )
    request_timeout_s: float = Field(
        default=120,
        gt=0,
        description="Seconds that one prefill request may take, queue included; after that it"
        " counts as failed and is sent again.",
    )
    max_retries: int = Field(
        default=3,
        ge=0,
        description="How often a failed or damaged sample is asked for again. After that a damaged"
        " one is left out (quarantined), and a failed request ends the run.",
    )
    engine_outage_s: float = Field(
        default=180,
        ge=0,
        description="Seconds that the extraction engine may be away, to start again, before the"
        " stream ends; an outage costs no retry.",
    )
    max_quarantine_share: float = Field(
        default=0.02,
        ge=0,
        le=1,
        description="Share of samples that may be left out as damaged before the run stops; above"
        " 0 a single one is always forgiven.",
    )
    check_every: int = Field(
        default=16,
        ge=1,
        description="One sample in this many is checked closely: whether the target's head makes"
        " its own next tokens of the states, and whether the store kept the sample on a disk.",
    )
    min_lm_head_agreement: float = Field(
        default=0.9,
        ge=0,
        le=1,
        description="Share of checked positions at which the target's head, applied to the states,"
        " must say the token that the engine said; below it the run stops, because states and"
        " target do not belong together.",
    )
    orphan_ttl_s: float = Field(
        default=600,
        gt=0,
        description="Seconds after which the engine removes a sample that nobody read, so that a"
        " killed trainer leaves an empty store; keep it above the longest pause between reads.",
    )
    mode: Literal["online", "hybrid", "offline"] = Field(
        default="online",
        description="Where samples come from: `online` streams all of them and keeps nothing on"
        " disk; `hybrid` keeps them in `cache_dir` and reads from there what comes again;"
        " `offline` reads everything from there, without an engine.",
    )
    cache_dir: str | None = Field(
        default=None,
        description="Folder of the cached states. The modes hybrid and offline need one; online"
        " takes none and leaves it null.",
    )
    cache_gib: float = Field(
        default=16.0,
        gt=0,
        description="Most GiB that the cached states of one target, layer list and format may"
        " take; a full cache adds nothing and drops nothing.",
    )

    @model_validator(mode="after")
    def _require_cache_dir(self) -> StreamSettings:
        if (self.mode == "online") != (self.cache_dir is None):
            raise ValueError(
                f"stream.mode {self.mode} {'takes no' if self.cache_dir else 'needs a'} cache_dir"
            )
        return self
