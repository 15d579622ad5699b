"""The Markov head's start: at full rank it is log p(next | prev) of the target itself."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from components.drafter.bigrams import MIN_LOG_PROBABILITY, bigram_log_probs, start_markov_head
from components.drafter.build import build_drafter
from components.errors import ConfigError
from components.settings import DrafterSettings

CPU = torch.device("cpu")


def drafter(target: Path, *, rank: int) -> torch.nn.Module:
    settings = DrafterSettings(num_layers=1, block_size=3, markov_rank=rank, confidence_head=False)
    model: torch.nn.Module = build_drafter(
        settings, target_path=target, aux_layer_ids=(1, 2, 3), draft_vocab=None, seed=0
    )
    return model


def test_log_probs_are_distributions(tiny_target: Path) -> None:
    ids = torch.arange(5, 45)
    log_probs = bigram_log_probs(tiny_target, draft_token_ids=ids, device=CPU)
    assert log_probs.shape == (40, 40)
    torch.testing.assert_close(log_probs.float().exp().sum(1), torch.ones(40), atol=2e-3, rtol=0)


def test_a_row_is_what_the_target_says_after_that_token(tiny_target: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    ids = torch.tensor([40, 7, 300])
    rows = bigram_log_probs(tiny_target, draft_token_ids=ids, device=CPU)
    tokenizer = AutoTokenizer.from_pretrained(tiny_target)
    opening = tokenizer("<|im_start|>assistant\n", add_special_tokens=False)["input_ids"]
    target = AutoModelForCausalLM.from_pretrained(tiny_target, dtype=torch.float32).eval()
    for row, prev in zip(rows, ids.tolist(), strict=True):
        with torch.inference_mode():
            logits = target(torch.tensor([[*opening, prev]])).logits[0, -1, ids]
        torch.testing.assert_close(row.float(), logits.log_softmax(-1), atol=0.1, rtol=0)


def test_at_full_rank_the_head_gives_the_targets_distribution(tiny_target: Path) -> None:
    model = drafter(tiny_target, rank=512)
    ids = torch.arange(512)
    kept = start_markov_head(model, target_path=tiny_target, draft_token_ids=ids, device=CPU)
    assert kept == pytest.approx(1.0, abs=1e-3)
    head = model.markov_head
    logits = head.markov_w1.weight @ head.markov_w2.weight.T
    expected = (
        bigram_log_probs(tiny_target, draft_token_ids=ids, device=CPU)
        .float()
        .clamp_min(MIN_LOG_PROBABILITY)
    )
    torch.testing.assert_close(logits.softmax(-1), expected.softmax(-1), atol=1e-3, rtol=0.05)


def test_a_higher_rank_keeps_more(tiny_target: Path) -> None:
    ids = torch.arange(512)
    shares = [
        start_markov_head(
            drafter(tiny_target, rank=rank),
            target_path=tiny_target,
            draft_token_ids=ids,
            device=CPU,
        )
        for rank in (4, 64)
    ]
    assert 0 < shares[0] < shares[1] < 1


def test_a_drafter_without_a_markov_head_is_refused(tiny_target: Path) -> None:
    with pytest.raises(ConfigError, match="needs a Markov head"):
        start_markov_head(
            drafter(tiny_target, rank=0),
            target_path=tiny_target,
            draft_token_ids=torch.arange(9),
            device=CPU,
        )
