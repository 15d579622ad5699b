"""What speculators' Markov heads add to the draft logits, at the supervised slots only.

The bias of a slot is W2 f, with e = W1[previous token], h the drafter's state at the slot:
    vanilla  f = e
    gated    f = sigmoid(G [h; e]) * e
    rnn      [g; c; o] = J [s; e; h],  s <- sigmoid(g) s + (1 - sigmoid(g)) tanh(c),  f = tanh(o),
    slot 0 to slot K
vLLM serves the vanilla head only (serving refuses the others); they are here to be compared with
it.

Shapes: S supervised slots, N blocks, B = K + 1 slots of a block, H hidden, R Markov rank.
"""

from __future__ import annotations

from typing import Any

import torch

from components.training.packing import Blocks, Pack


def markov_features(
    head: Any,
    previous_SR: torch.Tensor,
    hidden_SH: torch.Tensor,
    hidden_NBH: torch.Tensor | None,
    *,
    pack: Pack,
    blocks: Blocks,
    block_S: torch.Tensor,
    offset_S: torch.Tensor,
) -> torch.Tensor:
    """f of the module's docstring, [S, R].

    Args:
        head: speculators' MarkovHead.
        previous_SR: e of each slot.
        hidden_SH: h of each slot.
        hidden_NBH: h of all slots, of blocks with slots that have no supervised token; only the rnn
            head reads it.
        pack: holds the tokens.
        blocks: the anchors.
        block_S, offset_S: block and slot (1..K) of each supervised slot.
    """
    if head.head_type != "rnn":
        return gated_features(head, previous_SR, hidden_SH)
    assert hidden_NBH is not None
    features_NBR = _recurrent(head, _previous_tokens(pack, blocks), hidden_NBH)
    return features_NBR[block_S, offset_S]


def gated_features(head: Any, previous_SR: torch.Tensor, hidden_SH: torch.Tensor) -> torch.Tensor:
    """f of a vanilla or a gated head, which looks at nothing but its own slot; [S, R]."""
    if head.head_type == "vanilla":
        return previous_SR
    gate_SR = torch.sigmoid(
        head.gate_proj(torch.cat([hidden_SH.to(previous_SR.dtype), previous_SR], dim=-1))
    )
    return gate_SR * previous_SR


def _previous_tokens(pack: Pack, blocks: Blocks) -> torch.Tensor:
    """[N, B]: the token before each slot's own; slot 0 has the anchor itself, as the head is
    defined. Places past the pack's end, which no supervised slot comes after, repeat its last
    token.
    """
    num_draft_tokens = blocks.valid_NK.shape[1]
    steps_B = torch.cat([torch.zeros(1, dtype=torch.long), torch.arange(num_draft_tokens)]).to(
        blocks.anchors_N.device
    )
    places_NB = (blocks.anchors_N[:, None] + steps_B).clamp(max=pack.num_tokens - 1)
    return pack.token_ids_T[places_NB]


def _recurrent(head: Any, token_ids_NB: torch.Tensor, hidden_NBH: torch.Tensor) -> torch.Tensor:
    previous_NBR = head.prev_embeddings(token_ids_NB)
    state_NR = previous_NBR.new_zeros(len(previous_NBR), head.markov_rank)
    features = []
    for slot in range(previous_NBR.shape[1]):
        inputs = torch.cat(
            [state_NR, previous_NBR[:, slot], hidden_NBH[:, slot].to(previous_NBR.dtype)], dim=-1
        )
        gate_NR, candidate_NR, output_NR = head.joint_proj(inputs).chunk(3, dim=-1)
        gate_NR = torch.sigmoid(gate_NR)
        state_NR = gate_NR * state_NR + (1 - gate_NR) * torch.tanh(candidate_NR)
        features.append(torch.tanh(output_NR))
    return torch.stack(features, dim=1)
