"""The supervised slots of a pack's blocks.

Shapes: N anchors, K draft positions, S supervised slots, U target positions.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from components.training.packing import Blocks


@dataclass(frozen=True)
class Slots:
    """The supervised slots, ordered by target position.

    Slot s is slot `offset_S[s]` (1..K) of block `block_S[s]`; `previous_S` is the position of the
    token before it, whose target state predicts it. `unique_U` are the distinct such positions and
    `index_S` a slot's place among them.
    """

    block_S: torch.Tensor
    offset_S: torch.Tensor
    previous_S: torch.Tensor
    unique_U: torch.Tensor
    index_S: torch.Tensor


def supervised_slots(blocks: Blocks) -> Slots:
    """The slots of `blocks` that have a supervised token."""
    block_S, draft_S = torch.nonzero(blocks.valid_NK, as_tuple=True)
    previous_S, order = torch.sort(blocks.anchors_N[block_S] + draft_S, stable=True)
    unique_U, index_S = torch.unique_consecutive(previous_S, return_inverse=True)
    return Slots(
        block_S=block_S[order],
        offset_S=draft_S[order] + 1,
        previous_S=previous_S,
        unique_U=unique_U,
        index_S=index_S,
    )


def by_block(values_S: torch.Tensor, slots: Slots, blocks: Blocks) -> torch.Tensor:
    """Values of the slots at their places, [N, K], zero elsewhere; without gradient."""
    values_NK = torch.zeros(blocks.valid_NK.shape, dtype=values_S.dtype, device=values_S.device)
    values_NK[slots.block_S, slots.offset_S - 1] = values_S.detach()
    return values_NK
