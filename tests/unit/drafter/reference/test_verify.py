"""Verification of a batch, by cases with a known answer."""

from __future__ import annotations

import math

import pytest
import torch
from scipy.stats import chisquare

from components.drafter.reference.verify import (
    Sampler,
    draw,
    in_target_vocabulary,
    verify_greedy,
    verify_sampled,
)

NUM_TRIALS = 20_000


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_greedy_keeps_the_matching_prefix_of_each_sequence() -> None:
    logits_BRW = torch.eye(5)[[1, 2, 3]].expand(3, -1, -1)
    drafts_BK = torch.tensor([[1, 2], [1, 4], [0, 2]])
    verification = verify_greedy(drafts_BK, logits_BRW)
    assert verification.num_accepted_B.tolist() == [2, 1, 0]
    assert verification.next_ids_B.tolist() == [3, 2, 1]
    committed_BR = verification.committed_BR(drafts_BK).tolist()
    assert [row[: 1 + n] for row, n in zip(committed_BR, [2, 1, 0], strict=True)] == [
        [1, 2, 3],
        [1, 2],
        [1],
    ]


def test_drafts_that_were_cut_are_never_kept() -> None:
    logits_BRW = torch.eye(5)[[1, 2, 3]].expand(3, -1, -1)
    drafts_BK = torch.tensor([[1, 2], [1, 2], [1, 2]])
    num_scheduled_B = torch.tensor([0, 1, 2])
    greedy = verify_greedy(drafts_BK, logits_BRW, num_scheduled_B=num_scheduled_B)
    sampled = verify_sampled(
        drafts_BK,
        logits_BRW[:, :2],
        logits_BRW,
        generator=generator(),
        num_scheduled_B=num_scheduled_B,
    )
    for verification in (greedy, sampled):
        assert verification.num_accepted_B.tolist() == [0, 1, 2]
        assert verification.next_ids_B.tolist() == [1, 2, 3]


def test_with_no_drafts_the_target_decides() -> None:
    p_BRW = torch.tensor([[[0.0, 1.0]], [[1.0, 0.0]]])
    drafts_BK = torch.empty(2, 0, dtype=torch.long)
    sampled = verify_sampled(drafts_BK, torch.empty(2, 0, 2), p_BRW, generator=generator())
    for verification in (verify_greedy(drafts_BK, p_BRW), sampled):
        assert verification.num_accepted_B.tolist() == [0, 0]
        assert verification.committed_BR(drafts_BK).tolist() == [[1], [0]]


def test_a_perfect_drafter_is_always_accepted_and_a_disjoint_one_never() -> None:
    p_RW = torch.tensor([[0.5, 0.5, 0.0, 0.0], [0.2, 0.8, 0.0, 0.0], [0.0, 0.0, 0.0, 1.0]])
    p_BRW = p_RW.expand(50, -1, -1)
    perfect = verify_sampled(
        torch.tensor([[0, 1]]).expand(50, -1), p_BRW[:, :2], p_BRW, generator=generator()
    )
    assert (perfect.num_accepted_B == 2).all() and (perfect.next_ids_B == 3).all()
    q_BKW = torch.tensor([[0.0, 0.0, 0.5, 0.5], [0.0, 0.0, 1.0, 0.0]]).expand(50, -1, -1)
    disjoint = verify_sampled(
        torch.tensor([[3, 2]]).expand(50, -1), q_BKW, p_BRW, generator=generator()
    )
    assert (disjoint.num_accepted_B == 0).all() and (disjoint.next_ids_B < 2).all()


def test_first_committed_token_is_the_targets_and_acceptance_the_overlap() -> None:
    """P(first committed token) is p, and P(accept) is sum_v min(p_v, q_v), for any q."""
    p_W, q_W = torch.tensor([0.55, 0.25, 0.15, 0.05]), torch.tensor([0.1, 0.2, 0.3, 0.4])
    rng = generator(1)
    drafts_BK = draw(q_W.expand(NUM_TRIALS, 1, -1), rng)
    verification = verify_sampled(
        drafts_BK, q_W.expand(NUM_TRIALS, 1, -1), p_W.expand(NUM_TRIALS, 2, -1), generator=rng
    )
    first_B = verification.committed_BR(drafts_BK)[:, 0]
    counts = torch.bincount(first_B, minlength=4).numpy()
    assert (
        chisquare(
            counts, p_W.numpy().astype("float64") * NUM_TRIALS / float(p_W.double().sum())
        ).pvalue
        > 1e-3
    )
    accepted = float(verification.num_accepted_B.float().mean())
    assert accepted == pytest.approx(float(torch.minimum(p_W, q_W).sum()), abs=0.015)


def test_a_refusal_that_leaves_no_residual_draws_from_the_target() -> None:
    """q above p at the draft and nowhere below it: rounding can make such a refusal, and it still
    has to end.
    """
    p_BRW = torch.tensor([[[1.0, 0.0], [0.0, 1.0]]]).expand(64, -1, -1)
    q_BKW = torch.tensor([[[1e9, 0.0]]]).expand(64, -1, -1)  # refused for nearly every u
    verification = verify_sampled(
        torch.zeros(64, 1, dtype=torch.long), q_BKW, p_BRW, generator=generator()
    )
    assert (verification.num_accepted_B == 0).any()
    assert (verification.next_ids_B[verification.num_accepted_B == 0] == 0).all()


def test_sampler_takes_the_argmax_at_zero_and_draws_above() -> None:
    logits = torch.tensor([[[0.0, 3.0], [2.0, 0.0]]])
    assert Sampler(0.0, None)(logits).tolist() == [[1, 0]]
    warm = Sampler(0.5, generator())
    assert torch.allclose(warm.probabilities(logits), (logits / 0.5).softmax(-1))
    drawn = warm(logits.expand(500, -1, -1))
    assert drawn.shape == (500, 2)
    assert drawn.float().mean(0).tolist() == pytest.approx(
        [1 / (1 + math.exp(-6)), 1 / (1 + math.exp(4))], abs=0.02
    )


def test_tokens_outside_the_draft_vocabulary_have_no_probability() -> None:
    probs_BKV = torch.tensor([[[0.25, 0.75]]])
    assert in_target_vocabulary(probs_BKV, torch.tensor([3, 1]), vocab_size=5).tolist() == [
        [[0, 0.75, 0, 0.25, 0]]
    ]
