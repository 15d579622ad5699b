"""The object format: lengths known beforehand, damage noticed."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from components.errors import ConfigError, StreamError
from components.hidden_states import wire


def make_header(**changes: object) -> wire.SampleHeader:
    values: dict[str, object] = {
        "run_id": "run",
        "sample": "0-abc-1-0",
        "weights": "w" * 64,
        "fingerprint": "f" * 64,
        "layer_ids": (3, 16, 27, 30),
        "dtype": "bfloat16",
        "shape": (7, 4, 576),
        "checksum": "0" * 16,
    }
    return wire.SampleHeader.model_validate(values | changes)


def test_header_survives_the_wire() -> None:
    header = make_header()
    packed = wire.pack_header(header)
    assert len(packed) == wire.HEADER_BYTES
    assert wire.unpack_header(memoryview(packed)) == header


@pytest.mark.parametrize("position", [0, 5, 20, 60])
def test_damaged_header_is_refused(position: int) -> None:
    packed = bytearray(wire.pack_header(make_header()))
    packed[position] ^= 0x80
    with pytest.raises(StreamError):
        wire.unpack_header(memoryview(packed))


def test_too_many_layers_do_not_fit() -> None:
    with pytest.raises(ConfigError, match="does not fit"):
        wire.pack_header(make_header(layer_ids=tuple(range(400))))


def test_layout_of_a_known_sample() -> None:
    # 300 tokens x 4 layers x 576 x 2 bytes, a header, 300 int32; both parts start on 64 bytes.
    place = wire.layout(num_tokens=300, num_layers=4, hidden_size=576)
    assert place.states_bytes == 1_382_400
    assert place.tokens_offset == 1_024 + 1_382_400
    assert place.num_bytes == 1_024 + 1_382_400 + 1_216


def test_eight_bits_take_half_the_room_and_a_scale_per_token_and_layer() -> None:
    place = wire.layout(num_tokens=300, num_layers=4, hidden_size=576, dtype="float8_e4m3fn")
    assert place.states_bytes == 691_200
    assert place.scales_bytes == 4 * 300 * 4
    assert place.num_bytes == 1_024 + 691_200 + 4_800 + 1_216


@given(
    st.integers(1, 5_000),
    st.integers(1, 8),
    st.integers(1, 300),
    st.sampled_from(["bfloat16", "float8_e4m3fn"]),
)
def test_parts_never_overlap(
    num_tokens: int, num_layers: int, hidden_size: int, dtype: str
) -> None:
    place = wire.layout(
        num_tokens=num_tokens, num_layers=num_layers, hidden_size=hidden_size, dtype=dtype
    )
    assert place.states_offset + place.states_bytes <= place.scales_offset
    assert place.scales_offset + place.scales_bytes <= place.tokens_offset
    assert place.scales_offset % wire.ALIGN_BYTES == 0
    assert place.tokens_offset + place.tokens_bytes <= place.num_bytes
    assert place.tokens_offset % wire.ALIGN_BYTES == place.num_bytes % wire.ALIGN_BYTES == 0


def test_checksum_sees_every_byte() -> None:
    data = bytearray(wire.HEADER_BYTES + 256)
    before = wire.payload_checksum(memoryview(data))
    data[-1] ^= 1
    assert wire.payload_checksum(memoryview(data)) != before


@given(st.integers(16 << 20, 4 << 30))
def test_budget_is_split_with_a_sixteenth_to_spare(budget_bytes: int) -> None:
    # 128 MiB once peaked at 128.9: the store held a sample whose key was gone already.
    store_bytes, ring_bytes = wire.budget_split(budget_bytes)
    assert store_bytes + ring_bytes == budget_bytes - budget_bytes // 16
    assert ring_bytes % wire.ALIGN_BYTES == 0


@pytest.mark.parametrize("name", ["", "a/b", "a b", "-a", "x" * 121, "a:error"])
def test_names_that_would_break_keys_are_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="store key"):
        wire.checked_name(name, what="the run id")


def test_prefix_of_one_consumer_excludes_another() -> None:
    key = wire.store_key("run", wire.sample_name(consumer="1-abc", index=2, attempt=0))
    assert key.startswith(wire.run_prefix("run", "1"))
    assert not key.startswith(wire.run_prefix("run", "11"))
    assert wire.error_key(key).startswith(wire.run_prefix("run"))
