"""The arguments that make an engine extract."""

from __future__ import annotations

import json

import pytest

from components.contracts import StoreEndpoint, TargetFingerprint
from components.errors import ConfigError
from components.hidden_states.launch import extraction_args
from components.settings import StreamSettings

FINGERPRINT = TargetFingerprint(
    weights="a" * 64, quantization="b" * 64, tokenizer="c" * 64, serving="d" * 64
)
STORE = StoreEndpoint(master_address="127.0.0.1:50051", metrics_url="http://127.0.0.1:9003/metrics")


def launch(settings: StreamSettings, *, segment_mib: int = 512, run_id: str = "r1") -> list[str]:
    args, _ = extraction_args(
        settings=settings,
        num_hidden_layers=30,
        store=STORE,
        run_id=run_id,
        fingerprint=FINGERPRINT,
        segment_mib=segment_mib,
    )
    return args


def test_layers_end_with_the_state_before_the_final_norm() -> None:
    args = launch(StreamSettings(aux_layer_ids=(3, 16, 27), budget_mib=128))
    speculative = json.loads(args[args.index("--speculative-config") + 1])
    assert speculative["draft_model_config"]["hf_config"]["eagle_aux_hidden_state_layer_ids"] == [
        3,
        16,
        27,
        30,
    ]
    transfer = json.loads(args[args.index("--kv-transfer-config") + 1])
    stream = transfer["kv_connector_extra_config"]["stream"]
    assert stream["layer_ids"] == [3, 16, 27, 30]
    # Half is the reader's buffers, a sixteenth is kept back.
    assert stream["budget_bytes"] == 56 << 20
    assert TargetFingerprint.model_validate(stream["fingerprint"]) == FINGERPRINT


@pytest.mark.parametrize("layers", [(0, 3), (3, 30), (31,)])
def test_layers_the_target_does_not_have(layers: tuple[int, ...]) -> None:
    with pytest.raises(ConfigError, match="does not have"):
        launch(StreamSettings(aux_layer_ids=layers))


def test_a_layer_named_twice() -> None:
    with pytest.raises(ConfigError, match="twice"):
        launch(StreamSettings(aux_layer_ids=(3, 3)))


def test_a_store_smaller_than_the_budget() -> None:
    with pytest.raises(ConfigError, match="smaller than the stream's budget"):
        launch(StreamSettings(aux_layer_ids=(3,), budget_mib=1152), segment_mib=512)


def test_a_run_id_that_cannot_be_a_key() -> None:
    with pytest.raises(ConfigError, match="store key"):
        launch(StreamSettings(aux_layer_ids=(3,)), run_id="a/b")
