"""A tiny drafter on the tiny target, with its states computed in process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from components.drafter.build import build_drafter
from components.drafter.start import read_lm_head
from components.drafter.vocabulary import build_draft_vocabulary
from components.settings import DrafterSettings
from components.training.packing import Pack, pack_samples
from tests.support.offline_reader import OfflineReader, random_requests

AUX = (1, 3)
VOCAB_SIZE = 512


@pytest.fixture(scope="session")
def make_drafter(tiny_target: Path) -> Callable[..., Any]:
    """make_drafter(pruned=True, **settings) -> a drafter of block size 4."""

    def make(*, pruned: bool = True, seed: int = 0, **settings: Any) -> Any:
        counts_V = torch.ones(read_lm_head(tiny_target).shape[0], dtype=torch.long)
        draft_vocab = (
            build_draft_vocabulary(counts_V, size=256, min_coverage=0.1) if pruned else None
        )
        shape = DrafterSettings(**{"num_layers": 2, "block_size": 4, "markov_rank": 8, **settings})
        return build_drafter(
            shape, target_path=tiny_target, aux_layer_ids=AUX, draft_vocab=draft_vocab, seed=seed
        )

    return make


@pytest.fixture(scope="session")
def packs(tiny_target: Path) -> list[Pack]:
    """Packs of at most 96 tokens, several documents each."""
    reader = OfflineReader(tiny_target, aux_layer_ids=AUX)
    return list(
        pack_samples(reader.stream(random_requests(24, vocab_size=VOCAB_SIZE)), max_tokens=96)
    )
