"""Optimizers of the training loop: AdamW for everything, or Muon for the backbone's matrices and
AdamW for the rest.

Muon (Jordan et al. 2024) orthogonalises the momentum of each weight matrix by five Newton-Schulz
iterations. With the update's RMS matched to AdamW's (Liu et al. 2025, arXiv 2502.16982, 2.2) both
take the same learning rate. On the demo's drafter it learned more from one pass over the data than
AdamW did, and no more from three (docs/lab-notes/training.md). The iterations cost the same
whatever the step's size, there as much as a step on about 500 tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from components.drafter.protocol import Drafter
from components.settings import TrainingSettings

ADAM_BETAS = (0.9, 0.95)
"""A few hundred steps are too short for the usual memory of 1,000 steps of squared gradients."""

_HEADS = ("markov_head.", "confidence_head.")
_MATRICES = ("layers.", "fc.")


def build_optimizers(drafter: Drafter, settings: TrainingSettings) -> list[torch.optim.Optimizer]:
    """The optimizers of a drafter's trainable parameters; each parameter is in one of them.

    Every group carries `lr_scale`, its learning rate relative to the schedule's.
    """
    parameters = [
        (name, value) for name, value in drafter.named_parameters() if value.requires_grad
    ]
    matrices = [
        value
        for name, value in parameters
        if settings.optimizer == "muon" and value.ndim == 2 and name.startswith(_MATRICES)
    ]

    taken = {id(value) for value in matrices}
    heads = [value for name, value in parameters if name.startswith(_HEADS)]
    rest = [
        value
        for name, value in parameters
        if not name.startswith(_HEADS) and id(value) not in taken
    ]

    groups = [
        {"params": rest, "lr_scale": 1.0},
        {"params": heads, "lr_scale": settings.heads_lr_scale},
    ]
    adamw = torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=0.0,
        betas=ADAM_BETAS,
        weight_decay=settings.weight_decay,
        fused=True,
    )

    if not matrices:
        return [adamw]
    muon = torch.optim.Muon(
        [{"params": matrices, "lr_scale": 1.0}],
        lr=0.0,
        weight_decay=settings.weight_decay,
        adjust_lr_fn="match_rms_adamw",
    )

    return [adamw, muon]


class Optimizers:
    """Several optimizers that step as one; `each` holds them in a fixed order."""

    def __init__(self, optimizers: Sequence[Any]) -> None:
        self.each = tuple(optimizers)

    def __len__(self) -> int:
        return len(self.each)

    @property
    def learning_rate(self) -> float:
        """Of the backbone, as set last."""
        return float(self.each[0].param_groups[0]["lr"])

    def set_learning_rate(self, rate: float) -> None:
        """Set every group's rate to `rate` times its own scale."""
        for optimizer in self.each:
            for group in optimizer.param_groups:
                group["lr"] = rate * group["lr_scale"]

    def step(self) -> None:
        """Apply the gradients and forget them."""
        for optimizer in self.each:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

    def state_dict(self) -> list[dict[str, Any]]:
        """States in a fixed order."""
        return [optimizer.state_dict() for optimizer in self.each]

    def load_state_dict(self, states: Sequence[dict[str, Any]]) -> None:
        """The reverse of `state_dict`."""
        for optimizer, state in zip(self.each, states, strict=True):
            optimizer.load_state_dict(state)
