"""What the reference decoder reports: per sequence, every step it took."""

from __future__ import annotations

from dataclasses import dataclass

import torch

TIE_GAP = 1e-3
"""Top-2 logit gap below which float32 implementations may order two tokens differently."""


@dataclass(frozen=True)
class ReferenceStep:
    """One propose-verify-commit step."""

    position: int
    """Of the anchor in the sequence, from 0."""
    anchor: int
    draft_ids: tuple[int, ...]
    """The K drafts, as target ids."""
    num_scheduled: int
    """Drafts that were verified: K, or what the scheduler left of them."""
    num_accepted: int
    draft_gaps: tuple[float, ...]
    """Top-2 gap of each draft position's logits."""
    target_gaps: tuple[float, ...]
    """Top-2 gap of the target's logits at each committed token."""

    @property
    def is_tie(self) -> bool:
        """Whether a committed token of a greedy step hung on less than `TIE_GAP`."""
        return min(self.target_gaps) < TIE_GAP

    @property
    def is_draft_tie(self) -> bool:
        """Whether a greedy draft token hung on less than `TIE_GAP`."""
        return min(self.draft_gaps) < TIE_GAP


@dataclass(frozen=True)
class ReferenceProposal:
    """Greedy drafts at one point of a sequence."""

    draft_ids: tuple[int, ...]
    """The K drafts, as target ids."""
    gaps: tuple[float, ...]
    """Top-2 gap of each position's logits."""


@dataclass(frozen=True)
class ReferenceOutput:
    """A decoded sequence."""

    token_ids: tuple[int, ...]
    """Committed after the prompt; cut after the end token or at `max_new_tokens`."""
    steps: tuple[ReferenceStep, ...]
    first_gap: float
    """Top-2 gap of the target's logits at the first token, which the prompt alone decides."""

    @property
    def acceptance_length(self) -> float:
        """(accepted + steps) / steps: tokens per target step, the bonus token counted; 1.0 with no
        steps.
        """
        if not self.steps:
            return 1.0
        return 1.0 + sum(step.num_accepted for step in self.steps) / len(self.steps)


@dataclass(frozen=True)
class BatchStep:
    """One step of a batch, as tensors: N sequences still decoding, K drafts, at most K + 1 target
    rows (R).
    """

    rows_N: torch.Tensor
    """Which sequences of the batch these are, int64."""
    positions_N: torch.Tensor
    anchor_ids_N: torch.Tensor
    draft_ids_NK: torch.Tensor
    num_scheduled_N: torch.Tensor
    num_accepted_N: torch.Tensor
    draft_gaps_NK: torch.Tensor
    target_gaps_NR: torch.Tensor

    def per_sequence(self) -> list[tuple[int, ReferenceStep]]:
        """(batch row, its step) for each of the N sequences."""
        columns = (
            self.rows_N,
            self.positions_N,
            self.anchor_ids_N,
            self.draft_ids_NK,
            self.num_scheduled_N,
            self.num_accepted_N,
            self.draft_gaps_NK,
            self.target_gaps_NR,
        )

        return [
            (
                row,
                ReferenceStep(
                    position=position,
                    anchor=anchor,
                    draft_ids=tuple(drafts),
                    num_scheduled=scheduled,
                    num_accepted=accepted,
                    draft_gaps=tuple(draft_gaps),
                    target_gaps=tuple(target_gaps[: accepted + 1]),
                ),
            )
            for row, position, anchor, drafts, scheduled, accepted, draft_gaps, target_gaps in zip(
                *(column.tolist() for column in columns), strict=True
            )
        ]


def top2_gaps(logits: torch.Tensor) -> torch.Tensor:
    """Difference of the two largest logits, [...], of logits [..., V]."""
    top = logits.topk(2, dim=-1).values
    return top[..., 0] - top[..., 1]
