"""The drafter's training objective: blocks in, one loss and the acceptance it stands for out.

It runs the modules of speculators' DFlash and DSpark models, but only where something depends on them: keys and values
of all slots, queries of the last layer and logits at supervised slots only, target distributions once per position.

Shapes: T tokens, N anchors, B = K + 1 slots of a block (slot 0 is the anchor), S supervised slots, H hidden.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits

from components.errors import ConfigError
from components.settings import TrainingSettings
from components.training.attention import block_attention, rotate
from components.training.head_loss import LOSS_NAMES, SlotScores, SlotTargets, head_loss
from components.training.packing import Blocks, Pack


@dataclass(frozen=True)
class Slots:
    """The supervised slots, ordered by target position.

    Slot s is slot `offset_S[s]` (1..K) of block `block_S[s]`; `previous_S` is the position of the token before it,
    whose target state predicts it. `unique_U` are the distinct such positions and `index_S` a slot's place among them.
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
        block_S=block_S[order], offset_S=draft_S[order] + 1, previous_S=previous_S, unique_U=unique_U, index_S=index_S
    )


@dataclass(frozen=True)
class BlockScores:
    """`loss` to minimise; `match_NK` (draft argmax equals target argmax) and `overlap_NK` (probability of acceptance by
    rejection sampling), zero at slots that are not valid; `confidence_NK` in 0..1, None without the head."""

    loss: torch.Tensor
    match_NK: torch.Tensor
    overlap_NK: torch.Tensor
    confidence_NK: torch.Tensor | None


