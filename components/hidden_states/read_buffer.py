"""The memory samples are read into, and the checks and decoding that turn an object there into
states.

T tokens, L layers, H hidden.
"""

from __future__ import annotations

import numpy as np
import torch

from components.errors import StreamError
from components.hidden_states.buffers import Region
from components.hidden_states.checks import (
    FaultyStatesError,
    LayerVariance,
    check_header,
    check_payload,
    check_token_ids,
)
from components.hidden_states.codec import dequantize_into
from components.hidden_states.sample import Identity, SampleRequest
from components.hidden_states.wire import FLOAT8, Layout, SampleHeader, align, layout, unpack_header


class ReadBuffer:
    """One buffer for all samples of a reader; the ring says which bytes belong to whom."""

    def __init__(self, identity: Identity, variance: LayerVariance, *, num_bytes: int) -> None:
        self._identity = identity
        self._variance = variance
        self.tensor = torch.empty(num_bytes, dtype=torch.uint8)
        self._bytes = memoryview(self.tensor.numpy())

    def layout(self, request: SampleRequest) -> Layout:
        """Of the object that this request becomes."""
        identity = self._identity
        return layout(
            num_tokens=len(request.token_ids),
            num_layers=len(identity.layer_ids),
            hidden_size=identity.hidden_size,
            dtype=identity.dtype,
        )

    def num_bytes(self, place: Layout) -> int:
        """What a sample takes of the ring: the object, and where it holds eight bits the states
        they become.
        """
        is_decoded_elsewhere = self._identity.dtype == FLOAT8
        return place.num_bytes + (align(2 * place.states_bytes) if is_decoded_elsewhere else 0)

    def pointer(self, region: Region) -> int:
        """Address where the object goes."""
        return int(self.tensor.data_ptr()) + region.start

    def view(self, region: Region, place: Layout) -> memoryview:
        """The object's bytes."""
        return self._bytes[region.start : region.start + place.num_bytes]

    def states(
        self, request: SampleRequest, region: Region, place: Layout, *, name: str | None
    ) -> torch.Tensor:
        """Check an object by itself; its states [T, L, H], bfloat16, as a view of this buffer.

        Args:
            request: what was asked for.
            region: where the object lies.
            place: of `layout`.
            name: the attempt that wrote it; None from the cache, where whichever run and attempt
                wrote it is right.

        Raises:
            FaultyStatesError: named by what is wrong.
        """
        view = self.view(region, place)
        try:
            header = unpack_header(view)
        except StreamError as error:
            raise FaultyStatesError(
                "header", error.problem, got=error.got, expected=error.expected
            ) from None

        self.check_stamp(header, request, name=name)
        check_payload(view, header)
        stored_ids = np.frombuffer(
            view, dtype=np.int32, count=len(request.token_ids), offset=place.tokens_offset
        )
        check_token_ids(stored_ids, request.token_ids)
        states_TLH = self._decoded(region, place, self._shape(request))

        self._variance.check(states_TLH)
        return states_TLH

    def check_stamp(
        self, header: SampleHeader, request: SampleRequest, *, name: str | None
    ) -> None:
        """Compare a header with what this reader expects.

        Raises:
            FaultyStatesError: named by the first field that differs.
        """
        identity = self._identity
        check_header(
            header, run_id=header.run_id if name is None else identity.run_id,
            sample=header.sample if name is None else name, fingerprint=identity.fingerprint,
            layer_ids=identity.layer_ids, dtype=identity.dtype, shape=self._shape(request),
        )  # fmt: skip

    def explain_size(self, data: bytes | None, request: SampleRequest, *, name: str) -> None:
        """An engine that was started for other settings writes objects of another size: the header
        says which.

        Raises:
            FaultyStatesError: always; 'size' where the header says nothing else.
        """
        try:
            header = unpack_header(memoryview(data)) if data else None
        except StreamError:
            header = None
        if header is not None:
            self.check_stamp(header, request, name=name)
        raise FaultyStatesError(
            "size", "a sample has another size than its tokens, layers and dtype make", got=name
        )

    def _shape(self, request: SampleRequest) -> tuple[int, int, int]:
        return len(request.token_ids), len(self._identity.layer_ids), self._identity.hidden_size

    def _decoded(self, region: Region, place: Layout, shape: tuple[int, int, int]) -> torch.Tensor:
        """The states as bfloat16: where they lie, or behind the object where that holds eight
        bits.
        """
        stored = self._part(region.start + place.states_offset, place.states_bytes)
        if self._identity.dtype != FLOAT8:
            return stored.view(torch.bfloat16).view(shape)
        scales = self._part(region.start + place.scales_offset, place.scales_bytes)
        states_TLH = (
            self._part(region.start + place.num_bytes, 2 * place.states_bytes)
            .view(torch.bfloat16)
            .view(shape)
        )
        values_TLH = stored.view(torch.float8_e4m3fn).view(shape)
        dequantize_into(states_TLH, values_TLH, scales.view(torch.float32).view(shape[:2]))
        return states_TLH

    def _part(self, start: int, num_bytes: int) -> torch.Tensor:
        return self.tensor[start : start + num_bytes]
