"""The draft vocabulary: frequency, mappings, coverage, refusal."""

from __future__ import annotations

import pytest
import torch

from components.drafter.vocabulary import build_draft_vocabulary, from_mappings
from components.errors import CheckpointError, ConfigError


def test_the_most_frequent_tokens_are_kept_and_ties_go_to_the_lower_id() -> None:
    counts_V = torch.tensor([0, 5, 0, 9, 5, 5])
    vocabulary = build_draft_vocabulary(counts_V, size=3, min_coverage=0.5)
    assert vocabulary.token_ids_D.tolist() == [1, 3, 4]
    assert vocabulary.d2t_D.tolist() == [1, 2, 2]
    assert vocabulary.t2d_V.tolist() == [False, True, False, True, True, False]
    assert vocabulary.draft_ids_V.tolist() == [-1, 0, -1, 1, 2, -1]
    assert vocabulary.coverage == pytest.approx(19 / 24)


def test_unseen_tokens_fill_up_from_the_lowest_id() -> None:
    vocabulary = build_draft_vocabulary(torch.tensor([0, 0, 0, 7]), size=3, min_coverage=1.0)
    assert vocabulary.token_ids_D.tolist() == [0, 1, 3]
    assert vocabulary.coverage == 1.0


def test_ties_go_to_tokens_of_the_context() -> None:
    counts_V, context_V = torch.tensor([0, 0, 0, 7, 0]), torch.tensor([0, 0, 2, 0, 9])
    vocabulary = build_draft_vocabulary(
        counts_V, size=3, min_coverage=1.0, context_counts_V=context_V
    )
    assert vocabulary.token_ids_D.tolist() == [2, 3, 4]


def test_low_coverage_is_refused_with_the_figure() -> None:
    with pytest.raises(ConfigError, match=r"0\.5000 with 1 tokens"):
        build_draft_vocabulary(torch.tensor([4, 4]), size=1, min_coverage=0.9)


def test_a_draft_vocabulary_larger_than_the_target_is_refused() -> None:
    with pytest.raises(ConfigError, match="exceeds"):
        build_draft_vocabulary(torch.ones(4, dtype=torch.long), size=5, min_coverage=0.5)


def test_mappings_of_a_checkpoint_round_trip_and_contradictions_are_refused() -> None:
    vocabulary = build_draft_vocabulary(torch.tensor([0, 5, 0, 9, 5, 5]), size=3, min_coverage=0.5)
    again = from_mappings(vocabulary.d2t_D, vocabulary.t2d_V)
    assert torch.equal(again.token_ids_D, vocabulary.token_ids_D)
    with pytest.raises(CheckpointError, match="contradict"):
        from_mappings(vocabulary.d2t_D, ~vocabulary.t2d_V)


def test_coverage_on_other_counts() -> None:
    vocabulary = build_draft_vocabulary(torch.tensor([9, 9, 0, 0]), size=2, min_coverage=0.5)
    assert vocabulary.measure_coverage(torch.tensor([1, 1, 1, 1])) == 0.5
    assert vocabulary.measure_coverage(torch.zeros(4, dtype=torch.long)) == 1.0
