"""vLLM 0.32's rejection sampling on CPU: two repairs, and a short way for greedy batches.

Without the repairs, speculation at a temperature is not lossless. Both faults are in the C++ stand-ins for Triton
kernels, touch every speculative method, and spare greedy requests:

- `expand_batch_to_tokens` fills an int64 copy of its output and returns the output itself, which nobody has written:
  temperature, top-k and top-p of the draft rows are whatever the memory held (vLLM issue 55005).
- A request admitted with one token to compute is padded with drafts of id -1. The Triton kernel refuses them; the C++
  one reads beside the row and accepts them, so the request's first token is drawn from the wrong position.

A batch of greedy requests needs the argmax of each row of logits and nothing else. vLLM copies the rows several times
on the way there, which on two cores is 3 % of a step with one request in flight (docs/lab-notes.md).

Imported only inside vLLM on CPU, by `dspark_cpu.register`. Shapes: B requests, K drafts each, W target vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from vllm.v1.outputs import SamplerOutput

EXPAND_PARAMETERS = ("x", "cu_num_tokens", "num_tokens", "replace_from", "replace_to")
REJECTION_PARAMETERS = ("draft_token_ids", "num_draft_tokens", "max_spec_len", "cu_num_draft_tokens", "draft_probs")
"""The first parameters of vLLM's `rejection_sample`; the others are passed on."""
FORWARD_PARAMETERS = ("self", "metadata", "draft_probs", "logits", "sampling_metadata")
"""The parameters of vLLM's `RejectionSampler.forward`."""

_PLACEHOLDER = -1
_STATE_OF_PROCESSOR = {"MinTokensLogitsProcessor": "min_toks", "LogitBiasLogitsProcessor": "biases"}
"""vLLM's own processors that can move an argmax, and where each keeps its requests."""


def expand_batch_to_tokens(
    x: torch.Tensor, cu_num_tokens: torch.Tensor, num_tokens: int, replace_from: int = 0, replace_to: int = 0
) -> torch.Tensor:
    """Repeat each request's value once per draft token, as vLLM's function of that name promises.

    Args:
        x: [B] values, any dtype.
        cu_num_tokens: [B] running total of draft tokens.
        num_tokens: T, the total.
        replace_from: value replaced by `replace_to` (temperature 0 by 1).
        replace_to: see `replace_from`.

    Returns:
        [T], in the dtype of `x`.
    """
    counts = torch.diff(cu_num_tokens, prepend=cu_num_tokens.new_zeros(1))
    return x.masked_fill(x == replace_from, replace_to).repeat_interleave(counts.long(), output_size=num_tokens)


def without_padding(rejection_sample: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Wrap vLLM's `rejection_sample` so that padded drafts (-1) count as certain proposals of token 0.

    The runner clamps its input ids at 0, so token 0 is what the target read at these places. A proposal that is certain
    is as lossless as any other: kept with p(0), else another token from p without 0.
    """

    def sample(
        draft_token_ids: torch.Tensor,
        num_draft_tokens: list[int],
        max_spec_len: int,
        cu_num_draft_tokens: torch.Tensor,
        draft_probs: torch.Tensor | None,
        *arguments: Any,
        **options: Any,
    ) -> torch.Tensor:
        padded_T = draft_token_ids < 0
        if bool(padded_T.any()):
            draft_token_ids = draft_token_ids.clamp(min=0)
            if draft_probs is not None:
                certain_W = torch.zeros_like(draft_probs[0])
                certain_W[0] = 1.0
                draft_probs = torch.where(padded_T[:, None], certain_W, draft_probs)
        return rejection_sample(
            draft_token_ids, num_draft_tokens, max_spec_len, cu_num_draft_tokens, draft_probs, *arguments, **options
        )

    return sample


def short_when_greedy(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `RejectionSampler.forward`: the same tokens, from one argmax per row where nothing else counts."""

    def rejection_sampler_forward(
        self: Any, metadata: Any, draft_probs: torch.Tensor | None, logits: torch.Tensor, sampling_metadata: Any
    ) -> Any:
        num_reqs, num_drafts = len(metadata.num_draft_tokens), metadata.max_spec_len
        is_even = metadata.num_draft_tokens.count(num_drafts) == num_reqs
        if not is_even or self.synthetic_mode or not _only_argmax_counts(sampling_metadata):
            return forward(self, metadata, draft_probs, logits, sampling_metadata)
        drafts_BK = metadata.draft_token_ids.clamp(min=0).view(num_reqs, num_drafts)
        argmax_T = torch.ops._C.greedy_argmax(logits.float())
        target_BK = argmax_T[metadata.target_logits_indices].view_as(drafts_BK)
        return SamplerOutput(
            sampled_token_ids=accept_greedy(drafts_BK, target_BK, argmax_T[metadata.bonus_logits_indices]),
            logprobs_tensors=None,
        )

    return rejection_sampler_forward


def accept_greedy(drafts_BK: torch.Tensor, target_BK: torch.Tensor, bonus_B: torch.Tensor) -> torch.Tensor:
    """[B, K + 1] int32: the target's token at each place up to the first wrong draft's, -1 after it."""
    num_accepted_B = (drafts_BK == target_BK).int().cumprod(1).sum(1)
    tokens_BL = torch.cat([target_BK, bonus_B[:, None]], dim=1).int()
    place_L = torch.arange(tokens_BL.shape[1], device=tokens_BL.device)
    return tokens_BL.masked_fill(place_L > num_accepted_B[:, None], _PLACEHOLDER)


def _only_argmax_counts(metadata: Any) -> bool:
    """Whether every request is greedy and none has anything that moves an argmax or wants more than the token."""
    holder = metadata.thinking_budget_state_holder
    return (
        metadata.all_greedy
        and metadata.max_num_logprobs is None
        and not metadata.logprob_token_ids
        and metadata.no_penalties
        and not metadata.bad_words_token_ids
        and metadata.allowed_token_ids_mask is None
        and (holder is None or not holder.has_tracked_requests())
        and all(_is_idle(processor) for processor in metadata.logitsprocs.non_argmax_invariant)
    )


def _is_idle(processor: Any) -> bool:
    """Whether a logits processor has no request to touch; one that vLLM does not bring along counts as busy."""
    name = _STATE_OF_PROCESSOR.get(type(processor).__name__)
    return name is not None and not getattr(processor, name)
