"""vLLM's own rejection sampling on CPU with the repairs in place: exact distributions, padding included."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from scipy.stats import chisquare
from vllm.platforms import current_platform
from vllm.v1.sample import rejection_sampler
from vllm.v1.sample.logits_processor import LogitsProcessors
from vllm.v1.sample.logits_processor.builtin import MinTokensLogitsProcessor
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.sample.rejection_sampler import RejectionSampler
from vllm.v1.sample.sampler import Sampler
from vllm.v1.spec_decode.metadata import SpecDecodeMetadata

from components.serving import cpu_sampling

TARGET_W = torch.tensor([0.4, 0.25, 0.15, 0.1, 0.06, 0.04])
DRAFT_W = torch.tensor([0.1, 0.1, 0.2, 0.2, 0.2, 0.2])
NUM_TRIALS = 20_000

plain_forward = RejectionSampler.forward


@pytest.fixture(scope="module", autouse=True)
def cpu_kernels() -> None:
    if not current_platform.is_cpu():
        pytest.skip("the repairs are for vLLM on CPU")
    current_platform.import_kernels()
    current_platform.register_triton_kernel_overrides()


def test_values_are_repeated_per_draft_token() -> None:
    counts = torch.tensor([2, 2, 3, 6], dtype=torch.int32)  # 2, 0, 1 and 3 draft tokens
    temperature = torch.tensor([0.7, 1.3, 0.0, 0.5])
    expanded = cpu_sampling.expand_batch_to_tokens(temperature, counts, 6, replace_from=0, replace_to=1)
    assert expanded.tolist() == pytest.approx([0.7, 0.7, 1.0, 0.5, 0.5, 0.5])
    top_k = cpu_sampling.expand_batch_to_tokens(torch.tensor([5, 6, 7, 8], dtype=torch.int32), counts, 6)
    assert top_k.dtype == torch.int32
    assert top_k.tolist() == [5, 5, 7, 8, 8, 8]


@pytest.mark.parametrize("with_probs", [True, False])
def test_the_first_token_follows_the_target_for_real_and_padded_drafts(with_probs: bool) -> None:
    torch.manual_seed(0)
    drafts = torch.multinomial(DRAFT_W, NUM_TRIALS, replacement=True).int()
    is_padded = torch.arange(NUM_TRIALS) % 2 == 0
    drafts[is_padded] = -1
    output = sample(drafts, DRAFT_W.expand(NUM_TRIALS, -1).contiguous() if with_probs else None)
    for rows in (output[is_padded], output[~is_padded]):
        counts = torch.bincount(rows[:, 0].long(), minlength=6)
        assert chisquare(counts, TARGET_W.double() / TARGET_W.double().sum() * len(rows)).pvalue > 1e-3


def test_acceptance_is_the_overlap_of_the_distributions() -> None:
    torch.manual_seed(1)
    drafts = torch.multinomial(DRAFT_W, NUM_TRIALS, replacement=True).int()
    output = sample(drafts, DRAFT_W.expand(NUM_TRIALS, -1).contiguous())
    share = float((output[:, 1] >= 0).float().mean())
    assert share == pytest.approx(float(torch.minimum(TARGET_W, DRAFT_W).sum()), abs=0.015)


@pytest.mark.parametrize("counts", [[3], [3, 3, 3, 3], [3, 1, 3], [1], [0, 0]])
def test_a_greedy_batch_gets_vllms_own_tokens_either_way(counts: list[int]) -> None:
    torch.manual_seed(len(counts))
    for _ in range(40):
        arguments = greedy_step(counts)
        sampler = RejectionSampler(Sampler())
        expected = plain_forward(sampler, *arguments).sampled_token_ids
        found = cpu_sampling.short_when_greedy(plain_forward)(sampler, *arguments)
        assert found.logprobs_tensors is None and found.sampled_token_ids.dtype == expected.dtype
        assert found.sampled_token_ids.tolist() == expected.tolist()


@pytest.mark.parametrize(
    "change",
    [
        {"max_num_logprobs": 1}, {"logprob_token_ids": {0: [1]}}, {"no_penalties": False}, {"all_greedy": False},
        {"bad_words_token_ids": {0: [[1]]}}, {"allowed_token_ids_mask": torch.zeros(1, 6, dtype=torch.bool)},
        {"logitsprocs": SimpleNamespace(non_argmax_invariant=[object()])},
        {"thinking_budget_state_holder": SimpleNamespace(has_tracked_requests=lambda: True)},
    ],
    ids=lambda change: next(iter(change)),
)  # fmt: skip
def test_whatever_can_move_an_argmax_takes_vllms_own_way(change: dict[str, object]) -> None:
    metadata, probs, logits, sampling = greedy_step([3])
    sampler = SimpleNamespace(synthetic_mode=False)
    took_own_way = object()
    forward = cpu_sampling.short_when_greedy(lambda *_: took_own_way)
    assert forward(sampler, metadata, probs, logits, sampling) is not took_own_way
    assert forward(sampler, metadata, probs, logits, replace(sampling, **change)) is took_own_way
    processor = MinTokensLogitsProcessor.__new__(MinTokensLogitsProcessor)
    for requests, is_own in (({}, False), ({0: (5, [], {1}, False)}, True)):
        processor.min_toks = requests
        with_processor = replace(sampling, logitsprocs=SimpleNamespace(non_argmax_invariant=[processor]))
        assert (forward(sampler, metadata, probs, logits, with_processor) is took_own_way) == is_own


def greedy_step(counts: list[int]) -> tuple[SpecDecodeMetadata, None, torch.Tensor, SamplingMetadata]:
    """Random bf16 logits over six tokens, with ties, and drafts of which some are the target's and some padding."""
    metadata = SpecDecodeMetadata.make_dummy([[0] * count for count in counts], torch.device("cpu"))
    num_rows = sum(counts) + len(counts)
    ends = torch.tensor(counts).cumsum(0) + torch.arange(len(counts))
    metadata.bonus_logits_indices = ends.int()
    metadata.target_logits_indices = torch.tensor([row for row in range(num_rows) if row not in ends]).int()
    logits = torch.randint(0, 4, (num_rows, 6)).bfloat16()
    argmax = logits[metadata.target_logits_indices].float().argmax(-1).int()
    other = torch.randint(-1, 6, argmax.shape).int()
    metadata.draft_token_ids = torch.where(torch.rand(argmax.shape) < 0.7, argmax, other)
    # vLLM without padding: what it does with it is not right (see the module), so it gets what padding counts as.
    metadata.draft_token_ids.clamp_(min=0)
    none = torch.empty(0)
    sampling = SamplingMetadata(
        temperature=None, all_greedy=True, all_random=False, top_p=None, top_k=None, generators={},
        max_num_logprobs=None, no_penalties=True, prompt_token_ids=None, frequency_penalties=none,
        presence_penalties=none, repetition_penalties=none, output_token_ids=[[] for _ in counts],
        allowed_token_ids_mask=None, bad_words_token_ids={}, logitsprocs=LogitsProcessors(),
    )  # fmt: skip
    return metadata, None, logits, sampling


def test_padding_counts_as_a_proposal_of_token_0() -> None:
    drafts = torch.tensor([[-1, 2, 3], [-1, -1, 1]])
    accepted = cpu_sampling.accept_greedy(
        drafts.clamp(min=0), torch.tensor([[0, 2, 4], [1, 0, 1]]), torch.tensor([5, 5])
    )
    assert accepted.tolist() == [[0, 2, 4, -1], [1, -1, -1, -1]]


def sample(drafts: torch.Tensor, draft_probs: torch.Tensor | None) -> torch.Tensor:
    """One draft per request through vLLM's rejection sampling; [B, 2], -1 where there is no token."""
    num_reqs = len(drafts)
    metadata = SimpleNamespace(all_greedy=False, all_random=True, temperature=torch.ones(num_reqs), generators={})
    repaired = cpu_sampling.without_padding(rejection_sampler.rejection_sample)
    return repaired(
        drafts,
        [1] * num_reqs,
        1,
        torch.arange(1, num_reqs + 1, dtype=torch.int32),
        draft_probs,
        TARGET_W.log().expand(num_reqs, -1).contiguous(),
        torch.zeros(num_reqs, 1, dtype=torch.int64),
        metadata,
    )
