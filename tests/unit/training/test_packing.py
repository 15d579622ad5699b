"""Packs and blocks: sizes, releases, anchors and which slots count."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch

from components.hidden_states.sample import SampleRequest
from components.training.packing import Pack, choose_blocks, make_pack, pack_samples


@dataclass
class FakeSample:
    request: SampleRequest
    states_TLH: torch.Tensor
    released: list[int] = field(default_factory=list)

    def release(self) -> None:
        self.released.append(self.request.index)


def sample(index: int, length: int, num_prompt: int = 2) -> FakeSample:
    request = SampleRequest(
        index, f"s{index}", np.arange(length, dtype=np.int32), np.arange(length) >= num_prompt
    )
    return FakeSample(request, torch.full((length, 2, 3), float(index), dtype=torch.bfloat16))


def test_packs_fill_in_order_and_never_exceed_their_size() -> None:
    samples = [sample(i, n) for i, n in enumerate((4, 5, 3, 9, 2))]
    packs = list(pack_samples(iter(samples), max_tokens=10))
    assert [pack.indices for pack in packs] == [(0, 1), (2,), (3,), (4,)]
    assert packs[0].bounds == ((0, 4), (4, 9)) and packs[0].positions_T.tolist() == [
        0,
        1,
        2,
        3,
        0,
        1,
        2,
        3,
        4,
    ]
    assert packs[0].states_TLH[4:, 0, 0].tolist() == [1.0] * 5
    assert all(s.released == [s.request.index] for s in samples)


def test_a_sample_longer_than_a_pack_is_one_of_its_own() -> None:
    packs = list(pack_samples(iter([sample(0, 4), sample(1, 25), sample(2, 3)]), max_tokens=10))
    assert [pack.indices for pack in packs] == [(0,), (1,), (2,)]
    assert packs[1].num_tokens == 25 and packs[1].states_TLH.shape[0] == 25


def one_pack() -> Pack:
    return make_pack([sample(0, 8), sample(1, 4)])


def test_anchors_are_supervised_and_slots_end_with_their_document() -> None:
    blocks = choose_blocks(one_pack(), num_draft_tokens=3, num_anchors=None)
    assert blocks is not None
    assert blocks.anchors_N.tolist() == [2, 3, 4, 5, 6, 10]
    assert blocks.valid_NK.int().tolist() == [
        [1, 1, 1],
        [1, 1, 1],
        [1, 1, 1],
        [1, 1, 0],
        [1, 0, 0],
        [1, 0, 0],
    ]
    assert blocks.spans == [(0, 8, 0, 5), (8, 12, 5, 6)]


def test_a_gap_in_the_mask_ends_a_block() -> None:
    pack = one_pack()
    pack.supervised_T[4] = False
    blocks = choose_blocks(pack, num_draft_tokens=3, num_anchors=None)
    assert blocks is not None
    assert blocks.anchors_N.tolist() == [2, 5, 6, 10]
    assert blocks.valid_NK.int().tolist() == [[1, 0, 0], [1, 1, 0], [1, 0, 0], [1, 0, 0]]


def test_a_subset_of_anchors_is_seeded_and_sorted() -> None:
    chosen = [
        choose_blocks(
            one_pack(),
            num_draft_tokens=3,
            num_anchors=3,
            generator=torch.Generator().manual_seed(seed),
        )
        for seed in (0, 0, 1)
    ]
    anchors = [blocks.anchors_N.tolist() for blocks in chosen if blocks is not None]
    assert anchors[0] == anchors[1] == sorted(anchors[0]) and len(anchors[2]) == 3


def test_blocks_in_prompts_start_anywhere_but_stay_within_their_document() -> None:
    pack = one_pack()
    blocks = choose_blocks(pack, num_draft_tokens=3, num_anchors=None, in_prompts=True)
    assert blocks is not None
    assert blocks.anchors_N.tolist() == [
        at for start, end in pack.bounds for at in range(start + 1, end - 1)
    ]
    left = [end - 1 - at for start, end in pack.bounds for at in range(start + 1, end - 1)]
    assert blocks.valid_NK.sum(1).tolist() == [min(3, number) for number in left]


def test_a_pack_without_supervision_has_no_blocks() -> None:
    pack = one_pack()
    pack.supervised_T.zero_()
    assert choose_blocks(pack, num_draft_tokens=3, num_anchors=None) is None
