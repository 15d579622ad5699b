"""Verification of drafts, for a whole batch at once: what a target step accepts, and the token it
adds.

Rejection sampling with residual is algorithm 1 of Leviathan et al., arXiv:2211.17192: draft x_k ~
q_k is kept with probability min(1, p_k(x_k) / q_k(x_k)); at the first refusal the token comes from
max(p_k - q_k, 0), normalised; with none refused from p_{K+1}. What is committed follows p whatever
q is.

Shapes: B sequences, K drafts verified, R = K + 1 target rows (row k follows draft k, row 0 the
anchor), V draft vocabulary, W target vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Verification:
    """Outcome of one target step."""

    num_accepted_B: torch.Tensor
    """Drafts kept, 0..K, int64."""
    next_ids_B: torch.Tensor
    """The token after them, from the target: the residual's draw or the bonus token; int64."""

    def committed_BR(self, draft_ids_BK: torch.Tensor) -> torch.Tensor:
        """The tokens of the step, int64: the first `num_accepted_B` + 1 are committed, what follows
        means nothing.
        """
        committed_BR = torch.cat([draft_ids_BK, self.next_ids_B[:, None]], dim=1)
        return committed_BR.scatter(1, self.num_accepted_B[:, None], self.next_ids_B[:, None])


@dataclass(frozen=True)
class Sampler:
    """The sampling settings of a call; temperature 0 is greedy."""

    temperature: float
    generator: torch.Generator | None
    """On the device of the logits; None for torch's own."""

    def __call__(self, logits: torch.Tensor) -> torch.Tensor:
        """Token ids [...], int64, for logits [..., V]."""
        if self.temperature == 0:
            return logits.argmax(-1)
        return draw(self.probabilities(logits), self.generator)

    def probabilities(self, logits: torch.Tensor) -> torch.Tensor:
        """softmax(logits / temperature), float32, same shape."""
        return (logits.float() / self.temperature).softmax(-1)


def draw(weights: torch.Tensor, generator: torch.Generator | None) -> torch.Tensor:
    """One index per row, [...] int64, with probabilities proportional to `weights` [..., V]."""
    return torch.multinomial(weights.flatten(0, -2), 1, generator=generator).view(
        weights.shape[:-1]
    )


def verify_greedy(
    draft_ids_BK: torch.Tensor,
    target_logits_BRW: torch.Tensor,
    *,
    num_scheduled_B: torch.Tensor | None = None,
) -> Verification:
    """Drafts are kept while they are the target's argmax, then comes the target's own token.

    Args:
        draft_ids_BK: as target ids, int64.
        target_logits_BRW: float32.
        num_scheduled_B: drafts that count, 0..K, int64; None for all.
    """
    choices_BR = target_logits_BRW.argmax(-1)
    num_accepted_B = _prefix_length(draft_ids_BK == choices_BR[:, :-1], num_scheduled_B)
    return Verification(num_accepted_B, choices_BR.gather(1, num_accepted_B[:, None])[:, 0])


def verify_sampled(
    draft_ids_BK: torch.Tensor,
    draft_probs_BKW: torch.Tensor,
    target_probs_BRW: torch.Tensor,
    *,
    generator: torch.Generator | None,
    num_scheduled_B: torch.Tensor | None = None,
) -> Verification:
    """Rejection sampling with residual.

    A sequence whose drafts were all kept, or cut off by `num_scheduled_B`, draws from the target's
    next row as it is: nothing was proposed there, so q is 0 and the residual is p itself.

    Args:
        draft_ids_BK: each drawn from its row of `draft_probs_BKW`; target ids, int64.
        draft_probs_BKW: q over target ids, float32.
        target_probs_BRW: p, float32.
        generator: of the random draws; None for torch's own.
        num_scheduled_B: drafts that count, 0..K, int64; None for all.
    """
    batch_size, num_drafts = draft_ids_BK.shape
    chosen_BK1 = draft_ids_BK[..., None]
    p_BK = target_probs_BRW[:, :-1].gather(2, chosen_BK1)[..., 0]
    q_BK = draft_probs_BKW.gather(2, chosen_BK1)[..., 0]
    uniform_BK = torch.rand(q_BK.shape, generator=generator, device=q_BK.device)
    num_accepted_B = _prefix_length(uniform_BK * q_BK < p_BK, num_scheduled_B)
    rows_B = torch.arange(batch_size, device=q_BK.device)

    p_BW = target_probs_BRW[rows_B, num_accepted_B]
    refused_B = num_accepted_B < (num_drafts if num_scheduled_B is None else num_scheduled_B)
    if num_drafts:
        q_BW = (
            draft_probs_BKW[rows_B, num_accepted_B.clamp_max(num_drafts - 1)] * refused_B[:, None]
        )
    else:
        q_BW = torch.zeros_like(p_BW)

    residual_BW = (p_BW - q_BW).clamp_min(0)
    # A refusal with p equal to q up to rounding leaves nothing to draw from but p itself.
    weights_BW = torch.where(residual_BW.sum(-1, keepdim=True) > 0, residual_BW, p_BW)
    return Verification(num_accepted_B, draw(weights_BW, generator))


def in_target_vocabulary(
    probs_BKV: torch.Tensor, target_ids_V: torch.Tensor, *, vocab_size: int
) -> torch.Tensor:
    """q over target ids, [B, K, W]: zero for a token the drafter cannot propose."""
    probs_BKW = probs_BKV.new_zeros(*probs_BKV.shape[:-1], vocab_size)
    return probs_BKW.index_copy_(-1, target_ids_V, probs_BKV)


def _prefix_length(keeps_BK: torch.Tensor, num_scheduled_B: torch.Tensor | None) -> torch.Tensor:
    """How many leading drafts are kept, at most the scheduled ones; int64 [B]."""
    if num_scheduled_B is not None:
        keeps_BK = keeps_BK & (
            torch.arange(keeps_BK.shape[1], device=keeps_BK.device) < num_scheduled_B[:, None]
        )
    return keeps_BK.long().cumprod(1).sum(1)
