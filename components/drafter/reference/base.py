"""What the reference decoder asks of a drafter, whichever algorithm it follows.

A step of the decoder: `propose` drafts after each sequence's anchor, the target verifies them,
`extend_context` tells the drafter what was committed. The anchor is the token committed last: the
target has not run it yet, so it has no aux states, and it is the last of the context's
`next_ids_BT`.

Shapes: B sequences, T context tokens, L aux layers, H hidden, K draft tokens, V draft vocabulary, W
target vocabulary.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from components.drafter.reference.cache import SlotCache
from components.drafter.reference.layers import DraftLayers

Choose = Callable[[torch.Tensor], torch.Tensor]
"""Draft ids [...] (int64) for logits [..., V]: the argmax, or a draw."""


@dataclass(frozen=True)
class ContextRows:
    """What the target knows about newly committed positions, padded on the right."""

    aux_BTLH: torch.Tensor
    """The residual stream after each aux layer."""
    next_ids_BT: torch.Tensor
    """The token after each position, int64: committed too, or the anchor at the last valid
    position.
    """
    num_valid_B: torch.Tensor
    """How many of the T positions each sequence committed, at least 1; int64."""


@dataclass(frozen=True)
class Proposal:
    """Drafts after each sequence's anchor."""

    draft_ids_BK: torch.Tensor
    """As target ids, int64."""
    logits_BKV: torch.Tensor
    """What each draft was chosen from, float32, over the draft vocabulary."""
    confidence_BK: torch.Tensor | None
    """Logits of the confidence head, float32; None where none was asked for.

    Position k's comes from the backbone's state, which no draft enters, and from the token before
    k: it is a function of the context, the anchor and the drafts 1..k-1, never of draft k.
    """


class Scheduler(Protocol):
    """Decides how many drafts of each sequence are verified.

    Decoding stays lossless only if draft k is cut or kept by what was known before it was drawn:
    `num_scheduled >= k` may depend on confidence logits 1..k alone (see `Proposal.confidence_BK`).
    Confidence k+1 is a function of draft k, so a scheduler that looks past k verifies draft k more
    often for some tokens than for others: rejection sampling then no longer sees x_k ~ q_k. A
    prefix rule, "stop at the first k whose confidences so far fall short", is safe.
    """

    def num_scheduled(self, confidence_logits_NK: NDArray[np.float32]) -> NDArray[np.int64]:
        """Drafts to verify, [N] in 0..K, for confidence logits [N, K]."""


class ReferenceDrafter(ABC):
    """A drafter over a batch of sequences; subclasses fill in the algorithm."""

    aux_layer_ids: tuple[int, ...]
    """Target layers whose residual stream it reads; 1 is after the first."""
    num_draft_tokens: int
    """K it was trained for."""
    target_ids_V: torch.Tensor
    """Target id of each draft id, int64."""
    has_confidence: bool

    layers: DraftLayers
    _cache: SlotCache
    _num_context_B: torch.Tensor

    @property
    def num_context_B(self) -> torch.Tensor:
        """Context tokens of each sequence, which is also the position of its anchor; int64."""
        return self._num_context_B

    def reset(self, *, batch_size: int, num_slots: int) -> None:
        """Start new sequences with room for `num_slots` tokens each, drafts included."""
        self._cache = SlotCache(num_slots=num_slots)
        self._num_context_B = torch.zeros(batch_size, dtype=torch.long, device=self.layers.device)

    @abstractmethod
    def extend_context(self, rows: ContextRows) -> None:
        """Append what was committed; drafts proposed before are forgotten."""

    @abstractmethod
    def propose(
        self, choose: Choose, *, num_draft_tokens: int, with_confidence: bool = False
    ) -> Proposal:
        """Draft K = `num_draft_tokens` tokens, at least 1, after each anchor; the context stays as
        it is.
        """

    def select(self, rows_N: torch.Tensor) -> None:
        """Keep only the sequences at these batch rows, in this order."""
        self._cache.select(rows_N)
        self._num_context_B = self._num_context_B[rows_N]
