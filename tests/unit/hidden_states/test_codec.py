"""Eight bits on the wire: how far off, and what happens to zeros, outliers and values that are no
numbers.
"""

from __future__ import annotations

import pytest
import torch

from components.hidden_states.codec import dequantize_into, quantize


def through(states_TLH: torch.Tensor) -> torch.Tensor:
    decoded = torch.empty_like(states_TLH)
    dequantize_into(decoded, *quantize(states_TLH))
    return decoded


def states(num_tokens: int = 200) -> torch.Tensor:
    return torch.randn(num_tokens, 3, 64, generator=torch.Generator().manual_seed(0)).to(
        torch.bfloat16
    )


def test_the_error_is_what_the_docs_say() -> None:
    exact = states()
    decoded = through(exact)
    error = (decoded.float() - exact.float()).norm() / exact.float().norm()
    assert float(error) == pytest.approx(0.026, abs=0.003)
    large = exact.abs() > 0.1
    relative = ((decoded.float() - exact.float()).abs() / exact.float().abs())[large]
    assert float(relative.max()) <= 1 / 16 + 1 / 256


def test_powers_of_two_and_zeros_are_exact() -> None:
    exact = torch.tensor([1.0, 2.0, -4.0, 0.5, 0.0, 7.0]).to(torch.bfloat16).expand(2, 1, 6)
    assert torch.equal(through(exact * 64), exact * 64)  # 448 = 7 * 64 gets the scale one
    assert torch.equal(
        through(torch.zeros(2, 1, 6, dtype=torch.bfloat16)),
        torch.zeros(2, 1, 6, dtype=torch.bfloat16),
    )


def test_an_outlier_a_thousand_times_larger_does_not_drown_its_token() -> None:
    exact = states()
    exact[:, :, 5] = 3000.0
    rest = torch.arange(64) != 5
    error = (through(exact)[..., rest].float() - exact[..., rest].float()).norm() / exact[
        ..., rest
    ].float().norm()
    assert float(error) < 0.04


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_no_number_stays_none(bad: float) -> None:
    exact = states()
    exact[7, 1, 3] = bad
    decoded = through(exact)
    assert not torch.isfinite(decoded[7, 1]).any()
    assert torch.isfinite(decoded[8]).all() and torch.isfinite(decoded[7, 0]).all()
