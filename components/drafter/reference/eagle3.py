"""EAGLE-3 drafter of the reference (arXiv:2503.01840): a small autoregressive model over the
target's own features.

Row i of the context pairs the target's aux states g_i with the embedding of the token after them,
e(x_{i+1}), at position i, as vLLM lays it out; it attends causally to rows 0..i. The last row holds
the anchor and gives the first draft's logits. Drafting is chained: the next row pairs the drafter's
own output with the draft's embedding, one position on, for as many drafts as are asked for;
training saw block_size - 1 such steps. After verification the rows of the drafts are overwritten by
rows of the committed tokens, whose features are the target's again.

First layer: q, k, v read [input_layernorm(e); hidden_norm(f)], f = fc(aux states) or the drafter's
output, and the residual stream is f (or its norm, `norm_before_residual`). Further layers are the
usual ones. The output that is fed back is the residual stream before the final norm (after it with
`norm_output`).

Shapes: B sequences, T context tokens, L aux layers, H hidden, K draft tokens, V draft vocabulary, W
target vocabulary.
"""

from __future__ import annotations

import torch

from components.drafter.reference.base import Choose, ContextRows, Proposal, ReferenceDrafter
from components.drafter.reference.layers import Checkpoint, DraftLayers, TargetParts


class Eagle3Drafter(ReferenceDrafter):
    """Drafts of an EAGLE-3 checkpoint; it has no confidence head.

    Args:
        checkpoint: as speculators writes it.
        target: what is shared with the target.
    """

    def __init__(self, checkpoint: Checkpoint, target: TargetParts) -> None:
        config = checkpoint.config
        self.layers = DraftLayers(checkpoint, target)
        self.aux_layer_ids = tuple(
            int(layer) for layer in config["eagle_aux_hidden_state_layer_ids"]
        )
        self.num_draft_tokens = int(
            config["speculators_config"]["proposal_methods"][0]["speculative_tokens"]
        )

        self.target_ids_V = self.layers.target_ids_V
        self.has_confidence = False
        self._norm_before_fc = bool(config.get("norm_before_fc", False))
        self._fc_norm = bool(config.get("fc_norm", False))
        self._norm_before_residual = bool(config.get("norm_before_residual", False))
        self._norm_output = bool(config.get("norm_output", False))
        self.reset(batch_size=0, num_slots=0)

    def reset(self, *, batch_size: int, num_slots: int) -> None:
        """Start new sequences with room for `num_slots` tokens each, drafts included."""
        super().reset(batch_size=batch_size, num_slots=num_slots)
        self._output_BH = torch.zeros(
            batch_size, self.layers.config.hidden_size, device=self.layers.device
        )

    def select(self, rows_N: torch.Tensor) -> None:
        """Keep only the sequences at these batch rows, in this order."""
        super().select(rows_N)
        self._output_BH = self._output_BH[rows_N]

    def extend_context(self, rows: ContextRows) -> None:
        """Append what was committed; drafts proposed before are forgotten."""
        num_rows = rows.next_ids_BT.shape[1]
        positions_BT = self._num_context_B[:, None] + torch.arange(
            num_rows, device=self.layers.device
        )
        output_BTH = self._run(rows.next_ids_BT, self._fuse(rows.aux_BTLH), positions_BT)
        self._num_context_B = self._num_context_B + rows.num_valid_B
        last_B11 = rows.num_valid_B[:, None, None] - 1
        self._output_BH = output_BTH.gather(1, last_B11.expand(-1, 1, output_BTH.shape[2]))[:, 0]

    def propose(
        self, choose: Choose, *, num_draft_tokens: int, with_confidence: bool = False
    ) -> Proposal:
        """Draft K = `num_draft_tokens` tokens, at least 1, after each anchor; the context stays as
        it is.
        """
        assert not with_confidence, "EAGLE-3 has no confidence head"
        output_BH = self._output_BH
        drafts: list[torch.Tensor] = []
        logits: list[torch.Tensor] = []

        for k in range(num_draft_tokens):
            if k > 0:
                positions_B1 = self._num_context_B[:, None] + (k - 1)
                output_BH = self._run(drafts[-1][:, None], output_BH[:, None], positions_B1)[:, 0]
            logits.append(
                self.layers.logits(
                    output_BH if self._norm_output else self.layers.norm(output_BH, "norm")
                )
            )
            drafts.append(self.target_ids_V[choose(logits[-1])])

        return Proposal(torch.stack(drafts, dim=1), torch.stack(logits, dim=1), None)

    def _fuse(self, aux_BTLH: torch.Tensor) -> torch.Tensor:
        """fc over the aux layers' states, normed before as the checkpoint says: [B, T, H]."""
        aux_BTLH = aux_BTLH.to(self.layers.dtype)
        if self._norm_before_fc:
            return self.layers.linear(self.layers.norm(aux_BTLH.flatten(2), "input_norm"), "fc")
        if self._fc_norm:
            normed = [
                self.layers.norm(states, f"fc_norm.{slot}")
                for slot, states in enumerate(aux_BTLH.unbind(2))
            ]
            aux_BTLH = torch.stack(normed, dim=2)
        return self.layers.linear(aux_BTLH.flatten(2), "fc")

    def _run(
        self, token_ids_BT: torch.Tensor, features_BTH: torch.Tensor, positions_BT: torch.Tensor
    ) -> torch.Tensor:
        """Rows of tokens and features through all layers, causally; what the next row is fed, [B,
        T, H].
        """
        mask_B1TS = self._cache.aim(positions_BT, positions_BT)
        rotation = self.layers.rotation(positions_BT)
        embedded_BTH = self.layers.norm(
            self.layers.embedding_WH[token_ids_BT], "layers.0.input_layernorm"
        )
        normed_BTH = self.layers.norm(features_BTH, "layers.0.hidden_norm")
        hidden_BTH = normed_BTH if self._norm_before_residual else features_BTH

        states_BTI = torch.cat([embedded_BTH, normed_BTH], dim=-1)
        for layer in range(self.layers.config.num_hidden_layers):
            if layer > 0:
                states_BTI = self.layers.norm(hidden_BTH, f"layers.{layer}.input_layernorm")
            hidden_BTH = hidden_BTH + self.layers.attend(
                layer, states_BTI, rotation, self._cache, mask_B1TS
            )
            hidden_BTH = hidden_BTH + self.layers.feed_forward(layer, hidden_BTH)

        return self.layers.norm(hidden_BTH, "norm") if self._norm_output else hidden_BTH
