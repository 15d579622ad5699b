"""What every stage of one run shares: the recipe, the endpoints, the folders, the engines, the
clock and whoever tells people.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import TypeVar

from components.contracts import PacePlan, Reference, StageTiming, now_utc
from components.errors import ConfigError, ServiceError
from components.pace.plan import with_amounts
from components.reporting.memory import MemorySampler
from components.services.endpoints import Endpoints, load_endpoints, load_settings, service_pids
from components.serving.engines.pool import EnginePool
from components.settings import Recipe, load_recipe
from components.stages.reporter import Reporter
from components.stages.stage_clock import StageClock

RecordT = TypeVar("RecordT", bound=Reference)


@dataclass(frozen=True)
class Run:
    """One run of the loop, or of a part of it, on one recipe."""

    recipe_source: str
    """Name or path that the recipe was loaded by."""
    full_recipe: Recipe
    """As it was loaded; `recipe` is what is done of it."""
    size: str | None
    endpoints: Endpoints
    engines: EnginePool
    memory: MemorySampler
    run_dir: Path
    started_at: datetime
    segment_mib: int
    reporter: Reporter
    timings: list[StageTiming] = field(default_factory=list)
    mlflow_run_ids: list[str] = field(default_factory=list)
    begun_at: datetime | None = None
    """When the command began that this run is part of, its set-up included; None: with the run."""
    plans: list[PacePlan] = field(default_factory=list)
    """What the run chose by the machine's pace: at most one; empty before, and where the recipe has
    no pace.
    """
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def recipe(self) -> Recipe:
        """The recipe with the amounts that this run chose, or its own."""
        return (
            with_amounts(self.full_recipe, self.plans[0].chosen) if self.plans else self.full_recipe
        )

    @property
    def plan(self) -> PacePlan | None:
        """What the run chose by the machine's pace, if it did."""
        return self.plans[0] if self.plans else None

    @property
    def left_s(self) -> float:
        """Seconds until the report should be there; infinite where the recipe has no pace."""
        if self.full_recipe.pace is None:
            return float("inf")
        taken_s = (now_utc() - (self.begun_at or self.started_at)).total_seconds()
        return self.full_recipe.pace.ends_within_s - taken_s

    @property
    def state_dir(self) -> Path:
        """Folder that outlives runs: caches, datasets, checkpoints, databases."""
        return Path(self.endpoints.state_dir)

    @property
    def model_name(self) -> str:
        """Registered model's name in MLflow."""
        return f"{self.recipe.target.name}-drafter"

    @property
    def supervisor_pid(self) -> int:
        """Process that owns what must outlive this run.

        Raises:
            ServiceError: something else than `make up` supervises the services.
        """
        pids = service_pids()
        if not pids:
            raise ServiceError(
                "no supervisor to hand the engine to", fix="Start the services with make up."
            )
        return pids[0]

    @property
    def urls(self) -> dict[str, str]:
        """Addresses a person opens or talks to."""
        return {
            "Prefect": self.endpoints.prefect_api_url.removesuffix("/api"),
            "MLflow": self.endpoints.mlflow_url,
            "chat completions": f"{self.endpoints.haproxy_url}/v1/chat/completions",
        }

    @contextmanager
    def stage(self, name: str) -> Iterator[StageClock]:
        """Time a stage's work; what lies outside every stage is orchestration."""
        clock, started = StageClock(), now_utc()
        try:
            yield clock
        finally:
            duration_s = (now_utc() - started).total_seconds()
            with self._lock:
                self.timings.append(
                    StageTiming(
                        stage=name,
                        started_at=started,
                        duration_s=duration_s,
                        num_tokens=clock.num_tokens,
                    )
                )

    def remember(self, what: str, record: Reference) -> None:
        """Keep `record` as the latest of its kind for this target, so that a flow run alone finds
        it.
        """
        record.write(self._latest_path(what))

    def recall(self, what: str, kind: type[RecordT]) -> RecordT:
        """The latest remembered record of its kind.

        Raises:
            ConfigError: there is none yet; says which deployment makes one.
        """
        path = self._latest_path(what)
        if not path.is_file():
            makers = {
                "dataset": "curate-data",
                "training": "train-drafter",
                "report": "gate-drafter",
            }
            raise ConfigError(
                f"no {what} of target '{self.recipe.target.name}' yet",
                expected=path,
                fix="Run the deployment "
                f"{makers.get(what, 'drafter-lifecycle')}/{self.recipe.name} first.",
            )

        return kind.read(path)

    def _latest_path(self, what: str) -> Path:
        return self.state_dir / "latest" / self.recipe.target.name / f"{what}.json"


_open_run: Run | None = None


@contextmanager
def open_run(
    recipe: str,
    *,
    size: str | None,
    name: str,
    started_at: datetime,
    reporter: Reporter,
    begun_at: datetime | None = None,
) -> Iterator[Run]:
    """Open the run of this process, or join the one that is open: the flows of a lifecycle share
    engines and clock.

    Args:
        recipe, size: as `load_recipe`.
        name: of the run; its folder carries it.
        started_at: when it began.
        reporter: what it tells people by.
        begun_at: when the command began that the run is part of; None: with the run.

    Raises:
        ConfigError: the recipe or its size cannot be used.
        ServiceError: the services are not up.
    """
    global _open_run
    loaded = load_recipe(recipe, size=size)
    if _open_run is not None:
        if _open_run.full_recipe != loaded:
            raise ConfigError(
                "one process runs one recipe at a time",
                got=recipe,
                expected=_open_run.full_recipe.name,
            )
        yield _open_run
        return

    endpoints = load_endpoints()
    run_dir = Path(endpoints.state_dir) / "runs" / f"{started_at:%Y%m%d-%H%M%S}-{name}"
    run_dir.mkdir(parents=True, exist_ok=True)
    with (
        MemorySampler(lambda: {os.getpid(), *service_pids()}) as memory,
        EnginePool(logs_dir=run_dir / "logs", port_base=endpoints.engine_port_base) as engines,
    ):
        _open_run = Run(
            recipe_source=recipe,
            full_recipe=loaded,
            size=size,
            endpoints=endpoints,
            engines=engines,
            memory=memory,
            run_dir=run_dir,
            started_at=started_at,
            begun_at=begun_at,
            segment_mib=load_settings().mooncake_segment_mib,
            reporter=reporter,
        )
        try:
            yield _open_run
        finally:
            _open_run = None
