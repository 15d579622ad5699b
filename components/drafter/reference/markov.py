"""The sequential heads of DSpark: the Markov head's logit bias and the confidence head's logit.

Definitions are speculators' (`models/dspark/model_definitions.py`, read, not copied), e =
W1[previous token], h = the backbone's state at the slot, after the final norm:
  vanilla  bias = W2 e                                                  no state
  gated    bias = W2 (sigmoid(A [h; e] + a) * e)                        no state
  rnn      [g; c; o] = J [s; e; h] + j,  s' = sigmoid(g) s + (1 - sigmoid(g)) tanh(c),  bias = W2
  tanh(o)
           s is 0 before the block; in the fill-in layout slot 0 holds the anchor and is trained as
           one recurrent step, with the anchor as its own previous token. Its bias is not used, its
           state is: drafting takes that step too.
Confidence is a linear function of [h; e], or of h alone, whatever the Markov head's type: no
recurrent state enters. vLLM 0.32.0 computes the vanilla bias for every `markov_head_type`, so gated
and rnn heads can be decoded here alone.

Shapes: B sequences, K draft tokens, H hidden, R Markov rank, C candidates, V draft vocabulary,
W target vocabulary.
"""

from __future__ import annotations

import torch
from torch.nn import functional

from components.drafter.reference.layers import DraftLayers
from components.errors import CheckpointError

HEAD_TYPES = ("vanilla", "gated", "rnn")


class MarkovHead:
    """Bias that the previous token adds to a position's logits.

    Args:
        layers: holds the tensors `markov_head.*`.
        head_type: one of `HEAD_TYPES`.

    Raises:
        CheckpointError: an unknown type.
    """

    def __init__(self, layers: DraftLayers, *, head_type: str) -> None:
        if head_type not in HEAD_TYPES:
            raise CheckpointError(
                "no such Markov head", got=head_type, expected=" or ".join(HEAD_TYPES)
            )
        self.head_type = head_type
        self._layers = layers
        self._w1_WR = layers.weights["markov_head.markov_w1.weight"]
        self._w2_VR = layers.weights["markov_head.markov_w2.weight"]

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """W1 rows [..., R] of target ids [...]."""
        return self._w1_WR[token_ids]

    def start(self, anchor_ids_B: torch.Tensor, anchor_hidden_BH: torch.Tensor) -> torch.Tensor:
        """State [B, R] after slot 0, which holds the anchor; zeros where the head keeps none."""
        state_BR = torch.zeros_like(self.embed(anchor_ids_B))
        if self.head_type == "rnn":
            return self._step(self.embed(anchor_ids_B), anchor_hidden_BH, state_BR)[1]
        return state_BR

    def features(
        self, previous_ids_B: torch.Tensor, hidden_BH: torch.Tensor, state_BR: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """What W2 is applied to [B, R] at the position after `previous_ids_B` (target ids), and the
        state after it.
        """
        embedding_BR = self.embed(previous_ids_B)
        if self.head_type == "gated":
            gate_BR = self._layers.linear(
                torch.cat([hidden_BH, embedding_BR], dim=-1), "markov_head.gate_proj"
            )
            return gate_BR.sigmoid() * embedding_BR, state_BR
        if self.head_type == "rnn":
            return self._step(embedding_BR, hidden_BH, state_BR)
        return embedding_BR, state_BR

    def bias(self, features_BR: torch.Tensor) -> torch.Tensor:
        """Logit bias [B, V], float32: W2 times the features."""
        return functional.linear(features_BR, self._w2_VR).float()

    def bias_of(self, draft_ids_BC: torch.Tensor, features_BR: torch.Tensor) -> torch.Tensor:
        """`bias` at these draft ids alone, [B, C]: C rows of W2 are read instead of V."""
        return (self._w2_VR[draft_ids_BC] @ features_BR[..., None])[..., 0].float()

    def _step(
        self, embedding_BR: torch.Tensor, hidden_BH: torch.Tensor, state_BR: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        joint = self._layers.linear(
            torch.cat([state_BR, embedding_BR, hidden_BH], dim=-1), "markov_head.joint_proj"
        )
        gate_BR, candidate_BR, output_BR = joint.chunk(3, dim=-1)
        keep_BR = gate_BR.sigmoid()
        return output_BR.tanh(), keep_BR * state_BR + (1 - keep_BR) * candidate_BR.tanh()


class ConfidenceHead:
    """Logit of a draft's acceptance probability, before the draft is known."""

    def __init__(self, layers: DraftLayers, *, with_markov: bool) -> None:
        self.with_markov = with_markov
        self._weight_1F = layers.weights["confidence_head.proj.weight"].float()
        self._bias_1 = layers.weights["confidence_head.proj.bias"].float()

    def logits(self, hidden_BKH: torch.Tensor, embedding_BKR: torch.Tensor | None) -> torch.Tensor:
        """[B, K], float32, from the backbone's states and W1 of each position's previous token."""
        features_BKF = hidden_BKH
        if self.with_markov and embedding_BKR is not None:
            features_BKF = torch.cat([hidden_BKH, embedding_BKR], dim=-1)
        return functional.linear(features_BKF.float(), self._weight_1F, self._bias_1)[..., 0]
