"""The train-served comparison: its sums by hand."""

from __future__ import annotations

import pytest
import torch

from components.training.checks.train_served import Walked, compare, expected_steps


def test_a_perfect_drafter_takes_one_step_for_each_block_of_tokens() -> None:
    """Seven tokens after the first, K = 3: steps of four and three tokens."""
    overlap_NK = torch.tensor([[float(n + k < 7) for k in range(3)] for n in range(7)])
    steps, accepted = expected_steps(overlap_NK)
    assert steps == pytest.approx(2.0)
    assert accepted == pytest.approx([2.0, 2.0, 2.0])


def test_a_useless_drafter_takes_a_step_for_each_token() -> None:
    steps, accepted = expected_steps(torch.zeros(9, 4))
    assert steps == pytest.approx(9.0) and accepted == [0.0] * 4


def test_a_constant_acceptance_has_its_known_length() -> None:
    """Far from the end, the expected length of a step is 1 + a + a^2 + ... + a^K."""
    steps, accepted = expected_steps(torch.full((20_000, 3), 0.5))
    assert 20_000 / steps == pytest.approx(1 + 0.5 + 0.25 + 0.125, rel=1e-3)
    assert [count / steps for count in accepted] == pytest.approx([0.5, 0.25, 0.125], rel=1e-6)


def test_lengths_are_tokens_kept_over_steps_and_the_worst_position_is_named() -> None:
    def walked(num_steps: int, accepted: list[float]) -> Walked:
        way = Walked()
        way.add(num_kept=30, num_steps=num_steps, accepted_by_position=accepted)
        way.add(num_kept=30, num_steps=num_steps, accepted_by_position=accepted)
        return way

    ways = {
        "teacher_forced": walked(20, [8, 2]),
        "reference": walked(20, [8, 2]),
        "served": walked(25, [9, 0]),
    }
    gap = compare(ways, num_prompts=2)
    assert (gap.teacher_forced, gap.reference, gap.served) == (1.5, 1.5, 1.2)
    assert gap.diverging_position == 2 and gap.gap == pytest.approx(0.25)
    same = compare({name: walked(20, [8, 2]) for name in ways}, num_prompts=2)
    assert same.diverging_position is None and same.gap == 0.0
