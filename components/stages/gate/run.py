"""What a gate is about, and what it needs of the run it belongs to."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeVar

from components.contracts import ArmEndpoint, CheckpointRef, Progress, TargetRef
from components.evaluation.acceptance import Measured
from components.evaluation.prompts import Prompt
from components.serving.engines.pool import EnginePool
from components.settings import EvaluationSettings, Recipe
from components.stages.gate.measuring import measure_surviving
from components.stages.stage_clock import StageClock

ResultT = TypeVar("ResultT")


class Step(Protocol):
    """Runs one named step of a gate: at once, or as a task of a workflow engine."""

    def __call__(self, name: str, work: Callable[[], ResultT], /) -> ResultT:
        """Do `work` and return what it returns."""


def at_once(_name: str, work: Callable[[], ResultT], /) -> ResultT:
    """The step of a command line: nothing around it."""
    return work()


@dataclass(frozen=True)
class GateRun:
    """The run that a gate is part of.

    Attributes:
        recipe: what is measured, and how engines are started.
        size: overlay of the recipe.
        prompts: of all slices.
        engines: pool that starts and stops the arms.
        cache_dir: folder of what outlives this run: the table of request kinds of each engine
            version.
        out_dir: folder of journals, report, decision, plots and page.
        stage: times a stage of this name.
        progress_of: makes the progress of a named piece of work.
        tell: prints a line.
    """

    recipe: Recipe
    size: str | None
    prompts: Sequence[Prompt]
    engines: EnginePool
    cache_dir: Path
    out_dir: Path
    stage: Callable[[str], AbstractContextManager[StageClock]]
    progress_of: Callable[[str], Progress]
    tell: Callable[[str], None]

    def measure(
        self,
        endpoint: ArmEndpoint,
        *,
        prompts: Sequence[Prompt] | None = None,
        settings: EvaluationSettings | None = None,
        with_logprobs: bool = False,
        name: str | None = None,
    ) -> Measured:
        """Acceptance of one arm; by default over all prompts by the recipe's settings. See
        `measure_surviving`.
        """
        with self.stage(f"measure {endpoint.arm}") as clock:
            measured = measure_surviving(
                endpoint,
                self.prompts if prompts is None else prompts,
                settings=settings or self.recipe.evaluation,
                engines=self.engines,
                journals=self.out_dir / "measurements",
                request_timeout_s=self.recipe.engine.request_timeout_s,
                with_logprobs=with_logprobs,
                name=name,
                progress=self.progress_of("acceptance" if name is None else name),
            )
            clock.num_tokens = sum(p.num_output_tokens for p in measured.prompts)

        return measured


@dataclass(frozen=True)
class Contest:
    """Who is measured.

    Attributes:
        target: that all arms serve.
        candidate: the drafter to decide on.
        champion: the one in service, on the same prompts; it may be bound to the target's last
            version.
        untrained: what training is compared with, on a few prompts.
        look: how often the candidate was measured for a decision on this target, this included.
    """

    target: TargetRef
    candidate: CheckpointRef
    champion: CheckpointRef | None = None
    untrained: CheckpointRef | None = None
    look: int = 1

    @property
    def rival_champion(self) -> CheckpointRef | None:
        """The champion, unless it is the candidate: a drafter is no better or worse than itself."""
        is_other = self.champion is not None and self.champion.digest != self.candidate.digest
        return self.champion if is_other else None
