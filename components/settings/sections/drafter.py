"""The drafter's shape and start."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from components.settings.base import Settings


class DrafterSettings(Settings):
    """Shape of the drafter and where its weights start."""

    algorithm: Literal["dspark", "dflash", "eagle3"] = "dspark"
    num_layers: int = Field(default=2, ge=1)
    block_size: int = Field(
        default=5, ge=2, description="anchor plus K = block_size - 1 draft tokens"
    )
    markov_rank: int = Field(default=128, ge=0, description="0 switches the Markov head off")
    markov_head: Literal["vanilla", "gated", "rnn"] = Field(
        default="vanilla",
        description="vLLM serves vanilla only; the others can be trained and compared",
    )
    confidence_head: bool = True
    draft_vocab_size: int | None = Field(
        default=None, ge=16, description="None: the target's own vocabulary"
    )
    min_vocab_coverage: float = Field(
        default=0.98, gt=0, le=1, description="of supervised tokens in the dataset"
    )
    start: Literal["plain", "target_layers"] = "plain"
    start_layers: tuple[int, ...] = Field(
        default=(), description="target layers (from 0) copied into draft layers"
    )
    start_aux_slot: int = Field(
        default=-1, description="aux layer whose states the identity in fc passes on"
    )
    start_norm_scale: float = Field(
        default=1.0,
        gt=0,
        le=1,
        description="factor on the copied final norm; small: the backbone starts quiet",
    )
    markov_start: Literal["random", "bigrams"] = Field(
        default="random", description="bigrams: low-rank log p(next | prev) of the target itself"
    )
    mask_token_id: int | None = Field(
        default=None, description="a real id of the vocabulary; None: chosen"
    )
