"""vLLM's own rejection sampling on CPU with the repairs in place: exact distributions, padding
included.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from scipy.stats import chisquare
from vllm.platforms import current_platform
from vllm.v1.sample import rejection_sampler

from components.serving.vllm_plugin import cpu_sampling

TARGET_W = torch.tensor([0.4, 0.25, 0.15, 0.1, 0.06, 0.04])
DRAFT_W = torch.tensor([0.1, 0.1, 0.2, 0.2, 0.2, 0.2])
NUM_TRIALS = 20_000


@pytest.fixture(scope="module", autouse=True)
def cpu_kernels() -> None:
    if not current_platform.is_cpu():
        pytest.skip("the repairs are for vLLM on CPU")
    current_platform.import_kernels()
    current_platform.register_triton_kernel_overrides()


def test_values_are_repeated_per_draft_token() -> None:
    counts = torch.tensor([2, 2, 3, 6], dtype=torch.int32)  # 2, 0, 1 and 3 draft tokens
    temperature = torch.tensor([0.7, 1.3, 0.0, 0.5])
    expanded = cpu_sampling.expand_batch_to_tokens(
        temperature, counts, 6, replace_from=0, replace_to=1
    )
    assert expanded.tolist() == pytest.approx([0.7, 0.7, 1.0, 0.5, 0.5, 0.5])
    top_k = cpu_sampling.expand_batch_to_tokens(
        torch.tensor([5, 6, 7, 8], dtype=torch.int32), counts, 6
    )
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
        assert (
            chisquare(counts, TARGET_W.double() / TARGET_W.double().sum() * len(rows)).pvalue > 1e-3
        )


def test_acceptance_is_the_overlap_of_the_distributions() -> None:
    torch.manual_seed(1)
    drafts = torch.multinomial(DRAFT_W, NUM_TRIALS, replacement=True).int()
    output = sample(drafts, DRAFT_W.expand(NUM_TRIALS, -1).contiguous())
    share = float((output[:, 1] >= 0).float().mean())
    assert share == pytest.approx(float(torch.minimum(TARGET_W, DRAFT_W).sum()), abs=0.015)


def sample(drafts: torch.Tensor, draft_probs: torch.Tensor | None) -> torch.Tensor:
    """One draft per request through vLLM's rejection sampling; [B, 2], -1 where there is no
    token.
    """
    num_reqs = len(drafts)
    metadata = SimpleNamespace(
        all_greedy=False, all_random=True, temperature=torch.ones(num_reqs), generators={}
    )
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


def test_top_k_of_no_rows_ends_nothing() -> None:
    """A request with top-k in a step that verifies no draft: vLLM takes the maximum of nothing."""
    from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p

    no_rows = torch.empty(0, 8)
    no_k = torch.empty(0, dtype=torch.long)
    with pytest.raises(RuntimeError, match="reduction dim"):
        apply_top_k_top_p(no_rows, no_k, None)
    repaired = cpu_sampling.skipping_no_rows(apply_top_k_top_p)
    assert repaired(no_rows, no_k, None).shape == (0, 8)
    logits = torch.arange(8.0)[None]
    kept = repaired(logits.clone(), torch.tensor([3]), None)
    assert torch.isfinite(kept).sum() == 3 and kept[0, -3:].tolist() == [5.0, 6.0, 7.0]
