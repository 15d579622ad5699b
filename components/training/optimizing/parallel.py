"""Where a drafter's trainable weights live while it trains: whole in every process (DDP), or a
shard in each (FSDP2).

Either way a loop trains through `objective`, and the drafter that its caller holds is whole: it
validates, is saved and exported. With shards it is brought up to date by `gather`, on the main
process.
"""

from __future__ import annotations

import copy
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

import torch
from accelerate import Accelerator
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from components.drafter.build import load_trainable, trainable_state
from components.drafter.protocol import Drafter
from components.settings import TrainingSettings
from components.training.objectives.build import build_objective
from components.training.optimizing.optimizers import Optimizers, build_optimizers

_PREFIX = "drafter."
_WHOLE = StateDictOptions(full_state_dict=True, cpu_offload=True, ignore_frozen_params=True)
_FROM_WHOLE = StateDictOptions(full_state_dict=True, strict=False)


class Trainee(Protocol):
    """What a loop trains, and its optimizers. The methods are called by all processes together."""

    objective: Any
    optimizers: Optimizers

    def validator(self) -> Any:
        """The objective over the caller's drafter, for passes without gradients on the main process
        alone.
        """

    def gather(self) -> None:
        """Bring the main process's drafter up to date."""

    def load(self, weights: dict[str, torch.Tensor], *, source: str) -> None:
        """Train on from `weights`, the same in every process.

        Raises:
            ConfigError: they are of another drafter.
        """

    def optimizer_states(self) -> list[dict[str, Any]]:
        """For a state on disk; whole on the main process."""

    def load_optimizer_states(self, states: list[dict[str, Any]]) -> None:
        """The reverse of `optimizer_states`."""

    def accumulate(self) -> AbstractContextManager[None]:
        """A backward pass inside leaves the average over processes to a later one."""

    def clip(self, max_norm: float) -> torch.Tensor:
        """Clip the gradients and return their norm over all processes."""


def prepare(drafter: Drafter, settings: TrainingSettings, accelerator: Accelerator) -> Trainee:
    """Put `drafter` to training by `settings.parallel`; a single process has nothing to shard."""
    drafter.to(accelerator.device)
    is_sharded = settings.parallel == "fsdp2" and accelerator.num_processes > 1
    return (
        Sharded(drafter, settings, accelerator)
        if is_sharded
        else Replicated(drafter, settings, accelerator)
    )


class Replicated:
    """Every process holds all weights and optimizer states; DDP averages gradients."""

    def __init__(
        self, drafter: Drafter, settings: TrainingSettings, accelerator: Accelerator
    ) -> None:
        self._drafter = drafter
        self._accelerator = accelerator
        self.objective, *optimizers = accelerator.prepare(
            build_objective(drafter, settings), *build_optimizers(drafter, settings)
        )
        self.optimizers = Optimizers(optimizers)

    def validator(self) -> Any:
        return self._accelerator.unwrap_model(self.objective)

    def gather(self) -> None:
        """The drafter is the one that trains."""

    def load(self, weights: dict[str, torch.Tensor], *, source: str) -> None:
        load_trainable(self._drafter, weights, source=source)

    def optimizer_states(self) -> list[dict[str, Any]]:
        return self.optimizers.state_dict()

    def load_optimizer_states(self, states: list[dict[str, Any]]) -> None:
        self.optimizers.load_state_dict(states)

    def accumulate(self) -> AbstractContextManager[None]:
        context: AbstractContextManager[None] = self._accelerator.no_sync(self.objective)
        return context

    def clip(self, max_norm: float) -> torch.Tensor:
        norm: torch.Tensor = self._accelerator.clip_grad_norm_(
            self.objective.parameters(), max_norm
        )
        return norm


class Sharded:
    """Each process holds a share of the trainable weights, their gradients and optimizer states
    (FSDP2).

    It is `fully_shard`, which accelerate's FSDP2 plug-in calls too. Accelerate would shard layer by
    layer and only on accelerators; the objective runs parts of layers, past the hooks on the layers
    themselves, so the whole objective is one group: weights come together for a step and part after
    it. Frozen weights are whole in every process.
    """

    def __init__(
        self, drafter: Drafter, settings: TrainingSettings, accelerator: Accelerator
    ) -> None:
        self._drafter = drafter
        self._is_main = accelerator.is_main_process
        self._validator = build_objective(drafter, settings)
        frozen = [value for value in drafter.parameters() if not value.requires_grad]
        buffers = list(drafter.buffers())
        shards = copy.deepcopy(drafter, {id(value): value for value in [*frozen, *buffers]})
        self.objective: Any = build_objective(shards, settings)
        mesh = init_device_mesh(accelerator.device.type, (accelerator.num_processes,))
        fully_shard(self.objective, mesh=mesh, ignored_params=set(frozen))
        self.optimizers = Optimizers(build_optimizers(shards, settings))

    def validator(self) -> Any:
        return self._validator

    def gather(self) -> None:
        state = get_model_state_dict(self.objective, options=_WHOLE)
        if self._is_main:
            weights = {
                name.removeprefix(_PREFIX): value
                for name, value in state.items()
                if name.startswith(_PREFIX)
            }
            load_trainable(self._drafter, weights, source="the shards")

    def load(self, weights: dict[str, torch.Tensor], *, source: str) -> None:
        load_trainable(self._drafter, weights, source=source)
        whole = {_PREFIX + name: value for name, value in trainable_state(self._drafter).items()}
        set_model_state_dict(self.objective, whole, options=_FROM_WHOLE)

    def optimizer_states(self) -> list[dict[str, Any]]:
        return [
            get_optimizer_state_dict(self.objective, optimizer, options=_WHOLE)
            for optimizer in self.optimizers.each
        ]

    def load_optimizer_states(self, states: list[dict[str, Any]]) -> None:
        for optimizer, state in zip(self.optimizers.each, states, strict=True):
            set_optimizer_state_dict(self.objective, optimizer, state, options=_FROM_WHOLE)

    @contextmanager
    def accumulate(self) -> Any:
        self.objective.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            self.objective.set_requires_gradient_sync(True)

    def clip(self, max_norm: float) -> torch.Tensor:
        norm = nn.utils.clip_grad_norm_(self.objective.parameters(), max_norm)
        return norm.full_tensor() if isinstance(norm, DTensor) else norm
