"""Reference decoding: is it lossless, over a million draws per case, and what does the Markov head
cost a round?

Lossless: chi-squared over all sequences of four tokens of a target with eight, for each kind of
drafter, at temperature 0.7 and 1.0, and with a prefix scheduler; at temperature 0 every draw is one
sequence, so the draws that differ from it are counted. The goal holds for each of the 14 p-values
by itself; by Bonferroni the least of them falls below 1e-3 in at most 1.4 % of runs of a decoder
that is lossless, so a single one short of it is to be repeated with another seed. Two wrong
verifications and a scheduler that looks ahead show that the test would notice.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from components.drafter.reference import loop as reference_loop
from components.drafter.reference.base import ContextRows
from components.drafter.reference.decoder import ReferenceDecoder, load_drafter
from components.drafter.reference.drafter import BlockDrafter
from components.drafter.reference.layers import TargetParts
from components.drafter.reference.verify import Sampler
from tests.benchmarks.loop_figures import at_least, at_most
from tests.benchmarks.run import Figure
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

NUM_DRAWS = 1_000_000
NUM_DRAWS_WRONG = 100_000
BATCH_SIZE = 5_000
NUM_TOKENS = 4
SURVIVAL_THRESHOLD = 0.3
BLOCK_SIZES = range(4, 17)
NUM_ROUNDS, NUM_WARM_ROUNDS = 60, 5
NUM_CONTEXT, NUM_CANDIDATES = 256, 64
DEMO_RANK, DEMO_DRAFT_VOCAB = 128, 8192


@dataclass(frozen=True)
class Case:
    """One way to decode."""

    kind: str
    temperature: float
    has_scheduler: bool = False
    is_peeking: bool = False
    verify: Callable[..., Any] | None = None

    @property
    def name(self) -> str:
        """As in the figure's name."""
        parts = [self.kind, f"t{self.temperature:g}"]
        parts += ["scheduled"] * self.has_scheduler + ["peeking"] * self.is_peeking
        return "_".join([*parts, *([self.verify.__name__] if self.verify else [])])

    def run(self, folder: Path) -> float:
        """The p-value; at temperature 0 the share of draws that are the target's argmax."""
        torch.set_num_threads(1)
        decoder = ReferenceDecoder(folder / "target", folder / self.kind)
        call: dict[str, Any] = {"temperature": self.temperature}
        if self.has_scheduler or self.is_peeking:
            call["scheduler"] = (
                PeekingScheduler() if self.is_peeking else calibrated_scheduler(SURVIVAL_THRESHOLD)
            )
        num_draws = NUM_DRAWS_WRONG if self.verify or self.is_peeking else NUM_DRAWS
        with patch.object(
            reference_loop, "verify_sampled", self.verify or reference_loop.verify_sampled
        ):
            counts = count_draws(
                decoder,
                num_draws=num_draws,
                batch_size=BATCH_SIZE,
                num_tokens=NUM_TOKENS,
                seed=0,
                **call,
            )
        if self.temperature == 0:
            codes = [_greedy_code(decoder, prompt) for prompt in PROMPTS]
            return (
                sum(int(count[code]) for count, code in zip(counts, codes, strict=True)) / num_draws
            )
        exact = exact_probabilities(
            folder / "target", PROMPTS, num_tokens=NUM_TOKENS, temperature=self.temperature
        )
        return chi_squared_p_value(counts, exact)


CASES = (
    *(Case(kind, temperature) for kind in DRAFTERS for temperature in (0.0, 0.7, 1.0)),
    *(Case(kind, 1.0, has_scheduler=True) for kind in DRAFTERS if kind.startswith("dspark")),
    Case("dspark-top3", 1.0),
)
WRONG_CASES = (
    Case("dspark-vanilla", 1.0, verify=verify_too_kindly),
    Case("dspark-vanilla", 1.0, verify=verify_without_residual),
    Case("dspark-vanilla", 1.0, is_peeking=True),
)


def run() -> list[Figure]:
    """Losslessness first, on all cores; then the rounds, on one."""
    with tempfile.TemporaryDirectory(prefix="bench") as name:
        folder = Path(name)
        return [*losslessness(folder), *rounds(folder)]


def losslessness(folder: Path) -> list[Figure]:
    """A p-value per case, and those of the wrong ones."""
    target = write_enumerable_target(folder / "target")
    for kind in DRAFTERS:
        write_random_drafter(folder / kind, kind, target=target)
    write_random_drafter(folder / "dspark-top3", "dspark-vanilla", target=target, num_candidates=3)
    num_workers = len(os.sched_getaffinity(0))
    with ProcessPoolExecutor(num_workers, mp_context=get_context("spawn")) as pool:
        results = list(pool.map(partial(_timed, folder=folder), (*CASES, *WRONG_CASES)))
    for case, (value, duration_s) in zip((*CASES, *WRONG_CASES), results, strict=True):
        what = "share of argmax" if case.temperature == 0 else "p-value"
        print(f"{case.name:45} {what} {value:.3g} ({duration_s:.0f} s)", file=sys.stderr)
    values = {case: value for case, (value, _) in zip((*CASES, *WRONG_CASES), results, strict=True)}
    return [
        *(
            at_least(f"p_value_{case.name}", values[case], 1e-3, "p")
            for case in CASES
            if case.temperature > 0
        ),
        *(
            at_least(f"argmax_{case.name}", values[case], 1, "of_draws")
            for case in CASES
            if case.temperature == 0
        ),
        *(at_most(f"p_value_{case.name}", values[case], 1e-6, "p") for case in WRONG_CASES),
    ]


