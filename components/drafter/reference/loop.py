"""The loop of the reference decoder: propose, cut, verify, commit, for every sequence of a batch
that is not done.

Shapes: B sequences, N of them still decoding, T tokens, S positions, L aux layers, H hidden, K
draft tokens, R = K + 1 rows of a verification, V draft vocabulary, W target vocabulary, M new
tokens, E end tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence

from components.drafter.reference.base import ContextRows, Proposal, ReferenceDrafter, Scheduler
from components.drafter.reference.records import BatchStep, top2_gaps
from components.drafter.reference.target import ReferenceTarget
from components.drafter.reference.verify import (
    Sampler,
    Verification,
    in_target_vocabulary,
    verify_greedy,
    verify_sampled,
)
from components.errors import ConfigError


@dataclass
class Batch:
    """Sequences in decoding; their tokens lie at their positions."""

    token_ids_BS: torch.Tensor
    prompt_lengths_B: torch.Tensor
    num_new_B: torch.Tensor
    rows_N: torch.Tensor
    """Sequences still decoding: rows of the tensors above."""
    first_gaps_B: torch.Tensor
    steps: list[BatchStep] = field(default_factory=list)

    def append(self, committed_NR: torch.Tensor, num_committed_N: torch.Tensor) -> None:
        """Write committed tokens of the sequences still decoding; what follows them is written over
        later.
        """
        starts_N = self.prompt_lengths_B[self.rows_N] + self.num_new_B[self.rows_N]
        columns_NR = starts_N[:, None] + torch.arange(
            committed_NR.shape[1], device=committed_NR.device
        )
        self.token_ids_BS[self.rows_N[:, None], columns_NR] = committed_NR
        self.num_new_B[self.rows_N] += num_committed_N

    def new_tokens(self, max_new_tokens: int, end_ids_E: torch.Tensor) -> torch.Tensor:
        """[B, M] tokens after the prompts, int64; -1 after the first end token."""
        columns_BM = self.prompt_lengths_B[:, None] + torch.arange(
            max_new_tokens, device=self.token_ids_BS.device
        )
        tokens_BM = self.token_ids_BS.gather(1, columns_BM)
        is_end_BM = torch.isin(tokens_BM, end_ids_E).long()
        return tokens_BM.masked_fill(is_end_BM.cumsum(1) - is_end_BM > 0, -1)


class DecodeLoop:
    """The settings of one call, checked, and its steps."""

    def __init__(
        self,
        target: ReferenceTarget,
        drafter: ReferenceDrafter,
        sampler: Sampler,
        *,
        num_draft_tokens: int | None = None,
        scheduler: Scheduler | None = None,
        end_ids: Sequence[int] = (),
        keep_steps: bool = False,
    ) -> None:
        self.target = target
        self.drafter = drafter
        self.device = target.device
        self.sampler, self.scheduler, self.keep_steps = sampler, scheduler, keep_steps
        self.num_draft_tokens = (
            self.drafter.num_draft_tokens if num_draft_tokens is None else num_draft_tokens
        )
        self._check()
        self.end_ids_E = torch.tensor(list(end_ids), dtype=torch.long, device=self.device)

    def _check(self) -> None:
        generator = self.sampler.generator
        if self.num_draft_tokens < 1:
            raise ConfigError(
                "nothing to draft",
                got=f"{self.num_draft_tokens} draft tokens",
                expected="at least 1",
            )
        if generator is not None and generator.device.type != self.device.type:
            raise ConfigError(
                "the generator is of another device", got=generator.device, expected=self.device
            )
        if self.scheduler is not None and not self.drafter.has_confidence:
            raise ConfigError(
                "a scheduler needs confidence, and the drafter has no confidence head",
                fix="Train with drafter.confidence_head, or decode without a scheduler.",
            )

    def decode(self, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> Batch:
        """All sequences to their ends."""
        if not prompts or not all(prompts) or max_new_tokens < 1 or self.sampler.temperature < 0:
            raise ConfigError(
                "nothing to decode",
                got=f"prompts of {sorted({len(prompt) for prompt in prompts})} tokens, "
                f"{max_new_tokens} new, "
                f"temperature {self.sampler.temperature}",
                expected="prompts and new tokens of at least one, temperature >= 0",
            )

        batch = self._start(prompts, max_new_tokens)
        self._drop_finished(batch, max_new_tokens)
        while batch.rows_N.numel():
            self._step(batch)
            self._drop_finished(batch, max_new_tokens)

        return batch

    def _start(self, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> Batch:
        """Run the prompts and commit each one's first token, which no draft decides."""
        lengths_B = torch.tensor([len(prompt) for prompt in prompts], device=self.device)
        prompts_BT = pad_sequence(
            [torch.tensor(list(prompt)) for prompt in prompts], batch_first=True
        ).to(self.device)
        batch_size, num_columns = prompts_BT.shape
        num_slots = num_columns + max_new_tokens + self.num_draft_tokens + 1
        self.target.reset(batch_size=batch_size, num_slots=num_slots)

        keep_T, places_B = torch.unique(lengths_B - 1, return_inverse=True)
        logits_BTW, aux_BTLH = self.target.extend(prompts_BT, keep_T=keep_T)
        self.target.advance(lengths_B)
        rows_B = torch.arange(batch_size, device=self.device)
        last_BW = logits_BTW[rows_B, places_B]
        token_ids_BS = torch.cat(
            [prompts_BT, prompts_BT.new_zeros(batch_size, num_slots - num_columns)], dim=1
        )

        num_new_B = torch.zeros_like(lengths_B)
        batch = Batch(token_ids_BS, lengths_B, num_new_B, rows_B, top2_gaps(last_BW))
        batch.append(self.sampler(last_BW)[:, None], torch.ones_like(lengths_B))
        self.drafter.reset(batch_size=batch_size, num_slots=num_slots)
        self.drafter.extend_context(
            ContextRows(aux_BTLH, token_ids_BS[:, 1 : num_columns + 1], lengths_B)
        )

        return batch

    def _drop_finished(self, batch: Batch, max_new_tokens: int) -> None:
        """Sequences with all their tokens, or with an end token among them, leave the batch."""
        goes_on_N = batch.num_new_B[batch.rows_N] < max_new_tokens
        if self.end_ids_E.numel():
            columns_S = torch.arange(batch.token_ids_BS.shape[1], device=self.device)
            starts_N = batch.prompt_lengths_B[batch.rows_N]
            ends_N = starts_N + batch.num_new_B[batch.rows_N]
            is_new_NS = (columns_S >= starts_N[:, None]) & (columns_S < ends_N[:, None])
            is_end_NS = torch.isin(batch.token_ids_BS[batch.rows_N], self.end_ids_E)
            goes_on_N &= ~(is_new_NS & is_end_NS).any(1)

        if not bool(goes_on_N.all()):
            kept_N = goes_on_N.nonzero()[:, 0]
            batch.rows_N = batch.rows_N[kept_N]
            self.target.select(kept_N)
            self.drafter.select(kept_N)

    def _step(self, batch: Batch) -> None:
        """Propose, cut, verify, commit for every sequence still decoding."""
        positions_N = self.target.lengths_B
        anchor_ids_N = batch.token_ids_BS[batch.rows_N, positions_N]
        proposal = self.drafter.propose(
            self.sampler,
            num_draft_tokens=self.num_draft_tokens,
            with_confidence=self.scheduler is not None,
        )

        num_scheduled_N = self._schedule(proposal)
        num_verified = int(num_scheduled_N.max())
        drafts_NK = proposal.draft_ids_BK[:, :num_verified]
        logits_NRW, aux_NRLH = self.target.extend(
            torch.cat([anchor_ids_N[:, None], drafts_NK], dim=1)
        )
        verification = self._verify(proposal, drafts_NK, logits_NRW, num_scheduled_N)

        committed_NR = verification.committed_BR(drafts_NK)
        num_committed_N = verification.num_accepted_B + 1
        if self.keep_steps:
            batch.steps.append(
                BatchStep(
                    rows_N=batch.rows_N,
                    positions_N=positions_N,
                    anchor_ids_N=anchor_ids_N,
                    draft_ids_NK=proposal.draft_ids_BK,
                    num_scheduled_N=num_scheduled_N,
                    num_accepted_N=verification.num_accepted_B,
                    draft_gaps_NK=top2_gaps(proposal.logits_BKV),
                    target_gaps_NR=top2_gaps(logits_NRW),
                )
            )

        batch.append(committed_NR, num_committed_N)
        self.target.advance(num_committed_N)
        self.drafter.extend_context(ContextRows(aux_NRLH, committed_NR, num_committed_N))

    def _schedule(self, proposal: Proposal) -> torch.Tensor:
        """Drafts of each sequence that will be verified, int64 [N]."""
        num_sequences, num_drafts = proposal.draft_ids_BK.shape
        if self.scheduler is None:
            return torch.full((num_sequences,), num_drafts, device=self.device)

        assert proposal.confidence_BK is not None
        wanted = np.asarray(self.scheduler.num_scheduled(proposal.confidence_BK.cpu().numpy()))
        if wanted.shape != (num_sequences,) or not np.isin(wanted, np.arange(num_drafts + 1)).all():
            raise ConfigError(
                "the scheduler answered no number of drafts",
                got=f"{wanted.dtype} of shape {wanted.shape}, "
                f"{wanted.min(initial=0)}..{wanted.max(initial=0)}",
                expected=f"integers of shape ({num_sequences},), 0..{num_drafts}",
            )

        return torch.as_tensor(wanted.astype(np.int64), device=self.device)

    def _verify(
        self,
        proposal: Proposal,
        drafts_NK: torch.Tensor,
        logits_NRW: torch.Tensor,
        num_scheduled_N: torch.Tensor,
    ) -> Verification:
        if self.sampler.temperature == 0:
            return verify_greedy(drafts_NK, logits_NRW, num_scheduled_B=num_scheduled_N)
        draft_probs_NKW = in_target_vocabulary(
            self.sampler.probabilities(proposal.logits_BKV[:, : drafts_NK.shape[1]]),
            self.drafter.target_ids_V,
            vocab_size=logits_NRW.shape[2],
        )

        return verify_sampled(
            drafts_NK,
            draft_probs_NKW,
            self.sampler.probabilities(logits_NRW),
            generator=self.sampler.generator,
            num_scheduled_B=num_scheduled_N,
        )
