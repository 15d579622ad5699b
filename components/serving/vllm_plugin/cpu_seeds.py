"""Repair of vLLM 0.32's per-request seeds on CPU, without which a request with `seed` can end the
engine.

A prompt that is computed in several steps is sampled from in each of them, and all but the last
sample are thrown away. For a request with a seed the runner then takes the draw back, so that a
seed gives the same answer however the prompt was cut: `gen.set_offset(gen.get_offset() - 4)`. Only
generators on a GPU have an offset; on CPU the call raises and takes the engine with it.

Here a request's generator keeps its state from before each draw, and goes back to it when it is
told to.

Imported only inside vLLM on CPU, by `dspark_cpu.register`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch

FORWARD_PARAMETERS = ("self", "logits", "generators", "k", "p")
"""Parameters of vLLM's `TopKTopPSampler.forward_cpu`, which draws for all requests of a step."""


class RewindableGenerator(torch.Generator):
    """A CPU generator whose latest draw can be taken back."""

    _before: torch.Tensor | None = None

    @classmethod
    def of(cls, generator: torch.Generator) -> RewindableGenerator:
        """One in the state of `generator`."""
        if isinstance(generator, cls):
            return generator
        rewindable = cls(device=generator.device)
        rewindable.set_state(generator.get_state())
        return rewindable

    def remember(self) -> None:
        """The state of now is the one to go back to."""
        self._before = self.get_state()

    def get_offset(self) -> int:
        """Always 0: a CPU generator has none. Asked for only to be lowered; see `set_offset`."""
        return 0

    def set_offset(self, offset: int) -> None:
        """Take the latest draw back, if there was one; the runner lowers an offset for nothing
        else.

        Raises:
            ValueError: the offset is not lowered.
        """
        if offset >= 0:
            raise ValueError(f"a CPU generator's draws can only be taken back, got {offset}")
        if self._before is not None:
            self.set_state(self._before)


def with_rewindable_generator(post_init: Callable[[Any], None]) -> Callable[[Any], None]:
    """Wrap `CachedRequestState.__post_init__` so that a request's generator can be rewound."""

    @functools.wraps(post_init)
    def rewindable(request: Any) -> None:
        post_init(request)
        if request.generator is not None and request.generator.device.type == "cpu":
            request.generator = RewindableGenerator.of(request.generator)

    return rewindable


def remembering(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `TopKTopPSampler.forward_cpu` so that generators remember what they were before it."""

    @functools.wraps(forward)
    def sample(
        self: Any,
        logits: torch.Tensor,
        generators: Mapping[int, torch.Generator],
        *arguments: Any,
        **options: Any,
    ) -> Any:
        for generator in generators.values():
            if isinstance(generator, RewindableGenerator):
                generator.remember()
        return forward(self, logits, generators, *arguments, **options)

    return sample
