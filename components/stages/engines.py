"""vLLM engines of one run by what they serve, started when first asked for and shared until the run
ends.
"""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from components.contracts import CheckpointRef, Release, Rival, Schedule, TargetRef
from components.hidden_states.launch import extraction_args
from components.services.endpoints import Endpoints
from components.serving.engines.command import DraftSampleMethod, EngineSpec, resolve_device
from components.serving.engines.engine import Engine
from components.serving.engines.pool import EnginePool
from components.settings import Recipe


class EngineHost(Protocol):
    """Who starts engines: a flow run, or a command line of its own."""

    @property
    def recipe(self) -> Recipe:
        """How engines are started, and what is measured on them."""

    @property
    def engines(self) -> EnginePool:
        """The engines of this run."""


class StreamHost(EngineHost, Protocol):
    """A host whose engines may also put hidden states into the store."""

    @property
    def endpoints(self) -> Endpoints:
        """Where the store is."""

    @property
    def segment_mib(self) -> int:
        """Store memory that an extraction engine contributes, MiB."""


def plain_key(target: TargetRef) -> str:
    """Key of the engine that serves the target with no drafter."""
    return f"plain/{target.fingerprint.digest}"


def plain_engine(host: EngineHost, target: TargetRef) -> Engine:
    """Start (or find) the engine that serves the target with no drafter."""

    def make_spec(port: int) -> EngineSpec:
        return _spec(host, target, name="plain", port=port)

    return host.engines.start(plain_key(target), make_spec, fingerprint=target.fingerprint)


def drafting_engine(
    host: EngineHost,
    target: TargetRef,
    checkpoint: CheckpointRef,
    *,
    name: str,
    allow_unbound: bool = False,
) -> Engine:
    """Start (or find) the engine that serves the target with the drafter of `checkpoint`."""

    def make_spec(port: int) -> EngineSpec:
        # Sampled requests need drafts from the distributions; those at temperature 0 are drafted by
        # argmax either way.
        is_sampled = max(host.recipe.evaluation.temperatures) > 0
        sample_method: DraftSampleMethod = "probabilistic" if is_sampled else "greedy"
        return _spec(
            host,
            target,
            name=name,
            port=port,
            checkpoint=checkpoint,
            draft_sample_method=sample_method,
        )

    key = _drafting_key(target, checkpoint)
    return host.engines.start(
        key, make_spec, fingerprint=target.fingerprint, allow_unbound=allow_unbound
    )


def released_key(release: Release) -> str:
    """Key of the engine that serves a release as production does."""
    drafting = _drafting_key(release.target, release.checkpoint)
    return f"released/{drafting}/{release.speculative_schedule}"


def released_engine(host: EngineHost, release: Release) -> Engine:
    """Start (or find) the engine that serves a release the way it will be in production.

    With its speculative schedule, and drafting from the distributions, since clients choose the
    temperature: greedy drafts would be rejected for no reason above 0, and requests at 0 are
    drafted by argmax either way.
    """

    def make_spec(port: int) -> EngineSpec:
        return _spec(
            host,
            release.target,
            name=f"v{release.version}",
            port=port,
            checkpoint=release.checkpoint,
            schedule=release.speculative_schedule,
            draft_sample_method="probabilistic",
        )

    return host.engines.start(
        released_key(release), make_spec, fingerprint=release.target.fingerprint
    )


def scheduled_engine(
    host: EngineHost,
    target: TargetRef,
    checkpoint: CheckpointRef,
    schedule: Schedule,
) -> Engine:
    """Start the engine that serves the drafter with a schedule, as a release of it would be."""

    def make_spec(port: int) -> EngineSpec:
        return _spec(
            host,
            target,
            name="scheduled",
            port=port,
            checkpoint=checkpoint,
            schedule=schedule,
            draft_sample_method="probabilistic",
        )

    return host.engines.start(
        _scheduled_key(target, checkpoint, schedule), make_spec, fingerprint=target.fingerprint
    )


def stop_scheduled_engine(
    host: EngineHost,
    target: TargetRef,
    checkpoint: CheckpointRef,
    schedule: Schedule,
) -> None:
    """Stop the engine `scheduled_engine` started."""
    host.engines.stop(_scheduled_key(target, checkpoint, schedule))


def stop_drafting_engine(host: EngineHost, target: TargetRef, checkpoint: CheckpointRef) -> None:
    """Stop the engine `drafting_engine` started for this pair."""
    host.engines.stop(_drafting_key(target, checkpoint))


def rival_engine(host: EngineHost, target: TargetRef, rival: Rival) -> Engine:
    """Start the engine that drafts without a drafter."""

    def make_spec(port: int) -> EngineSpec:
        return _spec(host, target, name=rival.method, port=port, rival=rival)

    return host.engines.start(_rival_key(target, rival), make_spec, fingerprint=target.fingerprint)


def stop_rival_engine(host: EngineHost, target: TargetRef, rival: Rival) -> None:
    """Stop the engine `rival_engine` started."""
    host.engines.stop(_rival_key(target, rival))


def extraction_key(target: TargetRef, stream_run_id: str) -> str:
    """Key of the extraction engine of one training run."""
    return f"extract/{target.fingerprint.digest}/{stream_run_id}"


def extraction_engine(
    host: StreamHost, target: TargetRef, *, stream_run_id: str, num_hidden_layers: int
) -> Engine:
    """Start the engine that puts hidden states into the store under `stream_run_id`."""
    args, environment = extraction_args(
        settings=host.recipe.stream,
        num_hidden_layers=num_hidden_layers,
        store=host.endpoints.store,
        run_id=stream_run_id,
        fingerprint=target.fingerprint,
        segment_mib=host.segment_mib,
    )

    def make_spec(port: int) -> EngineSpec:
        return _spec(
            host, target, name="extract", port=port, extra_args=tuple(args), extra_env=environment
        )

    return host.engines.start(
        extraction_key(target, stream_run_id), make_spec, fingerprint=target.fingerprint
    )


def _rival_key(target: TargetRef, rival: Rival) -> str:
    return (
        f"rival/{target.fingerprint.digest}/{rival.method}/{rival.num_draft_tokens}/{rival.lookup}"
    )


def _scheduled_key(target: TargetRef, checkpoint: CheckpointRef, schedule: Schedule) -> str:
    return f"scheduled/{_drafting_key(target, checkpoint)}/{schedule}"


def _drafting_key(target: TargetRef, checkpoint: CheckpointRef) -> str:
    return f"draft/{target.fingerprint.digest}/{checkpoint.digest}/{checkpoint.num_draft_tokens}"


def _spec(
    host: EngineHost,
    target: TargetRef,
    *,
    name: str,
    port: int,
    checkpoint: CheckpointRef | None = None,
    rival: Rival | None = None,
    schedule: Schedule = (),
    draft_sample_method: DraftSampleMethod = "greedy",
    extra_args: tuple[str, ...] = (),
    extra_env: dict[str, str] | None = None,
) -> EngineSpec:
    return EngineSpec(
        name=f"{name}-{port}",
        model_path=str(Path(target.path)),
        served_model_name=target.name,
        settings=host.recipe.engine,
        port=port,
        device=resolve_device(host.recipe.engine),
        checkpoint=checkpoint,
        rival=rival,
        schedule=schedule,
        draft_sample_method=draft_sample_method,
        extra_args=extra_args,
        extra_env=extra_env or {},
    )
