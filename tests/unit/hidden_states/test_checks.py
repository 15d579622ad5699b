"""State checks on states whose answer is known."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from components.contracts import TargetFingerprint
from components.errors import StreamError
from components.hidden_states.checks import (
    FaultyStatesError,
    LayerVariance,
    LmHead,
    LmHeadCheck,
    check_header,
    check_payload,
    check_token_ids,
)
from components.hidden_states.wire import HEADER_BYTES, SampleHeader, payload_checksum
from components.settings import StreamSettings

LAYERS = (1, 2, 3, 4)
FINGERPRINT = TargetFingerprint(
    weights="a" * 64, quantization="b" * 64, tokenizer="c" * 64, serving="d" * 64
)


def random_states(*, num_tokens: int = 40, seed: int = 0) -> torch.Tensor:
    return torch.randn(num_tokens, 4, 64, generator=torch.Generator().manual_seed(seed)).to(
        torch.bfloat16
    )


def reason_of(states_TLH: torch.Tensor, variance: LayerVariance | None = None) -> tuple[str, str]:
    with pytest.raises(FaultyStatesError) as caught:
        (variance or LayerVariance(LAYERS)).check(states_TLH)
    return caught.value.reason, str(caught.value)


def passes(variance: LayerVariance, states_TLH: torch.Tensor) -> bool:
    try:
        variance.check(states_TLH)
    except FaultyStatesError:
        return False
    return True


def test_ordinary_states_pass() -> None:
    variance = LayerVariance(LAYERS)
    assert all(passes(variance, random_states(seed=seed)) for seed in range(20))


def test_one_nan_is_found_and_named() -> None:
    states_TLH = random_states()
    states_TLH[17, 2, 5] = float("nan")
    reason, message = reason_of(states_TLH)
    assert reason == "not_finite"
    assert "layer 3" in message and "(40, 4, 64)" in message and "1 of 2560" in message


def test_one_infinity_is_found() -> None:
    states_TLH = random_states()
    states_TLH[0, 0, 0] = float("-inf")
    assert reason_of(states_TLH)[0] == "not_finite"


def test_zero_layer_is_found_and_named() -> None:
    states_TLH = random_states()
    states_TLH[:, 1] = 0
    reason, message = reason_of(states_TLH)
    assert reason == "zero" and "layer 2" in message and "40 of 40" in message


def test_massive_activations_of_one_token_are_ordinary() -> None:
    states_TLH = random_states()
    states_TLH[0, :, 7] = 10_000
    assert passes(LayerVariance(LAYERS), states_TLH)


def test_finite_states_whose_variance_is_not_are_exploding() -> None:
    states_TLH = random_states()
    states_TLH[:, 1] *= 1e30
    reason, message = reason_of(states_TLH)
    assert reason == "exploding" and "layer 2" in message


def test_a_layer_that_leaves_its_scale_is_found() -> None:
    variance = LayerVariance(LAYERS)
    for seed in range(8):
        variance.check(random_states(seed=seed))
    loud, faint = random_states(), random_states()
    loud[:, 3] *= 64
    faint[:, 0] /= 64
    assert reason_of(loud, variance)[0] == "exploding"
    assert reason_of(faint, variance)[0] == "vanishing"


def test_token_ids_name_the_first_difference() -> None:
    ids = np.arange(10, dtype=np.int32)
    other = ids.copy()
    other[[4, 7]] = 99
    check_token_ids(ids, ids)
    with pytest.raises(
        FaultyStatesError, match="2 of 10 token ids differ, first at position 4; got 99; expected 4"
    ):
        check_token_ids(other, ids)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"layer_ids": (1, 2, 3)}, "layers"),
        ({"fingerprint": "x" * 64}, "fingerprint"),
        ({"dtype": "float16"}, "dtype"),
        ({"shape": (39, 4, 64)}, "shape"),
        ({"run_id": "other"}, "run"),
        ({"sample": "0-a-2-0"}, "sample"),
    ],
)
def test_a_stamp_that_differs_is_refused(change: dict[str, object], reason: str) -> None:
    header = SampleHeader(
        run_id="run",
        sample="0-a-1-0",
        weights="w",
        fingerprint=FINGERPRINT.digest,
        layer_ids=LAYERS,
        dtype="bfloat16",
        shape=(40, 4, 64),
        checksum="0",
    )
    expected = {
        "run_id": "run",
        "sample": "0-a-1-0",
        "fingerprint": FINGERPRINT,
        "dtype": "bfloat16",
    }
    check_header(header, **expected, layer_ids=LAYERS, shape=(40, 4, 64))
    with pytest.raises(FaultyStatesError) as caught:
        check_header(
            header.model_copy(update=change), **expected, layer_ids=LAYERS, shape=(40, 4, 64)
        )
    assert caught.value.reason == reason


def test_one_flipped_bit_is_found() -> None:
    data = bytearray(np.random.default_rng(0).bytes(HEADER_BYTES + 1000))
    header = SampleHeader(
        run_id="r",
        sample="s",
        weights="w",
        fingerprint="f",
        layer_ids=(1,),
        dtype="bfloat16",
        shape=(1, 1, 1),
        checksum=payload_checksum(memoryview(data)),
    )
    check_payload(memoryview(data), header)
    data[HEADER_BYTES + 500] ^= 4
    with pytest.raises(FaultyStatesError, match="damaged"):
        check_payload(memoryview(data), header)


@pytest.fixture(scope="module")
def answered(tiny_target: Path) -> tuple[torch.Tensor, np.ndarray, int]:
    """HF's states before the final norm (T, L, H), ids whose second half is the target's greedy
    answer, next token.
    """
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny_target, dtype=torch.bfloat16)
    ids = torch.randint(3, 500, (1, 30), generator=torch.Generator().manual_seed(1))
    captured: list[torch.Tensor] = []
    model.model.norm.register_forward_pre_hook(lambda _, args: captured.append(args[0][0].detach()))
    with torch.no_grad():
        for _ in range(31):
            ids = torch.cat([ids, model(ids).logits[:, -1:].argmax(-1)], dim=1)
        captured.clear()
        states = torch.stack(
            [state[0] for state in model(ids[:, :-1], output_hidden_states=True).hidden_states], 1
        )
    states[:, -1] = captured[-1]
    return states[:, 1:], ids[0, :-1].to(torch.int32).numpy(), int(ids[0, -1])


def run_head_check(
    head: LmHead, states_TH: torch.Tensor, answered: object, *, greedy: bool | None
) -> LmHeadCheck:
    _, token_ids, next_token = answered  # type: ignore[misc]
    check = LmHeadCheck(StreamSettings(aux_layer_ids=(1,)), head)
    for _ in range(8):
        check.check(
            states_TH,
            token_ids=token_ids,
            loss_mask=np.arange(60) >= 30,
            engine_token=next_token,
            greedy=greedy,
        )
    return check


def test_lm_head_agrees_with_the_targets_own_answer(tiny_target: Path, answered: object) -> None:
    states_TLH, _, _ = answered  # type: ignore[misc]
    check = run_head_check(LmHead(tiny_target), states_TLH[:, -1], answered, greedy=True)
    assert check.engine.share == 1.0
    assert check.greedy_answers.num_compared == 8 * 30
    assert check.greedy_answers.share > 0.95


@pytest.mark.parametrize("wrong", ["offset", "zero"])
def test_lm_head_catches_a_wrong_layer(tiny_target: Path, answered: object, wrong: str) -> None:
    states_TLH, _, _ = answered  # type: ignore[misc]
    states_TH = states_TLH[:, -2] if wrong == "offset" else torch.zeros_like(states_TLH[:, -1])
    with pytest.raises(StreamError, match="does not agree"):
        run_head_check(LmHead(tiny_target), states_TH, answered, greedy=None)
