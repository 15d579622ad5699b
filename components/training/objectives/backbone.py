"""The parallel backbone of DSpark and DFlash, run where something depends on it.

It runs the modules of speculators' models: keys and values of all slots, queries of the last layer
at supervised slots only.

Shapes: T tokens, N anchors, B = K + 1 slots of a block (slot 0 is the anchor), S supervised slots,
H hidden, D head size.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from components.drafter.protocol import Drafter
from components.training.objectives.attention import block_attention, rotate
from components.training.objectives.slots import Slots
from components.training.packing import Blocks, Pack


def block_states(
    drafter: Drafter,
    pack: Pack,
    blocks: Blocks,
    slots: Slots,
    *,
    run: Callable[..., torch.Tensor],
    reads_all: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The drafter's states after its final norm at the supervised slots, [S, H], and at every slot,
    [N, B, H].

    Args:
        drafter: DSpark or DFlash drafter in the 1+K layout.
        pack: documents and states, on the drafter's device.
        blocks: of `choose_blocks`.
        slots: of these blocks.
        run: calls a layer's function with its arguments; where activations are computed again, it
            sees to that.
        reads_all: whether the states of every slot are wanted; None in their place otherwise.
    """
    block_size = blocks.valid_NK.shape[1] + 1
    token_ids_NB = torch.full(
        (len(blocks.anchors_N), block_size),
        drafter.mask_token_id,
        dtype=torch.long,
        device=pack.token_ids_T.device,
    )

    token_ids_NB[:, 0] = pack.token_ids_T[blocks.anchors_N]
    states_NBH = drafter.embed_tokens(token_ids_NB)
    context_TH = drafter.hidden_norm(
        drafter.fc(pack.states_TLH[:, :-1].flatten(1).to(states_NBH.dtype))
    )
    positions_NB = pack.positions_T[blocks.anchors_N][:, None] + torch.arange(
        block_size, device=states_NBH.device
    )

    rope_T = rope_at(drafter, context_TH, pack.positions_T)
    rope_NB = rope_at(drafter, states_NBH, positions_NB)
    for layer in drafter.layers if reads_all else drafter.layers[:-1]:
        states_NBH = run(_layer, layer, context_TH, states_NBH, rope_T, rope_NB, blocks, None)

    if reads_all:
        hidden_NBH = drafter.norm(states_NBH)
        return hidden_NBH[slots.block_S, slots.offset_S], hidden_NBH

    states_SH = run(
        _layer, drafter.layers[-1], context_TH, states_NBH, rope_T, rope_NB, blocks, slots
    )
    return drafter.norm(states_SH), None


def _layer(
    layer: Any,
    context_TH: torch.Tensor,
    states_NBH: torch.Tensor,
    rope_T: tuple[torch.Tensor, torch.Tensor],
    rope_NB: tuple[torch.Tensor, torch.Tensor],
    blocks: Blocks,
    slots: Slots | None,
) -> torch.Tensor:
    """A draft layer at every slot, [N, B, H]; with `slots`, at the supervised ones only, [S, H]."""
    if slots is None:
        attended = _attend(layer, context_TH, states_NBH, rope_T, rope_NB, blocks, first_slot=0)
        return finish_layer(layer, states_NBH, attended)
    attended = _attend(layer, context_TH, states_NBH, rope_T, rope_NB, blocks, first_slot=1)
    return finish_layer(
        layer,
        states_NBH[slots.block_S, slots.offset_S],
        attended[slots.block_S, slots.offset_S - 1],
    )


def _attend(
    layer: Any,
    context_TH: torch.Tensor,
    states_NBH: torch.Tensor,
    rope_T: tuple[torch.Tensor, torch.Tensor],
    rope_NB: tuple[torch.Tensor, torch.Tensor],
    blocks: Blocks,
    *,
    first_slot: int,
) -> torch.Tensor:
    """Attention output before `o_proj` at slots `first_slot`.. of every block, [N, B - first_slot,
    heads * D].
    """
    attention = layer.self_attn
    normed_NBH = layer.input_layernorm(states_NBH)
    query_rope = (rope_NB[0][:, first_slot:], rope_NB[1][:, first_slot:])

    def heads(projected: torch.Tensor) -> torch.Tensor:
        return projected.unflatten(-1, (-1, attention.head_dim))

    query = rotate(
        attention.q_norm(heads(attention.q_proj(normed_NBH[:, first_slot:]))), *query_rope
    )
    value_TGD, value_NBGD = heads(attention.v_proj(context_TH)), heads(attention.v_proj(normed_NBH))
    dtype = value_TGD.dtype
    return block_attention(
        query.to(dtype),
        rotate(attention.k_norm(heads(attention.k_proj(context_TH))), *rope_T).to(dtype),
        value_TGD,
        rotate(attention.k_norm(heads(attention.k_proj(normed_NBH))), *rope_NB).to(dtype),
        value_NBGD,
        anchors_N=blocks.anchors_N,
        spans=blocks.spans,
        scaling=attention.scaling,
    )


def finish_layer(layer: Any, states: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
    """The rest of a decoder layer after its attention: `o_proj`, residual, MLP, residual."""
    states = states + layer.self_attn.o_proj(attended)
    finished: torch.Tensor = states + layer.mlp(layer.post_attention_layernorm(states))
    return finished


def rope_at(
    drafter: Drafter, states: torch.Tensor, positions: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin at `positions` (any shape), [..., D] each, in the dtype of `states`."""
    cos, sin = drafter.rotary_emb(states, positions.reshape(1, -1))
    return cos[0].unflatten(0, positions.shape), sin[0].unflatten(0, positions.shape)
