"""Confidences of held-out blocks: which slots count, whose conversation they are, and the fit that
follows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from components.drafter.start import read_lm_head
from components.settings import TrainingSettings
from components.training.checks.acceptance import target_words
from components.training.checks.calibrate import (
    calibrate,
    calibration_line,
    calibration_metrics,
    collect_confidences,
)
from components.training.objectives.block import BlockObjective
from components.training.packing import Pack, choose_blocks

K = 3
SETTINGS = TrainingSettings(mixed_precision="no")


@pytest.fixture
def objective(make_drafter: Callable[..., Any]) -> BlockObjective:
    return BlockObjective(make_drafter(), SETTINGS)


@pytest.fixture
def head_VH(tiny_target: Path) -> torch.Tensor:
    return read_lm_head(tiny_target).float()


def greedy(pack: Pack, head_VH: torch.Tensor, drafter: Any) -> Pack:
    """The pack with the text that the target's states call for, as a greedy answer has it."""
    argmax_T, _ = target_words(pack, head_VH, drafter)
    text_T = pack.token_ids_T.clone()
    follows = torch.nonzero(pack.supervised_T[:-1]).flatten() + 1
    text_T[follows] = argmax_T[follows - 1]
    return replace(pack, token_ids_T=text_T)


def test_a_greedy_text_keeps_all_slots_and_counts_conversations(
    objective: BlockObjective, packs: list[Pack], head_VH: torch.Tensor
) -> None:
    texts = [greedy(pack, head_VH, objective.drafter) for pack in packs[:3]]
    held = collect_confidences(objective, iter(texts), lm_head_VH=head_VH, num_draft_tokens=K)
    assert held is not None
    blocks = [choose_blocks(pack, num_draft_tokens=K, num_anchors=None) for pack in texts]
    np.testing.assert_array_equal(
        held.valid_NK, np.concatenate([b.valid_NK.numpy() for b in blocks if b])
    )
    assert held.logits_NK.shape == held.accepted_NK.shape == held.valid_NK.shape
    num_documents = sum(len(b.spans) for b in blocks if b)
    assert sorted(set(held.conversations_N.tolist())) == list(range(num_documents))
    assert (np.diff(held.conversations_N) >= 0).all()
    for pack, block in zip(texts, blocks, strict=True):
        assert block is not None
        argmax_T, _ = target_words(pack, head_VH, objective.drafter)
        drafts = objective.draft(pack, block)
        assert drafts is not None
        first = argmax_T[block.anchors_N] == drafts.draft_ids_NK[:, 0]
        here = len(first)
        held_first = held.accepted_NK[:, 0]
        np.testing.assert_array_equal(held_first[:here], first.numpy())
        held = replace(held, accepted_NK=held.accepted_NK[here:])


def test_a_sampled_text_ends_blocks_where_it_leaves_the_greedy_path(
    objective: BlockObjective, packs: list[Pack], head_VH: torch.Tensor
) -> None:
    text = greedy(packs[0], head_VH, objective.drafter)
    blocks = choose_blocks(text, num_draft_tokens=K, num_anchors=None)
    assert blocks is not None
    n = int(torch.nonzero(blocks.valid_NK.all(1)).flatten()[0])
    anchor = int(blocks.anchors_N[n])
    text.token_ids_T[anchor + 2] = (
        text.token_ids_T[anchor + 2] + 1
    ) % 512  # the second token was sampled
    held = collect_confidences(objective, iter([text]), lm_head_VH=head_VH, num_draft_tokens=K)
    assert held is not None
    # Its own slot is known, those after it are not.
    assert held.valid_NK[n].tolist() == [
        True,
        True,
        False,
    ]
    assert held.valid_NK[n + 1].tolist() == [True, False, False]
    assert held.valid_NK[n + 2, 0]


def test_nothing_to_calibrate_is_none(
    make_drafter: Callable[..., Any],
    packs: list[Pack],
    head_VH: torch.Tensor,
    objective: BlockObjective,
) -> None:
    bare = BlockObjective(make_drafter(confidence_head=False), SETTINGS)
    for chosen, given in ((bare, packs), (objective, [])):
        found = calibrate(
            chosen, iter(given), lm_head_VH=head_VH, num_draft_tokens=K, target_weights="w"
        )
        assert found is None


def test_figures_reach_people_and_mlflow(
    objective: BlockObjective, packs: list[Pack], head_VH: torch.Tensor
) -> None:
    found = calibrate(
        objective, iter(packs), lm_head_VH=head_VH, num_draft_tokens=K, target_weights="w"
    )
    assert found is not None and found.target_weights == "w"
    values = calibration_metrics(found)
    assert values["calibration/ece_after"] == found.after.ece
    assert values["calibration/temperature_position_1"] == found.temperatures[0]
    assert values["calibration/num_blocks"] == found.num_blocks
    assert f"on {found.num_blocks} blocks" in calibration_line(found)
    assert ("too few events" in calibration_line(found)) == (not all(found.is_fitted))
