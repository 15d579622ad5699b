"""Draft head and loss in one pass, chunk by chunk, at the supervised slots only.

The draft logits z = h W^T + m W2^T (W: the target's frozen head rows, W2: the Markov head's output)
are never stored: a chunk's logits become its loss and the gradient with respect to z, which is
folded into the gradients of h, m and W2 right away. Slots are ordered by target position, so a
target distribution is computed once for all blocks at it.

With p the target's and q the draft's distribution over the draft vocabulary, per slot:
    kl = sum p (log p - log q)             dkl/dz = q - p
    ce = -log q[argmax p]                  dce/dz = q - onehot(argmax p)
    tv = 1 - sum min(p, q)  (half of L1)   dtv/dz = q (sum_{q<p} q - [q < p])
Rejection sampling accepts a draft token with probability 1 - tv (Leviathan et al. 2023, corollary
3.6).

Shapes: S supervised slots, U target positions, C slots of a chunk, H hidden, R Markov rank, V draft
vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

CHUNK_ELEMENTS = 2**21
"""Logits held at once: 8 MiB in fp32, near a CPU core's cache and bounded for any vocabulary."""

LOSS_NAMES = ("kl", "ce", "tv")


@dataclass(frozen=True)
class SlotTargets:
    """What the slots of a pack are compared with.

    `last_UH` holds the target's last states after its final norm, `index_S` (ascending) names each
    slot's row of it. `mass_U`, where given, is the target's probability inside the draft
    vocabulary: it scales p in the overlap only.
    """

    last_UH: torch.Tensor
    index_S: torch.Tensor
    mass_U: torch.Tensor | None = None


@dataclass(frozen=True)
class SlotScores:
    """`loss` is the differentiable scalar. Per slot, without gradient: `overlap_S` = sum min(p, q),
    `likelihood_S` = q[argmax p], and `draft_S` and `target_S`, the most probable draft ids under q
    and p.
    """

    loss: torch.Tensor
    overlap_S: torch.Tensor
    likelihood_S: torch.Tensor
    draft_S: torch.Tensor
    target_S: torch.Tensor


def head_loss(
    hidden_SH: torch.Tensor,
    markov_SR: torch.Tensor | None,
    head_VH: torch.Tensor,
    markov_head_VR: torch.Tensor | None,
    targets: SlotTargets,
    *,
    slot_weights_S: torch.Tensor,
    loss_weights: dict[str, float],
) -> SlotScores:
    """sum over slots of slot weight x (weighted sum of kl, ce and tv), and how well each slot
    drafts.

    Args:
        hidden_SH: the drafter's states after its final norm.
        markov_SR: Markov features of the previous tokens; None without a Markov head.
        head_VH: frozen output head; its dtype is the one matrices are multiplied in.
        markov_head_VR: output of the Markov head; None without one.
        targets: what to compare with.
        slot_weights_S: weight of each slot in the loss, without gradient.
        loss_weights: weight of each of LOSS_NAMES; a missing name weighs nothing.
    """
    if markov_SR is None or markov_head_VR is None:
        markov_SR, markov_head_VR = (
            hidden_SH.new_zeros(len(hidden_SH), 0),
            head_VH.new_zeros(len(head_VH), 0),
        )
    outputs = _HeadLoss.apply(
        hidden_SH, markov_SR, markov_head_VR, head_VH, targets, slot_weights_S.float(), loss_weights
    )
    return SlotScores(*outputs)


