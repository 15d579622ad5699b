"""States in eight bits on the wire: float8 e4m3 with one scale per token and layer.

A scale maps the largest magnitude of a token's state to 448, the largest of e4m3 (Micikevicius et
al. 2022, arXiv 2209.05433). Three bits of mantissa round each value to within 1/16 of it, a state
by 2.6 % in the root mean square; values below 1/28,672 of their token's largest lose further bits.
bfloat16 rounds to within 1/256.

T tokens, L layers, H hidden.
"""

from __future__ import annotations

import torch

FLOAT8_MAX = 448.0
_TOKENS_AT_ONCE = 64  # float32 copies of this many tokens, never of a whole sample


def quantize(states_TLH: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """float8_e4m3fn values [T, L, H] and float32 scales [T, L]. A NaN or infinity makes its whole
    state NaN.
    """
    largest_TL = states_TLH.abs().amax(dim=-1).float()
    scales_TL = torch.where(largest_TL == 0, torch.ones_like(largest_TL), largest_TL / FLOAT8_MAX)
    values_TLH = torch.empty(states_TLH.shape, dtype=torch.float8_e4m3fn, device=states_TLH.device)
    for start in range(0, len(states_TLH), _TOKENS_AT_ONCE):
        part = slice(start, start + _TOKENS_AT_ONCE)
        values_TLH[part] = (states_TLH[part].float() / scales_TL[part, :, None]).to(
            torch.float8_e4m3fn
        )
    return values_TLH, scales_TL


def dequantize_into(
    states_TLH: torch.Tensor, values_TLH: torch.Tensor, scales_TL: torch.Tensor
) -> None:
    """The reverse of `quantize`, rounded to the dtype of `states_TLH`, which is overwritten."""
    for start in range(0, len(values_TLH), _TOKENS_AT_ONCE):
        part = slice(start, start + _TOKENS_AT_ONCE)
        states_TLH[part] = values_TLH[part].float() * scales_TL[part, :, None]
