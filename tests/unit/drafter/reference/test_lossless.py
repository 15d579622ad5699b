"""What the reference commits follows the target's own distribution: chi-squared over all sequences
of three tokens.

`make bench NAME=reference` runs the same with a million draws per case. Seeds are fixed, so a
p-value is what it is.
"""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from components.drafter.confidence.scheduler import PrefixScheduler
from components.drafter.reference import loop as reference_loop
from components.drafter.reference.decoder import ReferenceDecoder
from tests.support.reference_cases import (
    DRAFTERS,
    PROMPTS,
    VOCAB_SIZE,
    PeekingScheduler,
    calibrated_scheduler,
    chi_squared_p_value,
    count_draws,
    exact_probabilities,
    verify_too_kindly,
    verify_without_residual,
    write_enumerable_target,
    write_random_drafter,
)

NUM_TOKENS = 3
SURVIVAL = 0.3
MIN_P, MAX_P_WHEN_WRONG = 1e-3, 1e-6


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_enumerable_target(tmp_path_factory.mktemp("targets") / "enumerable")


@pytest.fixture(scope="module")
def decoders(target: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, ReferenceDecoder]:
    folder = tmp_path_factory.mktemp("drafters")
    return {
        kind: ReferenceDecoder(target, write_random_drafter(folder / kind, kind, target=target))
        for kind in DRAFTERS
    }


def p_value(
    decoder: ReferenceDecoder, target: Path, *, num_draws: int = 20_000, **call: Any
) -> float:
    counts = count_draws(
        decoder, num_draws=num_draws, batch_size=10_000, num_tokens=NUM_TOKENS, seed=1, **call
    )
    assert sum(int(count.sum()) for count in counts) == num_draws
    exact = exact_probabilities(
        target, PROMPTS, num_tokens=NUM_TOKENS, temperature=call["temperature"]
    )
    return chi_squared_p_value(counts, exact)


@pytest.mark.parametrize("temperature", [0.7, 1.0])
@pytest.mark.parametrize("kind", DRAFTERS)
def test_sampling_is_lossless(
    decoders: dict[str, ReferenceDecoder], target: Path, kind: str, temperature: float
) -> None:
    assert p_value(decoders[kind], target, temperature=temperature) > MIN_P


@pytest.mark.parametrize("kind", ["dspark-vanilla", "dspark-rnn"])
def test_a_prefix_scheduler_keeps_sampling_lossless(
    decoders: dict[str, ReferenceDecoder], target: Path, kind: str
) -> None:
    assert (
        p_value(decoders[kind], target, temperature=1.0, scheduler=calibrated_scheduler(SURVIVAL))
        > MIN_P
    )


def test_the_scheduler_of_that_test_cuts_some_drafts_and_not_all(
    decoders: dict[str, ReferenceDecoder],
) -> None:
    """A scheduler that always or never cut would prove nothing; without its calibration it would
    cut elsewhere.
    """
    cuts = []
    for scheduler in (calibrated_scheduler(SURVIVAL), PrefixScheduler(SURVIVAL)):
        answers = decoders["dspark-vanilla"].generate_batch(
            [list(prompt) for prompt in PROMPTS] * 3,
            max_new_tokens=12,
            ignore_eos=True,
            scheduler=scheduler,
        )
        cuts.append([step.num_scheduled for answer in answers for step in answer.steps])
    assert len(set(cuts[0])) >= 3 and cuts[0] != cuts[1]


@pytest.mark.parametrize("kind", ["dspark-vanilla", "eagle3"])
def test_more_drafts_than_trained_for_are_lossless(
    decoders: dict[str, ReferenceDecoder], target: Path, kind: str
) -> None:
    num_drafts = decoders[kind].drafter.num_draft_tokens + 2
    assert p_value(decoders[kind], target, temperature=1.0, num_draft_tokens=num_drafts) > MIN_P


def test_drafting_from_a_few_candidates_is_lossless(target: Path, tmp_path: Path) -> None:
    path = write_random_drafter(
        tmp_path / "drafter", "dspark-vanilla", target=target, num_candidates=3
    )
    decoder = ReferenceDecoder(target, path)
    with torch.inference_mode():
        decoder.propose_after([3, 1])
        proposal = decoder.drafter.propose(lambda logits: logits.argmax(-1), num_draft_tokens=3)
    assert (proposal.logits_BKV.isfinite().sum(-1) == 3).all()
    assert p_value(decoder, target, temperature=1.0) > MIN_P


@pytest.mark.parametrize("wrong", [verify_too_kindly, verify_without_residual])
def test_a_wrong_verification_is_found_out(
    decoders: dict[str, ReferenceDecoder], target: Path, wrong: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reference_loop, "verify_sampled", wrong)
    assert (
        p_value(decoders["dspark-vanilla"], target, temperature=1.0, num_draws=40_000)
        < MAX_P_WHEN_WRONG
    )


def test_a_scheduler_that_looks_ahead_is_found_out(
    decoders: dict[str, ReferenceDecoder], target: Path
) -> None:
    """The confidence of draft 2 knows draft 1: cutting draft 1 by it is not lossless, as
    `Scheduler` says.
    """
    call = {"temperature": 1.0, "scheduler": PeekingScheduler()}
    assert p_value(decoders["dspark-vanilla"], target, **call) < MAX_P_WHEN_WRONG


@pytest.mark.parametrize("kind", DRAFTERS)
def test_greedy_decoding_of_every_short_prompt_is_the_targets_own(
    decoders: dict[str, ReferenceDecoder], kind: str
) -> None:
    prompts = [
        list(prompt) for length in (1, 2, 3) for prompt in product(range(VOCAB_SIZE), repeat=length)
    ]
    decoder = decoders[kind]
    tokens_BM = decoder.sample(prompts, max_new_tokens=NUM_TOKENS, temperature=0.0)
    for length in (1, 2, 3):
        rows = [row for row, prompt in enumerate(prompts) if len(prompt) == length]
        ids_BT = torch.tensor([prompts[row] for row in rows])
        for _ in range(NUM_TOKENS):
            with torch.inference_mode():
                next_B = decoder.target.model(ids_BT).logits[:, -1].argmax(-1)
            ids_BT = torch.cat([ids_BT, next_B[:, None]], dim=1)
        assert torch.equal(tokens_BM[rows], ids_BT[:, length:])
