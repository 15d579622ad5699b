"""Which parameter is trained by what, and what one step of Muon does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from components.settings import TrainingSettings
from components.training.optimizing.optimizers import Optimizers, build_optimizers


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_every_trainable_parameter_has_one_optimizer(
    make_drafter: Callable[..., Any], optimizer: str
) -> None:
    drafter = make_drafter()
    built = build_optimizers(drafter, TrainingSettings(optimizer=optimizer, heads_lr_scale=0.5))
    grouped = [value for one in built for group in one.param_groups for value in group["params"]]
    wanted = [value for value in drafter.parameters() if value.requires_grad]
    assert len(grouped) == len(wanted)
    assert {id(value) for value in grouped} == {id(value) for value in wanted}
    scales = {
        id(value): group["lr_scale"]
        for one in built
        for group in one.param_groups
        for value in group["params"]
    }
    assert {scales[id(value)] for value in drafter.markov_head.parameters()} == {0.5}
    assert scales[id(drafter.fc.weight)] == 1.0


def test_muon_takes_the_backbones_matrices_and_nothing_else(
    make_drafter: Callable[..., Any],
) -> None:
    drafter = make_drafter()
    adamw, muon = build_optimizers(drafter, TrainingSettings(optimizer="muon"))
    names = {id(value): name for name, value in drafter.named_parameters()}
    by_muon = {names[id(value)] for group in muon.param_groups for value in group["params"]}
    by_adamw = {names[id(value)] for group in adamw.param_groups for value in group["params"]}
    assert {name.split(".")[0] for name in by_muon} == {"fc", "layers"}
    assert not any("norm" in name for name in by_muon)
    assert {name.split(".")[0] for name in by_adamw} >= {
        "markov_head",
        "confidence_head",
        "norm",
        "hidden_norm",
    }


class _OneMatrix(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.fc = nn.Linear(32, 8, bias=False)
        nn.init.zeros_(self.fc.weight)


def test_a_step_of_muon_moves_all_directions_alike_by_adamws_rms() -> None:
    """The gradient's singular values span three decades, the update's stay near rate * 0.2 *
    sqrt(32).
    """
    module = _OneMatrix()
    optimizers = Optimizers(build_optimizers(module, TrainingSettings(optimizer="muon")))
    optimizers.set_learning_rate(0.01)
    left = torch.linalg.qr(torch.randn(8, 8, generator=torch.Generator().manual_seed(0))).Q
    right = torch.linalg.qr(torch.randn(32, 8, generator=torch.Generator().manual_seed(1))).Q
    module.fc.weight.grad = left @ torch.diag(torch.logspace(0, -2, 8)) @ right.T
    optimizers.step()
    assert module.fc.weight.grad is None
    moved = torch.linalg.svdvals(module.fc.weight.detach())
    size = 0.01 * 0.2 * 32**0.5
    assert moved.max() < 1.3 * size
    assert moved.min() > 0.3 * size
    assert optimizers.learning_rate == 0.01
