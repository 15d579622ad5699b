"""The drafter's shape and start."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from components.settings.base import Settings


class DrafterSettings(Settings):
    """Shape of the drafter, and where its weights start.

    A retrain after a measured change of the target starts from the release's weights and draft
    vocabulary instead: then the keys of the start (`start`, `start_*`, `markov_start`) do nothing,
    and the shape must be the release's.
    """

    algorithm: Literal["dspark", "dflash", "eagle3"] = Field(
        default="dspark",
        description="Kind of drafter: `dspark` drafts a block in one pass with Markov and"
        " confidence heads, `dflash` does so without heads, and `eagle3` runs its layers once per"
        " draft token.",
    )
    num_layers: int = Field(
        default=2,
        ge=1,
        description="Layers of the drafter; a further one costs time in every draft, and is worth"
        " it where it is accepted longer.",
    )
    block_size: int = Field(
        default=5,
        ge=2,
        description="Tokens of a block: the one that the target just committed and K ="
        " `block_size` - 1 draft tokens. For eagle3 it sets K draft steps.",
    )
    markov_rank: int = Field(
        default=128,
        ge=0,
        description="Rank of dspark's Markov head, which tells each draft token of the one before"
        " it; 0 leaves the head out.",
    )
    markov_head: Literal["vanilla", "gated", "rnn"] = Field(
        default="vanilla",
        description="Kind of dspark's Markov head; vLLM serves `vanilla` only, the others can be"
        " trained and compared.",
    )
    confidence_head: bool = Field(
        default=True,
        description="Whether dspark gets a head that says how likely each draft token is to be"
        " accepted; without it nothing is calibrated.",
    )
    draft_vocab_size: int | None = Field(
        default=None,
        ge=16,
        description="Number of tokens that the drafter may propose, chosen by how often the"
        " training answers hold them; fewer make its head cheaper. Null is the target's own"
        " vocabulary.",
    )
    min_vocab_coverage: float = Field(
        default=0.98,
        gt=0,
        le=1,
        description="Share of the training answers' tokens that a newly chosen draft vocabulary"
        " must hold; with less, training does not start. Raise `draft_vocab_size` then.",
    )
    start: Literal["plain", "target_layers"] = Field(
        default="plain",
        description="What the layers start from: `plain` takes random weights, `target_layers`"
        " copies those layers of the target that `start_layers` names. The copy learns several"
        " times faster and needs a target whose layers have the drafter's shape.",
    )
    start_layers: tuple[int, ...] = Field(
        default=(),
        description="Layers of the target, from 0, copied into the draft layers: one per draft"
        " layer. Read with start `target_layers` only.",
    )
    start_aux_slot: int = Field(
        default=-1,
        description="Which entry of `stream.aux_layer_ids` the drafter sees unchanged when it"
        " starts, from 0; negative numbers count from the end. Used with start `target_layers`"
        " only.",
    )
    start_norm_scale: float = Field(
        default=1.0,
        gt=0,
        le=1,
        description="Factor on the copied final norm: below 1 the copied layers say little at the"
        " start and more as they learn. Used with start `target_layers` only.",
    )
    markov_start: Literal["random", "bigrams"] = Field(
        default="random",
        description="What the Markov head starts from: random weights, or with `bigrams` the"
        " target's own log p(next | previous) at the head's rank, so that it proposes from the"
        " first step. The latter needs a Markov head and at most 65,536 draft tokens.",
    )
    mask_token_id: int | None = Field(
        default=None,
        description="Token of the target's vocabulary that stands in the slots to fill in. Null"
        " takes the tokenizer's mask token, else a special token that chats do not use. Eagle3"
        " needs none.",
    )
