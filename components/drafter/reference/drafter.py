"""DSpark and DFlash drafters of the reference: one block of masks, filled in by a single pass of
the backbone.

Layout, as trained ("1+K fill-in"): the block [anchor, mask * K] stands at positions n..n+K, where n
is the number of tokens before the anchor. Every slot attends to all context positions 0..n-1 and to
the whole block, both ways. The context's keys and values come from the target, the same states in
each layer: kv_proj(hidden_norm(fc(aux states))).

More drafts than the block was trained for: K is the number of masks, as in vLLM, whose proposer
always lays out 1 + num_speculative_tokens slots and runs the backbone once. Upstream defines no
second block drafted from the first one's tokens (it would need aux states, which only the target
can give), so there is none here; masks beyond block_size - 1 stand where training never put any,
and are merely worse drafts.

Shapes: B sequences, T context tokens, L aux layers, H hidden, Q block slots (K + 1), K draft
tokens, R Markov rank, C candidates, V draft vocabulary, W target vocabulary.
"""

from __future__ import annotations

import torch

from components.drafter.reference.base import Choose, ContextRows, Proposal, ReferenceDrafter
from components.drafter.reference.layers import Checkpoint, DraftLayers, TargetParts
from components.drafter.reference.markov import ConfidenceHead, MarkovHead
from components.errors import CheckpointError


