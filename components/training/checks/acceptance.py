"""Teacher-forced acceptance on held-out conversations whose states are kept in memory.

Shapes: T tokens, N anchors, K draft positions, V target vocabulary, D draft vocabulary, H hidden.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
import torch

from components.drafter.protocol import Drafter
from components.errors import TrainingError
from components.training.job import ValidationPoint
from components.training.objectives.block import BlockObjective, BlockScores
from components.training.objectives.head_loss import CHUNK_ELEMENTS
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


class AcceptanceCheck:
    """Validation packs, held once; `measure` scores a drafter on every block of them.

    Args:
        packs: of the validation split.
        max_anchors: packs are taken until they hold this many anchors.
        lm_head_VH: the target's full output head.
        drafter: gives the final norm and the draft vocabulary.
        num_draft_tokens: K.
        slices: slice of each sample id, e.g. the source of a conversation; none where slices are
            not told apart.

    Raises:
        TrainingError: no pack has a supervised token.
    """

    def __init__(
        self,
        packs: Iterable[Pack],
        *,
        max_anchors: int,
        lm_head_VH: torch.Tensor,
        drafter: Drafter,
        num_draft_tokens: int,
        slices: Mapping[str, str] | None = None,
    ) -> None:
        self._slices = slices or {}
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
            raise TrainingError(
                "the validation split has no supervised tokens to measure acceptance on"
            )

    @torch.no_grad()
    def measure(self, objective: BlockObjective, *, step: int, elapsed_s: float) -> ValidationPoint:
        """Greedy and expected acceptance of the drafter as it stands."""
        losses: list[float] = []
        walks: list[_Walk] = []
        for held in self._packs:
            device = held.argmax_T.device  # the drafter's; packs wait in host memory
            scores = objective(
                held.pack.to(device), held.blocks.to(device), held.argmax_T, held.mass_T
            )
            losses.append(float(scores.loss))
            walks += self._walks(held, scores)

        greedy = _lengths(walks)
        expected = _Sums.of([one.expected for one in walks])
        by_slice = {
            name: _lengths([one for one in walks if one.slice == name])
            for name in self._names(walks)
        }
        positions = _Sums.of([one.prefix_NK for one in walks])

        return ValidationPoint(
            step=step,
            elapsed_s=elapsed_s,
            num_anchors=int(greedy.counts.sum()),
            loss=float(np.mean(losses)),
            acceptance_length=greedy.means[0],
            acceptance_interval=greedy.intervals[0],
            walked_acceptance_length=sum(one.num_tokens for one in walks)
            / sum(one.num_steps for one in walks),
            expected_acceptance_length=expected.means[0],
            expected_interval=expected.intervals[0],
            acceptance_by_position=positions.means,
            interval_by_position=positions.intervals,
            acceptance_by_slice={name: sums.means[0] for name, sums in by_slice.items()},
            interval_by_slice={name: sums.intervals[0] for name, sums in by_slice.items()},
        )

    def _walks(self, held: ValidationPack, scores: BlockScores) -> list[_Walk]:
        """Per document with anchors: what its blocks accept, and the sums of its walk."""
        prefix_NK = scores.match_NK.int().cumprod(1).cpu().numpy()
        lengths_N = prefix_NK.sum(1) + 1
        expected_N = scores.overlap_NK.cumprod(1).sum(1).cpu().numpy() + 1.0
        names = dict(zip(held.pack.bounds, held.pack.sample_ids, strict=True))
        return [
            _Walk(
                slice=self._slices.get(names[start, end]),
                prefix_NK=prefix_NK[first:last],
                lengths=lengths_N[first:last],
                expected=expected_N[first:last],
                num_tokens=int(lengths_N[steps].sum()),
                num_steps=len(steps),
            )
            for (start, end, first, last), steps in zip(
                held.blocks.spans, walk(held.blocks, lengths_N), strict=True
            )
        ]

    @staticmethod
    def _names(walks: list[_Walk]) -> list[str]:
        return sorted({one.slice for one in walks if one.slice is not None})


@dataclass(frozen=True)
class _Walk:
    slice: str | None
    prefix_NK: np.ndarray
    lengths: np.ndarray
    expected: np.ndarray
    num_tokens: int
    num_steps: int


@dataclass(frozen=True)
class _Sums:
    """Means over anchors with 95 % percentile bootstrap intervals, resampling whole conversations.

    Shapes: C conversations, X figures.
    """

    sums_CX: np.ndarray
    counts: np.ndarray

    @classmethod
    def of(cls, groups: list[np.ndarray]) -> _Sums:
        """Of one array per conversation, [anchors] or [anchors, X]."""
        sums = [group.reshape(len(group), -1).sum(0) for group in groups]
        return cls(np.stack(sums).astype(float), np.array([len(group) for group in groups]))

    @property
    def means(self) -> tuple[float, ...]:
        """Over all anchors."""
        return tuple((self.sums_CX.sum(0) / self.counts.sum()).tolist())

    @property
    def intervals(self) -> tuple[tuple[float, float], ...]:
        """Per figure."""
        num = len(self.counts)
        chosen = np.random.default_rng(0).integers(num, size=(NUM_RESAMPLES, num))
        means = self.sums_CX[chosen].sum(1) / self.counts[chosen].sum(1)[:, None]
        return tuple(zip(*np.quantile(means, [0.025, 0.975], axis=0).tolist(), strict=True))


def _lengths(walks: list[_Walk]) -> _Sums:
    return _Sums.of([one.lengths for one in walks])


def walk(blocks: Blocks, lengths_N: np.ndarray) -> list[np.ndarray]:
    """Per document with anchors, the blocks that decoding would draft: from its first anchor on,
    each is as far from the one before as that one's acceptance length; int64 places among the N
    anchors.
    """
    anchors_N = blocks.anchors_N.cpu().numpy()
    walks = []
    for _, _, first, last in blocks.spans:
        place = {int(anchor): n for n, anchor in enumerate(anchors_N[first:last], first)}
        position = int(anchors_N[first])
        steps = []
        while position in place:
            steps.append(place[position])
            position += int(lengths_N[steps[-1]])
        walks.append(np.array(steps))
    return walks


@torch.no_grad()
def target_words(
    pack: Pack, lm_head_VH: torch.Tensor, drafter: Drafter
) -> tuple[torch.Tensor, torch.Tensor]:
    """Full-vocabulary argmax and draft-vocabulary mass after each supervised token's predecessor,
    in chunks.
    """
    argmax_T = torch.full((pack.num_tokens,), -1, dtype=torch.long)
    mass_T = torch.ones(pack.num_tokens)
    # Only states that a slot is predicted from are needed: those at supervised tokens.
    needed = torch.nonzero(pack.supervised_T).flatten()
    for chunk in needed.split(max(1, 4 * CHUNK_ELEMENTS // len(lm_head_VH))):
        states_CH = drafter.verifier_norm(
            pack.states_TLH[chunk, -1].float().to(drafter.verifier_norm.weight.device)
        )
        logits_CV = (states_CH.to(lm_head_VH.dtype) @ lm_head_VH.T).float()
        argmax_T[chunk] = logits_CV.argmax(-1).cpu()
        if drafter.t2d is not None:
            inside = torch.logsumexp(logits_CV[:, drafter.t2d.bool()], -1) - torch.logsumexp(
                logits_CV, -1
            )
            mass_T[chunk] = inside.exp().cpu()

    device = drafter.lm_head.weight.device
    return argmax_T.to(device), mass_T.to(device)