def _timed(case: Case, *, folder: Path) -> tuple[float, float]:
    started = time.perf_counter()
    return case.run(folder), time.perf_counter() - started


def _greedy_code(decoder: ReferenceDecoder, prompt: tuple[int, ...]) -> int:
    """The target's own greedy continuation, as `sequence_codes` counts."""
    tokens = list(prompt)
    code = 0
    for _ in range(NUM_TOKENS):
        with torch.inference_mode():
            tokens.append(int(decoder.target.model(torch.tensor([tokens])).logits[0, -1].argmax()))
        code = code * VOCAB_SIZE + tokens[-1]
    return code


def rounds(folder: Path) -> list[Figure]:
    """One drafting round of the demo's drafter, batch of one, greedy, float32, one thread: with its
    head, without it, and with the head on 64 candidates; the three in turn, medians.
    """
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        drafters = _demo_drafters(folder)
        table = {block: _time_rounds(drafters, block) for block in BLOCK_SIZES}
    finally:
        torch.set_num_threads(num_threads)
    print("block  without   with head   share   64 candidates   share   (ms)", file=sys.stderr)
    figures = []
    for block, (with_s, without_s, candidates_s) in table.items():
        share, share_of_candidates = 1 - without_s / with_s, 1 - without_s / candidates_s
        print(
            f"{block:5d} {1e3 * without_s:8.3f} {1e3 * with_s:11.3f} {share:7.1%} "
            f"{1e3 * candidates_s:15.3f} "
            f"{share_of_candidates:7.1%}",
            file=sys.stderr,
        )
        figures.append(at_most(f"markov_share_block_{block}", share, 0.013, "of_round"))
        figures.append(
            Figure(
                name=f"markov_share_block_{block}_{NUM_CANDIDATES}_candidates",
                value=share_of_candidates,
                unit="of_round",
                goal="-",
                ok=True,
            )
        )
    return figures


def _demo_drafters(folder: Path) -> tuple[BlockDrafter, BlockDrafter, BlockDrafter]:
    """The demo's drafter with its Markov head, without it, and with it on candidates; the same
    weights and context.
    """
    config = LlamaConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=3,
        num_attention_heads=9,
        num_key_value_heads=3,
        tie_word_embeddings=True,
        eos_token_id=None,
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(config)
    model.save_pretrained(folder / "demo-target")
    path = write_random_drafter(
        folder / "demo",
        "dspark-vanilla",
        target=folder / "demo-target",
        aux_layer_ids=(1, 2, 3),
        draft_token_ids=range(DEMO_DRAFT_VOCAB),
        markov_rank=DEMO_RANK,
        block_size=max(BLOCK_SIZES),
        weight_std=0.02,
    )
    embedding_WH = model.get_input_embeddings().weight.detach()
    parts = TargetParts(embedding_WH, embedding_WH, torch.float32, torch.device("cpu"))
    aux_1TLH = torch.randn(1, NUM_CONTEXT, 3, 576)
    rows = ContextRows(
        aux_1TLH, torch.randint(49152, (1, NUM_CONTEXT)), torch.tensor([NUM_CONTEXT])
    )
    drafters = []
    for _ in range(3):
        drafter = load_drafter(path, parts)
        assert isinstance(drafter, BlockDrafter)
        drafter.reset(batch_size=1, num_slots=NUM_CONTEXT + max(BLOCK_SIZES))
        drafter.extend_context(rows)
        drafters.append(drafter)
    with_head, without_head, on_candidates = drafters
    without_head.markov_head = None
    on_candidates.num_candidates = NUM_CANDIDATES
    return with_head, without_head, on_candidates


@torch.inference_mode()
def _time_rounds(drafters: tuple[BlockDrafter, ...], block_size: int) -> tuple[float, ...]:
    """Median seconds of a round of each drafter."""
    sampler = Sampler(0.0, None)
    durations: list[list[float]] = [[] for _ in drafters]
    for number in range(NUM_WARM_ROUNDS + NUM_ROUNDS):
        for drafter, measured in zip(drafters, durations, strict=True):
            started = time.perf_counter()
            drafter.propose(sampler, num_draft_tokens=block_size - 1)
            if number >= NUM_WARM_ROUNDS:
                measured.append(time.perf_counter() - started)
    return tuple(statistics.median(measured) for measured in durations)
