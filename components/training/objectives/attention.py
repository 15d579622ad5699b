"""Attention of draft blocks over their own document and their own block, without the dense mask.

speculators builds one [N*B, T + N*B] mask and computes every score of it; nearly all are masked.
Here each document is one small matrix product, and each block attends to itself in another, so the
work grows with what is attended to.

Shapes: T packed tokens, N anchors, B block size, Q queried slots per block, H heads, G key-value
heads, D head size.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch.nn.functional import scaled_dot_product_attention


def block_attention(
    query_NQHD: torch.Tensor,
    context_key_TGD: torch.Tensor,
    context_value_TGD: torch.Tensor,
    block_key_NBGD: torch.Tensor,
    block_value_NBGD: torch.Tensor,
    *,
    anchors_N: torch.Tensor,
    spans: list[tuple[int, int, int, int]],
    scaling: float,
) -> torch.Tensor:
    """softmax(q k / sqrt(D)) v, where a slot sees its document before its anchor and all slots of
    its own block.

    Args:
        query_NQHD: queries of the wanted slots, rotated.
        context_key_TGD: keys of the target's states, rotated.
        context_value_TGD: values of the target's states.
        block_key_NBGD: keys of all slots, rotated.
        block_value_NBGD: values of all slots.
        anchors_N: position of each anchor in the pack, ascending.
        spans: per document with anchors (first token, token after the last, first anchor, anchor
            after the last).
        scaling: factor on the scores.

    Returns:
        Attention output per queried slot, [N, Q, H * D].
    """
    parts = [
        _document_attention(
            query_NQHD[first:last],
            context_key_TGD[start:end],
            context_value_TGD[start:end],
            block_key_NBGD[first:last],
            block_value_NBGD[first:last],
            num_visible_N=anchors_N[first:last] - start,
            scaling=scaling,
        )
        for start, end, first, last in spans
    ]

    return torch.cat(parts)


def _document_attention(
    query_NQHD: torch.Tensor,
    key_TGD: torch.Tensor,
    value_TGD: torch.Tensor,
    block_key_NBGD: torch.Tensor,
    block_value_NBGD: torch.Tensor,
    *,
    num_visible_N: torch.Tensor,
    scaling: float,
) -> torch.Tensor:
    num_anchors, num_slots, num_heads, head_dim = query_NQHD.shape
    num_tokens, num_groups, _ = key_TGD.shape
    per_group = num_heads // num_groups
    # One row per (anchor, head of the group, slot), so that the heads of a group share their keys
    # without a copy.
    query_GRD = (
        query_NQHD.view(num_anchors, num_slots, num_groups, per_group, head_dim)
        .permute(2, 0, 3, 1, 4)
        .reshape(num_groups, num_anchors * per_group * num_slots, head_dim)
    )

    hidden_NT = torch.arange(num_tokens, device=query_GRD.device) >= num_visible_N[:, None]
    context_GNXT = (query_GRD @ key_TGD.permute(1, 2, 0)).view(
        num_groups, num_anchors, -1, num_tokens
    )
    context_GNXT = context_GNXT.masked_fill(hidden_NT[None, :, None, :], float("-inf"))
    query_GNXD = query_GRD.view(num_groups, num_anchors, per_group * num_slots, head_dim)
    block_GNXB = query_GNXD @ block_key_NBGD.permute(2, 0, 3, 1)

    weights = torch.softmax(torch.cat([context_GNXT, block_GNXB], dim=-1).float() * scaling, dim=-1)
    weights = weights.to(value_TGD.dtype)
    context_weights, block_weights = weights.split([num_tokens, block_GNXB.shape[-1]], dim=-1)
    output_GRD = context_weights.reshape(num_groups, -1, num_tokens) @ value_TGD.transpose(0, 1)
    output_GNXD = output_GRD.view(query_GNXD.shape) + block_weights @ block_value_NBGD.permute(
        2, 0, 1, 3
    )

    return (
        output_GNXD.view(num_groups, num_anchors, per_group, num_slots, head_dim)
        .permute(1, 3, 0, 2, 4)
        .reshape(num_anchors, num_slots, num_heads * head_dim)
    )


def causal_attention(
    query_THD: torch.Tensor,
    key_TGD: torch.Tensor,
    value_TGD: torch.Tensor,
    *,
    bounds: Iterable[tuple[int, int]],
    scaling: float,
) -> torch.Tensor:
    """softmax(q k scaling) v, where a token sees itself and what is before it in its document; [T,
    H * D].

    `bounds` are (first token, token after the last) of all documents, in order and without gaps.
    """
    parts = [
        scaled_dot_product_attention(
            query_THD[start:end].transpose(0, 1)[None],
            key_TGD[start:end].transpose(0, 1)[None],
            value_TGD[start:end].transpose(0, 1)[None],
            is_causal=True,
            scale=scaling,
            enable_gqa=True,
        )[0]
        for start, end in bounds
    ]
    return torch.cat(parts, dim=1).transpose(0, 1).flatten(1)


def rotate(states: torch.Tensor, cos_D: torch.Tensor, sin_D: torch.Tensor) -> torch.Tensor:
    """Rotary position embedding, half-rotation convention: x cos + [-x2, x1] sin.

    `states` is [..., heads, D]; `cos_D` and `sin_D` are [..., D] over the same leading positions.
    """
    first, second = states.chunk(2, dim=-1)
    turned = torch.cat([-second, first], dim=-1)
    return states * cos_D.unsqueeze(-2).to(states.dtype) + turned * sin_D.unsqueeze(-2).to(
        states.dtype
    )
