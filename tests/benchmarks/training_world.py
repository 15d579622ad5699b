"""What the training benchmark trains on: on-policy conversations of the demo target, their states
read once to disk.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from components.contracts import ArmEndpoint, CheckpointRef, DatasetRef, StoreEndpoint, TargetRef
from components.curation.answers.regenerate import regenerate
from components.curation.curate import collect, finish
from components.curation.sources.self_prompts import with_written_prompts
from components.evaluation.prompts import load_prompts
from components.hidden_states.launch import extraction_args
from components.hidden_states.stream import HiddenStateStream
from components.serving.engines.command import DraftSampleMethod, EngineSpec
from components.serving.engines.engine import Engine
from components.settings import Recipe, load_recipe
from components.system.ports import free_port
from components.targets.resolve import resolve_target
from components.training.data import load_split, requests
from components.training.job import TrainingJob, TrainingResult
from components.training.launch import run_trainer
from tests.support.stream_services import running_master

RUN = "bench-training"
CACHE_GIB = 16.0


@dataclass(frozen=True)
class World:
    """A target with its dataset, all of whose states are in `cache_dir`."""

    recipe: Recipe
    target: TargetRef
    dataset: DatasetRef
    folder: Path
    cache_dir: Path

    def train(
        self, name: str, *, drafter: dict[str, Any], training: dict[str, Any]
    ) -> TrainingResult:
        """The trainer process on the cached states: extraction costs it nothing."""
        offline = {"mode": "offline", "cache_dir": str(self.cache_dir), "cache_gib": CACHE_GIB}
        job = TrainingJob(
            drafter=self.recipe.drafter.model_copy(update=drafter),
            training=self.recipe.training.model_copy(update=training),
            stream=self.recipe.stream.model_copy(update=offline),
            target=self.target,
            dataset=self.dataset,
            engine_urls=(),
            model="t",
            store=StoreEndpoint(master_address="127.0.0.1:1", metrics_url="http://127.0.0.1:1"),
            stream_run_id=RUN,
            output_dir=str(self.folder / name),
        )
        return run_trainer(job, on_line=lambda line: tell(f"{name}: {line.what}"), timeout_s=3600)

    @contextmanager
    def served(
        self, checkpoint: CheckpointRef | None, *, draft_sample_method: DraftSampleMethod = "greedy"
    ) -> Iterator[ArmEndpoint]:
        """An engine of the target, with the drafter if there is one."""
        spec = EngineSpec(
            name="bench",
            model_path=self.target.path,
            served_model_name="t",
            settings=self.recipe.engine,
            port=free_port(),
            device="cpu",
            checkpoint=checkpoint,
            draft_sample_method=draft_sample_method,
        )
        log = self.folder / f"engine-{spec.port}.log"
        with Engine.start(
            spec, log_path=log, fingerprint=self.target.fingerprint
        ).wait_ready() as engine:
            yield engine.endpoint("candidate")


def make_world(folder: Path, *, num_conversations: int) -> World:
    """Curate as the demo does, then stream every state once into the cache."""
    recipe = load_recipe("demo")
    target = resolve_target(recipe.target, cache_dir=folder / "targets", engine=recipe.engine)
    dataset = _curate(recipe, target, folder, num_conversations=num_conversations)
    world = World(recipe, target, dataset, folder, folder / "cache")
    _fill_cache(world)
    return world


def _curate(
    recipe: Recipe, target: TargetRef, folder: Path, *, num_conversations: int
) -> DatasetRef:
    settings = recipe.curation.model_copy(update={"num_conversations": num_conversations})
    held_out = [m["content"] for prompt in load_prompts(recipe.evaluation) for m in prompt.messages]
    spec = EngineSpec(
        name="curate",
        model_path=target.path,
        served_model_name="t",
        settings=recipe.engine,
        port=free_port(),
        device="cpu",
    )
    with Engine.start(
        spec, log_path=folder / "curate.log", fingerprint=None
    ).wait_ready() as engine:
        settings = with_written_prompts(
            settings,
            engine_url=engine.url,
            model="t",
            target=target,
            folder=folder / "prompts",
            progress=_progress,
        )
        collected = collect(
            settings,
            target=target,
            held_out=held_out,
            spool_path=folder / "collected",
            progress=_progress,
        )
        answers = regenerate(
            collected.conversations,
            engine_url=engine.url,
            model="t",
            settings=settings,
            fingerprint=target.fingerprint,
            shard_dir=folder / "answers",
            spool_path=folder / "answered",
            progress=_progress,
        )
    finished = finish(
        collected,
        answers,
        settings=settings,
        target=target,
        held_out=held_out,
        max_model_len=recipe.engine.max_model_len,
        output_dir=folder / "datasets",
        progress=_progress,
    )
    return finished.dataset


def _fill_cache(world: World) -> None:
    settings = world.recipe.stream.model_copy(
        update={"mode": "hybrid", "cache_dir": str(world.cache_dir), "cache_gib": CACHE_GIB}
    )
    with running_master(world.folder) as master:
        args, environment = extraction_args(
            settings=settings, num_hidden_layers=30, store=master.endpoint, run_id=RUN,
            fingerprint=world.target.fingerprint, segment_mib=512,
        )  # fmt: skip
        spec = EngineSpec(
            name="extraction",
            model_path=world.target.path,
            served_model_name="t",
            settings=world.recipe.engine,
            port=free_port(),
            device="cpu",
            extra_args=tuple(args),
            extra_env=environment,
        )
        with (
            Engine.start(
                spec, log_path=world.folder / "extraction.log", fingerprint=None
            ).wait_ready() as engine,
            HiddenStateStream(
                settings, engine_urls=[engine.url], model="t", store=master.endpoint, run_id=RUN,
                fingerprint=world.target.fingerprint, num_hidden_layers=30, hidden_size=576,
                target_path=Path(world.target.path),
            ) as stream,
        ):  # fmt: skip
            for split in ("train", "validation"):
                rows = load_split(world.dataset, split)
                order = np.arange(rows.num_rows)
                for sample in stream.stream(requests(rows, order, indices=range(rows.num_rows))):
                    sample.release()
                tell(f"{split}: {rows.num_rows} conversations in the cache")


def _progress(what: str, num_done: int, num_total: int) -> None:
    tell(f"{what} {num_done}/{num_total}")


def tell(line: str) -> None:
    """A line of progress."""
    print(line, file=sys.stderr, flush=True)
