"""What goes into the stream, what comes out, and what a sample is on its way. T tokens, L layers, H
hidden.
"""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from components.contracts import TargetFingerprint
from components.hidden_states.buffers import Region, Ring
from components.hidden_states.wire import Layout


@dataclass(frozen=True, eq=False)
class SampleRequest:
    """One sample to stream.

    Args:
        index: its place in the epoch's order, for the record.
        sample_id: its name in the dataset.
        token_ids: int32 (T,).
        loss_mask: bool (T,); True where the token is supervised (the target wrote it).
        greedy: whether the supervised tokens were generated at temperature 0; None: not known.
    """

    index: int
    sample_id: str
    token_ids: np.ndarray
    loss_mask: np.ndarray
    greedy: bool | None = None


class Sample:
    """A checked sample. `states_TLH` is a view of a reader buffer (bfloat16), valid until
    `release()`.
    """

    def __init__(
        self, request: SampleRequest, states_TLH: torch.Tensor, *, ring: Ring, region: Region
    ) -> None:
        self.request = request
        self.states_TLH = states_TLH
        self._ring = ring
        self._region = region

    def release(self) -> None:
        """Give the buffer back; releasing twice does no harm."""
        self._ring.release(self._region)


@dataclass(frozen=True)
class Identity:
    """What every sample of this reader has to carry."""

    run_id: str
    consumer: str
    fingerprint: TargetFingerprint
    layer_ids: tuple[int, ...]
    hidden_size: int
    dtype: str = "bfloat16"
    """On the wire; what the trainer gets is bfloat16."""


@dataclass(frozen=True, slots=True)
class Entry:
    """Where a sample lies in the cache on disk."""

    path: Path
    offset: int
    num_bytes: int


@dataclass
class Arrival:
    """A sample on its way: its credits are taken; `future` is None when it is not sent to an
    engine.
    """

    request: SampleRequest
    serial: int
    place: Layout
    future: Future[int] | None
    answered_at: float | None = None
    """When the engine answered last, by the stream's clock; its sample appears soon after, or
    never.
    """
    cached: Entry | None = None
    """Where it lies in the cache; it then has no credits and no future."""
    region: Region | None = None
    fetched: Future[int] | None = None
    """Its first attempt being read ahead of its turn into `region`; gives the bytes the store kept
    on a disk.
    """
