"""Packs of samples: several documents in one step, none of which sees another.

Shapes: T tokens of a pack, L aux layers plus the last state, H hidden, N anchors, K draft
positions.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from components.hidden_states.sample import Sample


@dataclass(frozen=True)
class Pack:
    """Documents one after another.

    `bounds` holds (first token, token after the last) per document, `supervised_T` marks the tokens
    to predict, `states_TLH` are bf16 with the aux layers first and the last state, before the final
    norm, in the last slot.
    """

    token_ids_T: torch.Tensor
    supervised_T: torch.Tensor
    positions_T: torch.Tensor
    states_TLH: torch.Tensor
    bounds: tuple[tuple[int, int], ...]
    indices: tuple[int, ...]
    sample_ids: tuple[str, ...]

    @property
    def num_tokens(self) -> int:
        """Tokens T of the pack."""
        return int(self.token_ids_T.numel())

    def to(self, device: torch.device) -> Pack:
        """The same pack on `device`."""
        return Pack(
            token_ids_T=self.token_ids_T.to(device, non_blocking=True),
            supervised_T=self.supervised_T.to(device, non_blocking=True),
            positions_T=self.positions_T.to(device, non_blocking=True),
            states_TLH=self.states_TLH.to(device, non_blocking=True),
            bounds=self.bounds,
            indices=self.indices,
            sample_ids=self.sample_ids,
        )


def pack_samples(samples: Iterator[Sample], *, max_tokens: int) -> Iterator[Pack]:
    """Fill packs in the order of arrival; a sample that does not fit opens the next pack.

    A sample longer than `max_tokens` is a pack of its own, whole: the engine's `max_model_len`
    bounds it. Samples are released once their states are copied into the pack.
    """
    waiting: list[Sample] = []
    num_tokens = 0
    for sample in samples:
        length = len(sample.request.token_ids)
        if waiting and num_tokens + length > max_tokens:
            yield make_pack(waiting)
            waiting = []
            num_tokens = 0
        waiting.append(sample)
        num_tokens += length
    if waiting:
        yield make_pack(waiting)


def make_pack(samples: list[Sample]) -> Pack:
    """One pack of all `samples`, which are released."""
    lengths = [len(sample.request.token_ids) for sample in samples]
    ends = torch.tensor(lengths).cumsum(0).tolist()
    pack = Pack(
        token_ids_T=torch.cat(
            [torch.from_numpy(s.request.token_ids.astype(np.int64)) for s in samples]
        ),
        supervised_T=torch.cat(
            [torch.from_numpy(s.request.loss_mask.astype(np.bool_)) for s in samples]
        ),
        positions_T=torch.cat([torch.arange(n) for n in lengths]),
        states_TLH=torch.cat([s.states_TLH for s in samples]),
        bounds=tuple((end - n, end) for end, n in zip(ends, lengths, strict=True)),
        indices=tuple(s.request.index for s in samples),
        sample_ids=tuple(s.request.sample_id for s in samples),
    )

    for sample in samples:
        sample.release()
    return pack


@dataclass(frozen=True)
class Blocks:
    """The draft blocks of one pack.

    `anchors_N` ascend; slot k of block n stands for token anchors_N[n] + k, and `valid_NK` says
    whether that token, for k = 1..K, is supervised together with all before it in the block.
    `spans` is one (first token, token after the last, first anchor, anchor after the last) per
    document with anchors.
    """

    anchors_N: torch.Tensor
    valid_NK: torch.Tensor
    spans: list[tuple[int, int, int, int]]

    def to(self, device: torch.device) -> Blocks:
        """The same blocks on `device`."""
        return Blocks(
            anchors_N=self.anchors_N.to(device), valid_NK=self.valid_NK.to(device), spans=self.spans
        )


def choose_blocks(
    pack: Pack,
    *,
    num_draft_tokens: int,
    num_anchors: int | None,
    generator: torch.Generator | None = None,
    in_prompts: bool = False,
) -> Blocks | None:
    """Anchors at supervised tokens that a supervised token follows; a random subset of
    `num_anchors`, or all.

    `in_prompts` counts every token as supervised: the target's distribution is known after each of
    them. The first token of a document is no anchor: no state comes before it, and a served drafter
    always has one.

    Returns:
        None where the pack has no such token.
    """
    supervised_T = torch.ones_like(pack.supervised_T) if in_prompts else pack.supervised_T
    valid_TK = _supervised_runs(supervised_T, pack.bounds, num_draft_tokens)
    candidates = torch.nonzero(supervised_T & valid_TK[:, 0] & (pack.positions_T > 0)).flatten()
    if num_anchors is not None and len(candidates) > num_anchors:
        chosen = torch.randperm(len(candidates), generator=generator)[:num_anchors]
        candidates = candidates[chosen.to(candidates.device)].sort().values

    if len(candidates) == 0:
        return None
    anchors = candidates.tolist()
    spans = []
    first = 0

    for start, end in pack.bounds:
        last = first
        while last < len(anchors) and anchors[last] < end:
            last += 1
        if last > first:
            spans.append((start, end, first, last))
        first = last

    return Blocks(anchors_N=candidates, valid_NK=valid_TK[candidates], spans=spans)


def has_blocks(pack: Pack, *, in_prompts: bool = False) -> bool:
    """Whether `choose_blocks` finds any: a supervised token, not its document's first, that another
    one follows.
    """
    supervised_T = torch.ones_like(pack.supervised_T) if in_prompts else pack.supervised_T
    return any(
        bool((supervised_T[start + 1 : end - 1] & supervised_T[start + 2 : end]).any())
        for start, end in pack.bounds
    )


def _supervised_runs(
    supervised_T: torch.Tensor, bounds: tuple[tuple[int, int], ...], num_draft_tokens: int
) -> torch.Tensor:
    """[T, K] bool: whether tokens t+1 .. t+k exist in t's document and are all supervised."""
    valid_TK = torch.zeros(
        len(supervised_T), num_draft_tokens, dtype=torch.bool, device=supervised_T.device
    )
    for start, end in bounds:
        run = torch.ones(end - start, dtype=torch.bool, device=valid_TK.device)
        for k in range(1, num_draft_tokens + 1):
            shifted = torch.zeros_like(run)
            shifted[: max(0, end - start - k)] = supervised_T[start + k : end]
            run = run & shifted
            valid_TK[start:end, k - 1] = run
    return valid_TK
