"""Repairs of vLLM 0.32's rejection sampling on CPU, without which speculation at a temperature is
not lossless.

The first two faults are in the C++ stand-ins for Triton kernels, touch every speculative method,
and spare greedy requests; the third ends the engine:

- `expand_batch_to_tokens` fills an int64 copy of its output and returns the output itself, which
  nobody has written: temperature, top-k and top-p of the draft rows are whatever the memory held
  (vLLM issue 55005).
- A request admitted with one token to compute is padded with drafts of id -1. The Triton kernel
  refuses them; the C++ one reads beside the row and accepts them, so the request's first token is
  drawn from the wrong position.
- A request with top-k in a step that verifies no draft (its last token) makes `apply_top_k_only`
  take the maximum of nothing, and the engine ends. There is nothing to cut in no rows.

Imported only inside vLLM on CPU, by `dspark_cpu.register`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

EXPAND_PARAMETERS = ("x", "cu_num_tokens", "num_tokens", "replace_from", "replace_to")
REJECTION_PARAMETERS = (
    "draft_token_ids",
    "num_draft_tokens",
    "max_spec_len",
    "cu_num_draft_tokens",
    "draft_probs",
)
"""The first parameters of vLLM's `rejection_sample`; the others are passed on."""


def expand_batch_to_tokens(
    x: torch.Tensor,
    cu_num_tokens: torch.Tensor,
    num_tokens: int,
    replace_from: int = 0,
    replace_to: int = 0,
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
    return x.masked_fill(x == replace_from, replace_to).repeat_interleave(
        counts.long(), output_size=num_tokens
    )


def skipping_no_rows(apply_top_k_top_p: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Wrap vLLM's `apply_top_k_top_p` so that logits of no rows, [0, V], come back as they are."""

    def apply(logits: torch.Tensor, *arguments: Any, **options: Any) -> torch.Tensor:
        return apply_top_k_top_p(logits, *arguments, **options) if logits.shape[0] else logits

    return apply


def without_padding(rejection_sample: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Wrap vLLM's `rejection_sample` so that padded drafts (-1) count as certain proposals of token
    0.

    The runner clamps its input ids at 0, so token 0 is what the target read at these places. A
    proposal that is certain is as lossless as any other: kept with p(0), else another token from p
    without 0.
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
            draft_token_ids,
            num_draft_tokens,
            max_spec_len,
            cu_num_draft_tokens,
            draft_probs,
            *arguments,
            **options,
        )

    return sample
