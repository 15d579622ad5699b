"""A random DSpark drafter that is not trivial: the target's own layers as its start, and a Markov head one can see."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoConfig

from components.drafter.build import build_drafter
from components.drafter.vocabulary import build_draft_vocabulary
from components.settings import DrafterSettings


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
    seed: int = 0,
) -> Path:
    """Write the drafter for `target` into folder `path` and return it.

    `markov_scale` is about the standard deviation, in logits, of the bias that the previous token adds.
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
    model = build_drafter(settings, target_path=target, aux_layer_ids=aux_layer_ids, draft_vocab=vocabulary, seed=seed)
    with torch.no_grad():
        model.markov_head.markov_w1.weight.normal_(generator=generator)
        model.markov_head.markov_w2.weight.normal_(std=markov_scale / markov_rank**0.5, generator=generator)
    model.save_pretrained(path)
    return path
