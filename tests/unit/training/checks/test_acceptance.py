"""Teacher-forced acceptance: the walk, the interval, and a drafter that is always right."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from components.drafter.start import read_lm_head
from components.errors import TrainingError
from components.settings import TrainingSettings
from components.training.checks.acceptance import AcceptanceCheck, walk
from components.training.objectives.block import BlockObjective, BlockScores
from components.training.packing import Blocks, Pack


def test_a_walk_jumps_by_what_is_accepted() -> None:
    blocks = Blocks(
        torch.tensor([4, 5, 6, 7, 20, 21]),
        torch.ones(6, 3, dtype=torch.bool),
        [(0, 9, 0, 4), (9, 25, 4, 6)],
    )
    walks = walk(blocks, np.array([3, 1, 1, 2, 1, 1]))
    assert [steps.tolist() for steps in walks] == [[0, 3], [4, 5]]


class Perfect(BlockObjective):
    """Every draft token is the target's."""

    def forward(self, pack: Pack, blocks: Blocks, *_: Any) -> BlockScores:
        valid = blocks.valid_NK
        return BlockScores(torch.zeros(()), valid, valid.float(), None)


def test_a_perfect_drafter_accepts_all_it_may(
    make_drafter: Callable[..., Any], packs: list[Pack], tiny_target: Path
) -> None:
    drafter = make_drafter()
    head = read_lm_head(tiny_target).float()
    held = AcceptanceCheck(
        packs, max_anchors=40, lm_head_VH=head, drafter=drafter, num_draft_tokens=3
    )
    point = held.measure(Perfect(drafter, TrainingSettings()), step=5, elapsed_s=1.0)
    assert point.acceptance_by_position[0] == 1.0 and 3.0 < point.acceptance_length <= 4.0
    assert point.acceptance_length == pytest.approx(point.expected_acceptance_length)
    assert point.acceptance_interval[0] <= point.acceptance_length <= point.acceptance_interval[1]
    assert point.num_anchors >= 40


def test_slices_and_positions_have_their_own_lengths(
    make_drafter: Callable[..., Any], packs: list[Pack], tiny_target: Path
) -> None:
    """Right on the slice `even`, wrong on `odd`: 4 tokens a step well inside an answer, and 1."""
    drafter = make_drafter()
    names = [name for pack in packs for name in pack.sample_ids]
    slices = {name: "even" if number % 2 == 0 else "odd" for number, name in enumerate(names)}

    class RightOnEven(Perfect):
        def forward(self, pack: Pack, blocks: Blocks, *_: Any) -> BlockScores:
            right = {
                bounds
                for bounds, name in zip(pack.bounds, pack.sample_ids, strict=True)
                if slices[name] == "even"
            }
            match_NK = torch.zeros_like(blocks.valid_NK)
            for start, end, first, last in blocks.spans:
                if (start, end) in right:
                    match_NK[first:last] = blocks.valid_NK[first:last]
            return BlockScores(torch.zeros(()), match_NK, match_NK.float(), None)

    held = AcceptanceCheck(
        packs,
        max_anchors=10**6,
        lm_head_VH=read_lm_head(tiny_target).float(),
        drafter=drafter,
        num_draft_tokens=3,
        slices=slices,
    )
    point = held.measure(RightOnEven(drafter, TrainingSettings()), step=0, elapsed_s=0.0)
    assert point.acceptance_by_slice["odd"] == 1.0 and point.interval_by_slice["odd"] == (1.0, 1.0)
    assert 3.0 < point.acceptance_by_slice["even"] <= 4.0
    assert 1.0 < point.acceptance_length < point.acceptance_by_slice["even"]
    for share, (low, high) in zip(
        point.acceptance_by_position, point.interval_by_position, strict=True
    ):
        assert low <= share <= high
    assert point.expected_interval is not None
    assert (
        point.expected_interval[0] <= point.expected_acceptance_length <= point.expected_interval[1]
    )


def test_an_untrained_drafter_accepts_almost_nothing(
    make_drafter: Callable[..., Any], packs: list[Pack], tiny_target: Path
) -> None:
    drafter = make_drafter()
    head = read_lm_head(tiny_target).float()
    held = AcceptanceCheck(
        packs, max_anchors=200, lm_head_VH=head, drafter=drafter, num_draft_tokens=3
    )
    objective = BlockObjective(drafter, TrainingSettings(mixed_precision="no"))
    assert held.measure(objective, step=0, elapsed_s=0.0).acceptance_length < 1.3


def test_packs_without_supervision_are_refused(
    make_drafter: Callable[..., Any], packs: list[Pack], tiny_target: Path
) -> None:
    with pytest.raises(TrainingError, match="no supervised tokens"):
        AcceptanceCheck(
            [],
            max_anchors=4,
            lm_head_VH=read_lm_head(tiny_target),
            drafter=make_drafter(),
            num_draft_tokens=3,
        )