class _HeadLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_SH: torch.Tensor,
        markov_SR: torch.Tensor,
        markov_head_VR: torch.Tensor,
        head_VH: torch.Tensor,
        targets: SlotTargets,
        slot_weights_S: torch.Tensor,
        loss_weights: dict[str, float],
    ) -> tuple[torch.Tensor, ...]:
        dtype = head_VH.dtype
        wants_grad = any(ctx.needs_input_grad[:3])
        grad_hidden_SH, grad_markov_SR = torch.zeros_like(hidden_SH), torch.zeros_like(markov_SR)
        grad_head_VR = torch.zeros_like(markov_head_VR, dtype=torch.float32)
        bias_VR = markov_head_VR.to(dtype)
        has_markov = markov_head_VR.shape[1] > 0
        loss = hidden_SH.new_zeros((), dtype=torch.float32)

        scores = []
        num_rows = max(1, CHUNK_ELEMENTS // head_VH.shape[0])
        with torch.autocast(hidden_SH.device.type, enabled=False):
            for start in range(0, len(hidden_SH), num_rows):
                rows = slice(start, start + num_rows)
                hidden_CH, markov_CR = hidden_SH[rows].to(dtype), markov_SR[rows].to(dtype)
                logits_CV = hidden_CH @ head_VH.T
                if has_markov:
                    logits_CV = logits_CV + markov_CR @ bias_VR.T
                chunk = _score(
                    logits_CV.float(),
                    _chunk_targets(targets, rows, head_VH),
                    loss_weights,
                    wants_grad,
                )
                loss += (chunk.loss_C * slot_weights_S[rows]).sum()
                scores.append((chunk.overlap_C, chunk.likelihood_C, chunk.draft_C, chunk.target_C))
                if chunk.grad_CV is None:
                    continue
                grad_CV = (chunk.grad_CV * slot_weights_S[rows, None]).to(dtype)
                grad_hidden_SH[rows] = (grad_CV @ head_VH).to(hidden_SH.dtype)
                if has_markov:
                    grad_markov_SR[rows] = (grad_CV @ bias_VR).to(markov_SR.dtype)
                    grad_head_VR += grad_CV.T @ markov_CR

        ctx.save_for_backward(grad_hidden_SH, grad_markov_SR, grad_head_VR.to(markov_head_VR.dtype))
        details = tuple(torch.cat(column) for column in zip(*scores, strict=True))
        ctx.mark_non_differentiable(*details)
        return (loss, *details)

    @staticmethod
    def backward(ctx: Any, grad_loss: torch.Tensor, *_: Any) -> tuple[torch.Tensor | None, ...]:
        grads = tuple(grad * grad_loss.to(grad.dtype) for grad in ctx.saved_tensors)
        return (*grads, None, None, None, None)


@dataclass(frozen=True)
class _ChunkTargets:
    p_CV: torch.Tensor
    negative_entropy_C: torch.Tensor
    argmax_C: torch.Tensor
    mass_C: torch.Tensor | None


@dataclass(frozen=True)
class _ChunkScores:
    loss_C: torch.Tensor
    overlap_C: torch.Tensor
    likelihood_C: torch.Tensor
    draft_C: torch.Tensor
    target_C: torch.Tensor
    grad_CV: torch.Tensor | None


def _chunk_targets(targets: SlotTargets, rows: slice, head_VH: torch.Tensor) -> _ChunkTargets:
    """Target distributions of a chunk: computed per target position, then repeated for the slots
    that share it.
    """
    index_C = targets.index_S[rows]
    first, last = int(index_C[0]), int(index_C[-1])
    positions = slice(first, last + 1)
    logits_UV = (targets.last_UH[positions].to(head_VH.dtype) @ head_VH.T).float()
    log_p_UV = torch.log_softmax(logits_UV, dim=-1)
    p_UV = log_p_UV.exp()
    local_C = index_C - first

    mass_U = targets.mass_U
    return _ChunkTargets(
        p_CV=p_UV[local_C],
        negative_entropy_C=(p_UV * log_p_UV).sum(-1)[local_C],
        argmax_C=logits_UV.argmax(-1)[local_C],
        mass_C=mass_U[positions][local_C] if mass_U is not None else None,
    )


def _score(
    logits_CV: torch.Tensor,
    targets: _ChunkTargets,
    loss_weights: dict[str, float],
    wants_grad: bool,
) -> _ChunkScores:
    """One chunk's losses, and their gradient by the logits in closed form: autograd would keep the
    logits of every chunk.
    """
    p_CV = targets.p_CV
    argmax_C1 = targets.argmax_C[:, None]
    normaliser_C = torch.logsumexp(logits_CV, dim=-1)
    q_CV = (logits_CV - normaliser_C[:, None]).exp_()
    overlap_C = torch.minimum(p_CV, q_CV).sum(-1)
    kl_C = targets.negative_entropy_C - torch.linalg.vecdot(p_CV, logits_CV) + normaliser_C
    ce_C = normaliser_C - logits_CV.gather(1, argmax_C1)[:, 0]

    kl, ce, tv = (loss_weights.get(name, 0.0) for name in LOSS_NAMES)
    grad_CV = None
    if wants_grad:
        grad_CV = (kl + ce) * q_CV - kl * p_CV
        if ce:
            grad_CV.scatter_add_(1, argmax_C1, torch.full_like(ce_C, -ce)[:, None])
        if tv:
            below_CV = (q_CV < p_CV).to(q_CV.dtype)
            grad_CV += tv * q_CV * (torch.linalg.vecdot(below_CV, q_CV)[:, None] - below_CV)

    if targets.mass_C is None:
        true_overlap_C = overlap_C
    else:
        true_overlap_C = torch.minimum(p_CV * targets.mass_C[:, None], q_CV).sum(-1)

    return _ChunkScores(
        loss_C=kl * kl_C + ce * ce_C + tv * (1 - overlap_C),
        overlap_C=true_overlap_C,
        likelihood_C=torch.exp(-ce_C),
        draft_C=logits_CV.argmax(-1),
        target_C=targets.argmax_C,
        grad_CV=grad_CV,
    )
