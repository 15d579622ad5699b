"""Teacher-forced acceptance on held-out conversations whose states are kept in memory.

Shapes: T tokens, N anchors, K draft positions, V target vocabulary, D draft vocabulary, H hidden.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from components.errors import TrainingError
from components.training.head_loss import CHUNK_ELEMENTS
from components.training.job import ValidationPoint
from components.training.objective import BlockObjective
from components.training.packing import Blocks, Pack, choose_blocks

NUM_RESAMPLES = 500


@dataclass(frozen=True)
class ValidationPack:
    """A pack, all its blocks, and what the target itself would say after each token.

    `argmax_T` is its most probable token over the full vocabulary, `mass_T` its
    probability of any draft token.
    """

    pack: Pack
    blocks: Blocks
    argmax_T: torch.Tensor
    mass_T: torch.Tensor


class Validation:
    """Validation packs, held once; `measure` scores a drafter on every block of them.

    Args:
        packs: of the validation split.
        max_anchors: packs are taken until they hold this many anchors.
        lm_head_VH: the target's full output head.
        drafter: gives the final norm and the draft vocabulary.
        num_draft_tokens: K.

    Raises:
        TrainingError: no pack has a supervised token.
    """

    def __init__(
        self, packs: Iterable[Pack], *, max_anchors: int, lm_head_VH: torch.Tensor, drafter: Any, num_draft_tokens: int
    ) -> None:
        self._packs: list[ValidationPack] = []
        num_anchors = 0
        for pack in packs:
            blocks = choose_blocks(pack, num_draft_tokens=num_draft_tokens, num_anchors=None)
            if blocks is None:
                continue
            argmax_T, mass_T = target_words(pack, lm_head_VH, drafter)
            self._packs.append(ValidationPack(pack, blocks, argmax_T, mass_T))
            num_anchors += len(blocks.anchors_N)
            if num_anchors >= max_anchors:
                break
        if not self._packs:
            raise TrainingError("the validation split has no supervised tokens to measure acceptance on")

    @torch.no_grad()
    def measure(self, objective: BlockObjective, *, step: int, elapsed_s: float) -> ValidationPoint:
        """Greedy and expected acceptance of the drafter as it stands."""
        losses, accepted, expected, prefixes, walks = [], [], [], [], []
        for held in self._packs:
            device_pack = held.pack.to(held.blocks.anchors_N.device)
            scores = objective(device_pack, held.blocks, held.argmax_T, held.mass_T)
            prefix_NK = scores.match_NK.int().cumprod(1)
            losses.append(float(scores.loss))
            prefixes.append(prefix_NK.float().cpu())
            accepted.append(prefix_NK.sum(1).cpu().numpy() + 1.0)
            expected.append(scores.overlap_NK.cumprod(1).sum(1).cpu().numpy() + 1.0)
            walks += _conversations(held.blocks, accepted[-1])
        lengths = np.concatenate(accepted)
        return ValidationPoint(
            step=step,
            elapsed_s=elapsed_s,
            num_anchors=len(lengths),
            loss=float(np.mean(losses)),
            acceptance_length=float(lengths.mean()),
            acceptance_interval=_interval([walk.lengths for walk in walks]),
            walked_acceptance_length=sum(walk.num_tokens for walk in walks) / sum(walk.num_steps for walk in walks),
            expected_acceptance_length=float(np.concatenate(expected).mean()),
            acceptance_by_position=tuple(torch.cat(prefixes).mean(0).tolist()),
        )


@dataclass(frozen=True)
class _Walk:
    lengths: np.ndarray
    num_tokens: int
    num_steps: int


def _conversations(blocks: Blocks, lengths_N: np.ndarray) -> list[_Walk]:
    """Per document: its acceptance lengths, and the walk from its first anchor that jumps by what is accepted."""
    anchors_N = blocks.anchors_N.cpu().numpy()
    walks = []
    for _, _, first, last in blocks.spans:
        place = {int(anchor): n for n, anchor in enumerate(anchors_N[first:last], first)}
        position, num_tokens, num_steps = int(anchors_N[first]), 0, 0
        while position in place:
            length = int(lengths_N[place[position]])
            num_tokens, num_steps, position = num_tokens + length, num_steps + 1, position + length
        walks.append(_Walk(lengths_N[first:last], num_tokens, num_steps))
    return walks


def _interval(groups: list[np.ndarray]) -> tuple[float, float]:
    """95 % percentile bootstrap of the mean over anchors, resampling whole conversations."""
    sums, counts = np.array([group.sum() for group in groups]), np.array([len(group) for group in groups])
    chosen = np.random.default_rng(0).integers(len(groups), size=(NUM_RESAMPLES, len(groups)))
    low, high = np.quantile(sums[chosen].sum(1) / counts[chosen].sum(1), [0.025, 0.975])
    return float(low), float(high)


@torch.no_grad()
def target_words(pack: Pack, lm_head_VH: torch.Tensor, drafter: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Full-vocabulary argmax and draft-vocabulary mass after each supervised token's predecessor, in chunks."""
    argmax_T = torch.full((pack.num_tokens,), -1, dtype=torch.long)
    mass_T = torch.ones(pack.num_tokens)
    # Only states that a slot is predicted from are needed: those at supervised tokens.
    needed = torch.nonzero(pack.supervised_T).flatten()
    for chunk in needed.split(max(1, 4 * CHUNK_ELEMENTS // len(lm_head_VH))):
        states_CH = drafter.verifier_norm(pack.states_TLH[chunk, -1].float().to(drafter.verifier_norm.weight.device))
        logits_CV = (states_CH.to(lm_head_VH.dtype) @ lm_head_VH.T).float()
        argmax_T[chunk] = logits_CV.argmax(-1).cpu()
        if drafter.t2d is not None:
            inside = torch.logsumexp(logits_CV[:, drafter.t2d.bool()], -1) - torch.logsumexp(logits_CV, -1)
            mass_T[chunk] = inside.exp().cpu()
    device = drafter.lm_head.weight.device
    return argmax_T.to(device), mass_T.to(device)
