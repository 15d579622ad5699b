"""The drafter's training objective: blocks in, one loss and the acceptance it stands for out.

It runs the modules of speculators' DFlash and DSpark models, but only where something depends on
them: logits at supervised slots only, target distributions once per position.

Shapes: T tokens, N anchors, B = K + 1 slots of a block (slot 0 is the anchor), S supervised slots,
H hidden, R Markov rank.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits
from torch.utils.checkpoint import checkpoint

from components.drafter.protocol import Drafter
from components.errors import ConfigError
from components.settings import TrainingSettings
from components.training.objectives.backbone import block_states
from components.training.objectives.head_loss import (
    CHUNK_ELEMENTS,
    LOSS_NAMES,
    SlotScores,
    SlotTargets,
    head_loss,
)
from components.training.objectives.markov import gated_features, markov_features
from components.training.objectives.slots import Slots, by_block, supervised_slots
from components.training.packing import Blocks, Pack


@dataclass(frozen=True)
class BlockScores:
    """`loss` to minimise; `match_NK` (draft argmax equals target argmax) and `overlap_NK`
    (probability of acceptance by rejection sampling), zero at slots that are not valid;
    `confidence_NK` in 0..1, None without the head.
    """

    loss: torch.Tensor
    match_NK: torch.Tensor
    overlap_NK: torch.Tensor
    confidence_NK: torch.Tensor | None


@dataclass(frozen=True)
class GreedyDrafts:
    """`draft_ids_NK` as target ids, and the confidence head's `logits_NK`; zero at slots that are
    not valid.
    """

    draft_ids_NK: torch.Tensor
    logits_NK: torch.Tensor


class BlockObjective(nn.Module):
    """Loss of a drafter on the blocks of a pack; the module that DDP wraps.

    Args:
        drafter: DSpark or DFlash drafter in the 1+K layout.
        settings: loss weights, position decay and confidence weight.

    Raises:
        ConfigError: a loss of another name, or a drafter this objective does not train.
    """

    def __init__(self, drafter: Drafter, settings: TrainingSettings) -> None:
        super().__init__()
        unknown = set(settings.loss) - set(LOSS_NAMES)
        if unknown or not any(settings.loss.values()):
            raise ConfigError(
                "training.loss",
                got=dict(settings.loss),
                expected=f"weights of {', '.join(LOSS_NAMES)}",
            )

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
            target_argmax_T: the target's own most probable token after each position, over its full
                vocabulary; None compares within the draft vocabulary.
            mass_T: the target's probability inside the draft vocabulary after each position; None
                counts it as 1.
        """
        slots = supervised_slots(blocks)
        hidden_SH, hidden_NBH = self._backbone(pack, blocks, slots)
        previous_SR, markov_SR = self._markov(pack, blocks, slots, hidden_SH, hidden_NBH)
        last_UH = self.drafter.verifier_norm(pack.states_TLH[slots.unique_U, -1].float())
        targets = SlotTargets(
            last_UH, slots.index_S, mass_T[slots.unique_U] if mass_T is not None else None
        )

        decay_S = torch.exp(-(slots.offset_S - 1) / self.settings.loss_gamma) / max(
            1, len(slots.offset_S)
        )
        scores = self._score(hidden_SH, markov_SR, targets, blocks, slots, decay_S)
        loss, confidence_S = self._with_confidence(scores, hidden_SH, previous_SR, decay_S)
        match_S = self._matches(scores, slots, target_argmax_T)

        return BlockScores(
            loss=loss,
            match_NK=by_block(match_S, slots, blocks),
            overlap_NK=by_block(scores.overlap_S, slots, blocks),
            confidence_NK=by_block(confidence_S, slots, blocks)
            if confidence_S is not None
            else None,
        )

    def _markov(
        self,
        pack: Pack,
        blocks: Blocks,
        slots: Slots,
        hidden_SH: torch.Tensor,
        hidden_NBH: torch.Tensor | None,
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Embeddings of the previous tokens, and what the Markov head makes of them; None without
        one.
        """
        if self.markov_head is None:
            return None, None
        previous_SR = self.markov_head.prev_embeddings(pack.token_ids_T[slots.previous_S])
        features_SR = markov_features(
            self.markov_head, previous_SR, hidden_SH, hidden_NBH, pack=pack, blocks=blocks,
            block_S=slots.block_S, offset_S=slots.offset_S,
        )  # fmt: skip
        return previous_SR, features_SR

    def _score(
        self,
        hidden_SH: torch.Tensor,
        markov_SR: torch.Tensor | None,
        targets: SlotTargets,
        blocks: Blocks,
        slots: Slots,
        decay_S: torch.Tensor,
    ) -> SlotScores:
        head_VR = self.markov_head.markov_w2.weight if self.markov_head is not None else None
        if self.settings.loss_decay == "dpace" and torch.is_grad_enabled():
            # The weights come from the whole block's likelihoods, so a pass without gradients goes
            # before.
            with torch.no_grad():
                looked_at = head_loss(
                    hidden_SH,
                    markov_SR,
                    self._head(),
                    head_VR,
                    targets,
                    slot_weights_S=decay_S,
                    loss_weights={},
                )
            likelihood_NK = by_block(looked_at.likelihood_S, slots, blocks)
            weights_NK = dpace_weights(
                likelihood_NK, blocks.valid_NK, alpha=self.settings.dpace_alpha
            )
            decay_S = weights_NK[slots.block_S, slots.offset_S - 1] / max(1, len(slots.offset_S))

        return head_loss(
            hidden_SH, markov_SR, self._head(), head_VR, targets,
            slot_weights_S=decay_S, loss_weights=self.settings.loss,
        )  # fmt: skip

    @torch.no_grad()
    def draft(self, pack: Pack, blocks: Blocks) -> GreedyDrafts | None:
        """Greedy drafts and their confidence as served: the heads are given the drafter's own
        previous token.

        Training, and so `forward`, gives them the text's. The two agree as long as all drafts were
        right.

        Returns:
            None where the drafter has no confidence head, or a recurrent Markov head, which is not
            served.
        """
        if self.confidence_head is None or (
            self.markov_head is not None and self.markov_head.head_type == "rnn"
        ):
            return None

        slots = supervised_slots(blocks)
        device = blocks.anchors_N.device
        hidden_SH, _ = self._backbone(pack, blocks, slots)
        slot_NK = torch.full(blocks.valid_NK.shape, -1, dtype=torch.long, device=device)
        slot_NK[slots.block_S, slots.offset_S - 1] = torch.arange(len(hidden_SH), device=device)
        drafts = GreedyDrafts(torch.zeros_like(slot_NK), torch.zeros(slot_NK.shape, device=device))
        previous_N = pack.token_ids_T[blocks.anchors_N]

        num_rows = max(1, CHUNK_ELEMENTS // self._head().shape[0])
        for k in range(slot_NK.shape[1]):
            for chosen in torch.nonzero(blocks.valid_NK[:, k]).flatten().split(num_rows):
                draft_C, logits_C = self._draft_slots(
                    hidden_SH[slot_NK[chosen, k]], previous_N[chosen]
                )
                drafts.draft_ids_NK[chosen, k], drafts.logits_NK[chosen, k] = draft_C, logits_C
            previous_N = drafts.draft_ids_NK[:, k]

        return drafts

    def _draft_slots(
        self, hidden_CH: torch.Tensor, previous_C: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The most probable token of each slot, as target id, and the confidence logit."""
        head_VH = self._head()
        features_CF = hidden_CH
        with torch.autocast(hidden_CH.device.type, enabled=False):
            logits_CV = hidden_CH.to(head_VH.dtype) @ head_VH.T
            if self.markov_head is not None:
                previous_CR = self.markov_head.prev_embeddings(previous_C)
                markov_CR = gated_features(self.markov_head, previous_CR, hidden_CH)
                weight_VR = self.markov_head.markov_w2.weight
                logits_CV = logits_CV + markov_CR.to(head_VH.dtype) @ weight_VR.to(head_VH.dtype).T
                if self.drafter.config.confidence_head_with_markov:
                    features_CF = torch.cat([hidden_CH, previous_CR.to(hidden_CH.dtype)], dim=-1)

        draft_C = logits_CV.float().argmax(-1)
        if self.drafter.d2t is not None:
            draft_C = draft_C + self.drafter.d2t[draft_C]

        assert self.confidence_head is not None
        return draft_C, self.confidence_head(features_CF).float()

    def _require_trainable(self, drafter: Drafter) -> None:
        algorithm = drafter.config.speculators_model_type
        if algorithm not in ("dspark", "dflash") or drafter.config.sample_from_anchor:
            raise ConfigError(
                "this objective does not train this drafter",
                got=algorithm,
                expected="dspark, dflash",
            )

    def _head(self) -> torch.Tensor:
        """The frozen output head in the dtype of the matrix products, cast once."""
        weight = self.drafter.lm_head.weight.detach()
        dtype = torch.bfloat16 if self.settings.mixed_precision == "bf16" else weight.dtype
        if self._head_VH is None or self._head_VH.device != weight.device:
            self._head_VH = weight.to(dtype)
        return self._head_VH

    def _with_confidence(
        self,
        scores: SlotScores,
        hidden_SH: torch.Tensor,
        previous_SR: torch.Tensor | None,
        weights_S: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The confidence head learns each slot's probability of acceptance by binary
        cross-entropy.
        """
        if self.confidence_head is None:
            return scores.loss, None
        features = hidden_SH
        if self.drafter.config.confidence_head_with_markov and previous_SR is not None:
            features = torch.cat([hidden_SH, previous_SR.to(hidden_SH.dtype)], dim=-1)
        logits_S = self.confidence_head(features).float()
        loss_S = binary_cross_entropy_with_logits(
            logits_S, scores.overlap_S.clamp(0, 1), reduction="none"
        )
        loss = scores.loss + self.settings.confidence_weight * (loss_S * weights_S).sum()
        return loss, logits_S.detach().sigmoid()

    def _matches(
        self, scores: SlotScores, slots: Slots, target_argmax_T: torch.Tensor | None
    ) -> torch.Tensor:
        if target_argmax_T is None:
            return scores.draft_S == scores.target_S
        draft_S = scores.draft_S
        if self.drafter.d2t is not None:
            draft_S = draft_S + self.drafter.d2t[draft_S]
        return draft_S == target_argmax_T[slots.previous_S]

    def _backbone(
        self, pack: Pack, blocks: Blocks, slots: Slots
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The drafter's states after its final norm at the supervised slots, [S, H], and at every
        slot, [N, B, H], where the Markov head reads them all.
        """
        reads_all = self.markov_head is not None and self.markov_head.head_type == "rnn"
        return block_states(
            self.drafter, pack, blocks, slots, run=self._maybe_checkpointed, reads_all=reads_all
        )

    def _maybe_checkpointed(
        self, function: Callable[..., torch.Tensor], *arguments: Any
    ) -> torch.Tensor:
        """`function(*arguments)`; with gradient checkpointing its activations are computed again
        going backward.
        """
        if not self.settings.gradient_checkpointing or not torch.is_grad_enabled():
            return function(*arguments)
        states: torch.Tensor = checkpoint(function, *arguments, use_reentrant=False)
        return states


def dpace_weights(
    likelihood_NK: torch.Tensor, valid_NK: torch.Tensor, *, alpha: float
) -> torch.Tensor:
    """D-PACE: a slot weighs as much as the expected length that hangs on it (as speculators 0.9
    defines it).

    w_k = sum_{j >= k} prod_{i <= j} ((1 - alpha) q_i + alpha), with q_i the draft's likelihood of
    the target's token. Slots that are not valid neither weigh nor count. Shapes: [N, K] in, [N, K]
    out, without gradient.
    """
    smooth_NK = torch.where(valid_NK, (1 - alpha) * likelihood_NK + alpha, 1.0)
    prefix_NK = smooth_NK.cumprod(1) * valid_NK
    return prefix_NK.flip(1).cumsum(1).flip(1) * valid_NK