class BlockObjective(nn.Module):
    """Loss of a drafter on the blocks of a pack; the module that DDP wraps.

    Args:
        drafter: DSpark or DFlash drafter in the 1+K layout.
        settings: loss weights, position decay and confidence weight.

    Raises:
        ConfigError: a loss of another name, or a drafter this objective does not train.
    """

    def __init__(self, drafter: Any, settings: TrainingSettings) -> None:
        super().__init__()
        unknown = set(settings.loss) - set(LOSS_NAMES)
        if unknown or not any(settings.loss.values()):
            raise ConfigError("training.loss", got=dict(settings.loss), expected=f"weights of {', '.join(LOSS_NAMES)}")
        self._require_trainable(drafter)
        self.drafter = drafter
        self.settings = settings
        self.markov_head = getattr(drafter, "markov_head", None)
        self.confidence_head = getattr(drafter, "confidence_head", None)
        self._head_VH: torch.Tensor | None = None

    def forward(
        self,
        pack: Pack,
        blocks: Blocks,
        target_argmax_T: torch.Tensor | None = None,
        mass_T: torch.Tensor | None = None,
    ) -> BlockScores:
        """Scores of all blocks.

        Args:
            pack: documents and states, on the drafter's device.
            blocks: of `choose_blocks`.
            target_argmax_T: the target's own most probable token after each position, over its full vocabulary; None
                compares within the draft vocabulary.
            mass_T: the target's probability inside the draft vocabulary after each position; None counts it as 1.
        """
        slots = supervised_slots(blocks)
        hidden_SH = self._backbone(pack, blocks, slots)
        markov_SR = None
        if self.markov_head is not None:
            markov_SR = self.markov_head.prev_embeddings(pack.token_ids_T[slots.previous_S])
        gamma = self.settings.loss_gamma
        weights_S = torch.exp(-(slots.offset_S - 1) / gamma) / max(1, len(slots.offset_S))
        last_UH = self.drafter.verifier_norm(pack.states_TLH[slots.unique_U, -1].float())
        scores = head_loss(
            hidden_SH,
            markov_SR,
            self._head(),
            self.markov_head.markov_w2.weight if self.markov_head is not None else None,
            SlotTargets(last_UH, slots.index_S, mass_T[slots.unique_U] if mass_T is not None else None),
            slot_weights_S=weights_S,
            loss_weights=self.settings.loss,
        )
        loss, confidence_S = self._with_confidence(scores, hidden_SH, markov_SR, weights_S)
        match_S = self._matches(scores, slots, target_argmax_T)
        return BlockScores(
            loss=loss,
            match_NK=_by_block(match_S, slots, blocks),
            overlap_NK=_by_block(scores.overlap_S, slots, blocks),
            confidence_NK=_by_block(confidence_S, slots, blocks) if confidence_S is not None else None,
        )

    def _require_trainable(self, drafter: Any) -> None:
        algorithm = drafter.config.speculators_model_type
        if algorithm not in ("dspark", "dflash") or drafter.config.sample_from_anchor:
            raise ConfigError("this objective does not train this drafter", got=algorithm, expected="dspark, dflash")
        if algorithm == "dspark" and drafter.markov_head is not None and drafter.markov_head.head_type != "vanilla":
            raise ConfigError("markov head", got=drafter.markov_head.head_type, expected="vanilla")

    def _head(self) -> torch.Tensor:
        """The frozen output head in the dtype of the matrix products, cast once."""
        weight = self.drafter.lm_head.weight.detach()
        dtype = torch.bfloat16 if self.settings.mixed_precision == "bf16" else weight.dtype
        if self._head_VH is None or self._head_VH.device != weight.device:
            self._head_VH = weight.to(dtype)
        return self._head_VH

    def _with_confidence(
        self, scores: SlotScores, hidden_SH: torch.Tensor, markov_SR: torch.Tensor | None, weights_S: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The confidence head learns each slot's probability of acceptance by binary cross-entropy."""
        if self.confidence_head is None:
            return scores.loss, None
        features = hidden_SH
        if self.drafter.config.confidence_head_with_markov and markov_SR is not None:
            features = torch.cat([hidden_SH, markov_SR.to(hidden_SH.dtype)], dim=-1)
        logits_S = self.confidence_head(features).float()
        loss_S = binary_cross_entropy_with_logits(logits_S, scores.overlap_S.clamp(0, 1), reduction="none")
        loss = scores.loss + self.settings.confidence_weight * (loss_S * weights_S).sum()
        return loss, logits_S.detach().sigmoid()

    def _matches(self, scores: SlotScores, slots: Slots, target_argmax_T: torch.Tensor | None) -> torch.Tensor:
        if target_argmax_T is None:
            return scores.draft_S == scores.target_S
        draft_S = scores.draft_S
        if self.drafter.d2t is not None:
            draft_S = draft_S + self.drafter.d2t[draft_S]
        return draft_S == target_argmax_T[slots.previous_S]

    def _backbone(self, pack: Pack, blocks: Blocks, slots: Slots) -> torch.Tensor:
        """The drafter's states after its final norm at the supervised slots, [S, H]."""
        drafter = self.drafter
        block_size = blocks.valid_NK.shape[1] + 1
        token_ids_NB = torch.full(
            (len(blocks.anchors_N), block_size), drafter.mask_token_id, dtype=torch.long, device=pack.token_ids_T.device
        )
        token_ids_NB[:, 0] = pack.token_ids_T[blocks.anchors_N]
        states_NBH = drafter.embed_tokens(token_ids_NB)
        context_TH = drafter.hidden_norm(drafter.fc(pack.states_TLH[:, :-1].flatten(1).to(states_NBH.dtype)))
        positions_NB = pack.positions_T[blocks.anchors_N][:, None] + torch.arange(block_size, device=states_NBH.device)
        rope_T = rope_at(drafter, context_TH, pack.positions_T)
        rope_NB = rope_at(drafter, states_NBH, positions_NB)
        for layer in drafter.layers[:-1]:
            attended = _attend(layer, context_TH, states_NBH, rope_T, rope_NB, blocks, first_slot=0)
            states_NBH = finish_layer(layer, states_NBH, attended)
        layer = drafter.layers[-1]
        attended = _attend(layer, context_TH, states_NBH, rope_T, rope_NB, blocks, first_slot=1)
        states_SH = finish_layer(
            layer, states_NBH[slots.block_S, slots.offset_S], attended[slots.block_S, slots.offset_S - 1]
        )
        hidden_SH: torch.Tensor = drafter.norm(states_SH)
        return hidden_SH


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
    """Attention output before `o_proj` at slots `first_slot`.. of every block, [N, B - first_slot, heads * D]."""
    attention = layer.self_attn
    normed_NBH = layer.input_layernorm(states_NBH)
    query_rope = (rope_NB[0][:, first_slot:], rope_NB[1][:, first_slot:])

    def heads(projected: torch.Tensor) -> torch.Tensor:
        return projected.unflatten(-1, (-1, attention.head_dim))

    query = rotate(attention.q_norm(heads(attention.q_proj(normed_NBH[:, first_slot:]))), *query_rope)
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


def rope_at(drafter: Any, states: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin at `positions` (any shape), [..., D] each, in the dtype of `states`."""
    cos, sin = drafter.rotary_emb(states, positions.reshape(1, -1))
    return cos[0].unflatten(0, positions.shape), sin[0].unflatten(0, positions.shape)


def _by_block(values_S: torch.Tensor, slots: Slots, blocks: Blocks) -> torch.Tensor:
    values_NK = torch.zeros(blocks.valid_NK.shape, dtype=values_S.dtype, device=values_S.device)
    values_NK[slots.block_S, slots.offset_S - 1] = values_S.detach()
    return values_NK
