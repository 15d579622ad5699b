"""The stream of hidden states from engine to trainer."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from components.settings.base import Settings


class StreamSettings(Settings):
    """The hidden-state stream between the extraction engine and the trainer."""

    aux_layer_ids: tuple[int, ...] = Field(
        min_length=1, description="residual stream after layer N, N >= 1"
    )
    dtype: Literal["bfloat16", "float8_e4m3fn"] = Field(
        default="bfloat16",
        description="on the wire and in the cache; float8 halves the bytes and rounds a state "
        "by 2.6 % (RMS)",
    )
    budget_mib: int = Field(
        default=256, ge=16, description="bound on store content plus reader buffers, MiB"
    )
    requests_in_flight: int = Field(default=16, ge=1)
    request_timeout_s: float = Field(default=120, gt=0)
    max_retries: int = Field(default=3, ge=0)
    engine_outage_s: float = Field(
        default=180,
        ge=0,
        description="how long an engine may be away, to start again, before the stream ends",
    )
    max_quarantine_share: float = Field(
        default=0.02, ge=0, le=1, description="above this the run stops"
    )
    check_every: int = Field(
        default=16, ge=1, description="lm_head check on one sample in this many"
    )
    min_lm_head_agreement: float = Field(
        default=0.9, ge=0, le=1, description="target argmax against its own answer"
    )
    orphan_ttl_s: float = Field(default=600, gt=0)
    protocol: Literal["tcp", "rdma"] = "tcp"
    rdma_devices: str = ""
    mode: Literal["online", "hybrid", "offline"] = Field(
        default="online",
        description="online: nothing touches a disk; hybrid: samples are kept in cache_dir and "
        "read from there when"
        " they come again; offline: all of them are read from there, without an engine",
    )
    cache_dir: str | None = Field(
        default=None, description="folder of the cache; hybrid and offline need one"
    )
    cache_gib: float = Field(
        default=16.0, gt=0, description="bound on the cache of one target and layer list, GiB"
    )

    @model_validator(mode="after")
    def _require_cache_dir(self) -> StreamSettings:
        if (self.mode == "online") != (self.cache_dir is None):
            raise ValueError(
                f"stream.mode {self.mode} {'takes no' if self.cache_dir else 'needs a'} cache_dir"
            )
        return self