class BlockDrafter(ReferenceDrafter):
    """Drafts of a DSpark or DFlash checkpoint; DFlash is DSpark without its two heads.

    Args:
        checkpoint: as speculators writes it.
        target: what is shared with the target.

    Raises:
        CheckpointError: the checkpoint uses another layout than fill-in, or an unknown Markov head.
    """

    def __init__(self, checkpoint: Checkpoint, target: TargetParts) -> None:
        config = checkpoint.config
        if config.get("sample_from_anchor", checkpoint.algorithm == "dspark"):
            raise CheckpointError(
                "the reference knows the fill-in layout only",
                got="sample_from_anchor=True",
                expected="False",
            )
        self.layers = DraftLayers(checkpoint, target)
        self.aux_layer_ids = tuple(int(layer) for layer in config["aux_hidden_state_layer_ids"])
        self.num_draft_tokens = int(config["block_size"]) - 1
        self.target_ids_V = self.layers.target_ids_V
        self.mask_token_id = int(config["mask_token_id"])
        self.markov_head: MarkovHead | None = None
        if "markov_head.markov_w1.weight" in self.layers.weights:
            self.markov_head = MarkovHead(
                self.layers, head_type=config.get("markov_head_type", "vanilla")
            )
        self.num_candidates: int | None = config.get("dspark_draft_topk")
        """C, of vLLM's option: the bias is added to each position's C likeliest tokens, and no
        other can be drafted.

        It leaves most of W2 unread. What is drafted follows the truncated q, so decoding stays
        lossless.
        """
        self._confidence_head: ConfidenceHead | None = None
        if "confidence_head.proj.weight" in self.layers.weights:
            with_markov = bool(config.get("confidence_head_with_markov", True))
            self._confidence_head = ConfidenceHead(self.layers, with_markov=with_markov)
        self.has_confidence = self._confidence_head is not None
        self.reset(batch_size=0, num_slots=0)

    def reset(self, *, batch_size: int, num_slots: int) -> None:
        """Start new sequences with room for `num_slots` tokens each, drafts included."""
        super().reset(batch_size=batch_size, num_slots=num_slots)
        self._anchor_ids_B = self._num_context_B

    def select(self, rows_N: torch.Tensor) -> None:
        """Keep only the sequences at these batch rows, in this order."""
        super().select(rows_N)
        self._anchor_ids_B = self._anchor_ids_B[rows_N]

    def extend_context(self, rows: ContextRows) -> None:
        """Append what was committed; drafts proposed before are forgotten."""
        states_BTH = self.layers.linear(rows.aux_BTLH.to(self.layers.dtype).flatten(2), "fc")
        states_BTH = self.layers.norm(states_BTH, "hidden_norm")
        num_rows = states_BTH.shape[1]
        positions_BT = self._num_context_B[:, None] + torch.arange(
            num_rows, device=self.layers.device
        )
        self._cache.aim(positions_BT, positions_BT)
        rotation = self.layers.rotation(positions_BT)
        for layer in range(self.layers.config.num_hidden_layers):
            self.layers.store(layer, states_BTH, rotation, self._cache)
        self._num_context_B = self._num_context_B + rows.num_valid_B
        self._anchor_ids_B = rows.next_ids_BT.gather(1, rows.num_valid_B[:, None] - 1)[:, 0]

    def propose(
        self, choose: Choose, *, num_draft_tokens: int, with_confidence: bool = False
    ) -> Proposal:
        """Draft K = `num_draft_tokens` tokens, at least 1, after each anchor; the context stays as
        it is.
        """
        hidden_BQH = self.block_hidden(num_draft_tokens)
        logits_BKV = self.layers.logits(hidden_BQH[:, 1:])
        if self.markov_head is None:
            draft_ids_BK = self.target_ids_V[choose(logits_BKV)]
        else:
            draft_ids_BK = self._chain(self.markov_head, hidden_BQH, logits_BKV, choose)
        confidence_BK = (
            self._confidence(hidden_BQH[:, 1:], draft_ids_BK) if with_confidence else None
        )
        return Proposal(draft_ids_BK, logits_BKV, confidence_BK)

    def block_hidden(self, num_draft_tokens: int) -> torch.Tensor:
        """The backbone's states [B, K + 1, H] of the block after each context, final norm
        included.
        """
        masks_BK = torch.full_like(
            self._anchor_ids_B[:, None].expand(-1, num_draft_tokens), self.mask_token_id
        )
        hidden_BQH = self.layers.embedding_WH[
            torch.cat([self._anchor_ids_B[:, None], masks_BK], dim=1)
        ]
        positions_BQ = self._num_context_B[:, None] + torch.arange(
            num_draft_tokens + 1, device=self.layers.device
        )

        mask_B1QS = self._cache.aim(positions_BQ, positions_BQ[:, -1:].expand_as(positions_BQ))
        rotation = self.layers.rotation(positions_BQ)
        for layer in range(self.layers.config.num_hidden_layers):
            normed_BQH = self.layers.norm(hidden_BQH, f"layers.{layer}.input_layernorm")
            hidden_BQH = hidden_BQH + self.layers.attend(
                layer, normed_BQH, rotation, self._cache, mask_B1QS
            )
            hidden_BQH = hidden_BQH + self.layers.feed_forward(layer, hidden_BQH)

        return self.layers.norm(hidden_BQH, "norm")

    def _chain(
        self, head: MarkovHead, hidden_BQH: torch.Tensor, logits_BKV: torch.Tensor, choose: Choose
    ) -> torch.Tensor:
        """Choose left to right, each position's logits biased, in place, by the token before;
        target ids [B, K].
        """
        previous_B = self._anchor_ids_B
        drafts = []
        state_BR = head.start(previous_B, hidden_BQH[:, 0])
        candidates = None

        if self.num_candidates is not None:
            candidates = logits_BKV.topk(min(self.num_candidates, logits_BKV.shape[2]), dim=-1)
            logits_BKV.fill_(-torch.inf)

        for k in range(logits_BKV.shape[1]):
            features_BR, state_BR = head.features(previous_B, hidden_BQH[:, k + 1], state_BR)
            if candidates is None:
                logits_BKV[:, k] += head.bias(features_BR)
                draft_ids_B = choose(logits_BKV[:, k])
            else:
                ids_BC = candidates.indices[:, k]
                logits_BC = candidates.values[:, k] + head.bias_of(ids_BC, features_BR)
                logits_BKV[:, k].scatter_(1, ids_BC, logits_BC)
                draft_ids_B = ids_BC.gather(1, choose(logits_BC)[:, None])[:, 0]
            previous_B = self.target_ids_V[draft_ids_B]
            drafts.append(previous_B)

        return torch.stack(drafts, dim=1)

    def _confidence(self, hidden_BKH: torch.Tensor, draft_ids_BK: torch.Tensor) -> torch.Tensor:
        assert self._confidence_head is not None, (
            "asked for confidence that the checkpoint does not have"
        )
        embedding_BKR = None
        if self.markov_head is not None:
            previous_BK = torch.cat([self._anchor_ids_B[:, None], draft_ids_BK[:, :-1]], dim=1)
            embedding_BKR = self.markov_head.embed(previous_BK)
        return self._confidence_head.logits(hidden_BKH, embedding_BKR)
