"""What the pipeline needs of a drafter that `speculators` builds.

`speculators` has a model class per algorithm and no types for what they share; this names it, so
that a misspelt attribute is an error of the type checker and not of a training run.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, Self

if TYPE_CHECKING:  # flows read checkpoints without torch
    import torch
    from torch import nn


class Drafter(Protocol):
    """A `speculators` draft model: decoder layers over states of the target, norms and heads.

    `config` is its speculators configuration; `d2t` and `t2d` map a pruned vocabulary to the
    target's and back, None where it is whole. Not every algorithm has every part: EAGLE-3 has no
    `hidden_norm` and no mask token, and only DSpark has a Markov and a confidence head, which are
    asked for with `getattr`.
    """

    config: Any
    layers: nn.ModuleList
    fc: nn.Module
    norm: nn.Module
    embed_tokens: nn.Module
    lm_head: nn.Module
    verifier_norm: nn.Module
    hidden_norm: nn.Module
    rotary_emb: nn.Module
    draft_vocab_size: int
    mask_token_id: int
    d2t: torch.Tensor | None
    t2d: torch.Tensor | None

    def parameters(self) -> Iterator[nn.Parameter]:
        """All parameters, frozen ones included."""

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """The same, by name."""

    def buffers(self) -> Iterator[torch.Tensor]:
        """Tensors that are no parameters."""

    def state_dict(self) -> dict[str, torch.Tensor]:
        """All tensors by name."""

    def get_output_embeddings(self) -> nn.Module:
        """The head over the draft vocabulary."""

    def get_input_embeddings(self) -> nn.Module:
        """The embedding of the target's vocabulary."""

    def to(self, device: torch.device) -> Self:
        """The same model on another device."""

    def train(self, mode: bool = True) -> Self:
        """Into training."""

    def eval(self) -> Self:
        """Out of training."""

    def save_pretrained(self, path: Path) -> None:
        """Write the checkpoint."""
