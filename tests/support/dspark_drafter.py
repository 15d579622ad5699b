"""A DSpark drafter that is not trivial without training: the target's own layers, and a Markov head
one can see.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig

from components.drafter.build import build_drafter
from components.drafter.vocabulary import build_draft_vocabulary
from components.settings import DrafterSettings

SUCCESSOR_BIAS = 40.0
"""Logits: more than the backbone, which nobody trained, can say against it."""


def write_dspark(
    path: Path,
    *,
    target: Path,
    aux_layer_ids: tuple[int, ...] = (1, 2, 4),
    start_layers: tuple[int, ...] = (2, 3),
    draft_vocab_size: int | None = 400,
    mask_token_id: int | None = None,
    markov_rank: int = 16,
    markov_scale: float = 0.5,
    learn_from: Iterable[Sequence[int]] = (),
    seed: int = 0,
) -> Path:
    """Write the drafter for `target` into folder `path` and return it.

    `markov_scale` is about the standard deviation, in logits, of the bias that the previous token
    adds. From the token sequences in `learn_from`, the Markov head takes the likeliest successor of
    the most frequent tokens, one rank each of half its ranks, so that some drafts are right.
    """
    vocab_size = int(AutoConfig.from_pretrained(target).vocab_size)
    generator = torch.Generator().manual_seed(seed)
    vocabulary = None
    if draft_vocab_size is not None:
        counts_V = torch.randint(1, 100, (vocab_size,), generator=generator)
        vocabulary = build_draft_vocabulary(counts_V, size=draft_vocab_size, min_coverage=0.01)
    settings = DrafterSettings(
        num_layers=len(start_layers),
        block_size=5,
        markov_rank=markov_rank,
        start="target_layers",
        start_layers=start_layers,
        mask_token_id=mask_token_id,
    )
    model = build_drafter(
        settings, target_path=target, aux_layer_ids=aux_layer_ids, draft_vocab=vocabulary, seed=seed
    )
    with torch.no_grad():
        model.markov_head.markov_w1.weight.normal_(generator=generator)
        model.markov_head.markov_w2.weight.normal_(
            std=markov_scale / markov_rank**0.5, generator=generator
        )
        _teach_successors(model, learn_from)
    model.save_pretrained(path)
    return path


def _teach_successors(model: Any, sequences: Iterable[Sequence[int]]) -> None:
    """Give the most frequent tokens a rank of their own, on which the likeliest successor stands
    out.
    """
    w1_WR, w2_VR = model.markov_head.markov_w1.weight, model.markov_head.markov_w2.weight
    pairs = Counter(pair for sequence in sequences for pair in pairwise(sequence))
    draft_ids = {token: token for token in range(w2_VR.shape[0])}
    if model.d2t is not None:
        draft_ids = {int(draft + offset): draft for draft, offset in enumerate(model.d2t)}
    successors: dict[int, int] = {}
    for (previous, following), _ in pairs.most_common():
        if (
            previous not in successors
            and following in draft_ids
            and len(successors) < w1_WR.shape[1] // 2
        ):
            successors[previous] = draft_ids[following]
    for rank, (previous, draft_id) in enumerate(successors.items()):
        w1_WR[:, rank] = 0.0
        w1_WR[previous] = torch.eye(w1_WR.shape[1])[rank]
        w2_VR[draft_id, rank] = SUCCESSOR_BIAS
