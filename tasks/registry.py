"""MLflow: runs, releases, aliases."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from prefect import task
from prefect.cache_policies import NO_CACHE
from prefect.logging import get_run_logger

from components.contracts import (
    AcceptanceReport,
    CanaryReport,
    CheckpointRef,
    DatasetRef,
    GateDecision,
    Release,
    TargetRef,
    Verdict,
)
from components.errors import RegistryError
from components.evaluation.rules.asked import Asked
from components.evaluation.rules.decide import check_decision
from components.registry.client import Registry
from components.registry.releases import (
    champion,
    download_checkpoint,
    get_release,
    register_release,
    remove_alias,
    set_alias,
)
from components.settings.signing import signing_key
from components.stages.gate.conduct import PLAIN_ANSWERS
from components.stages.gate.evidence import check_evidence
from components.stages.gate.same_weights import champion_to_beat
from components.stages.prompts import prompts_of
from tasks.loop import Loop
from tasks.retry import is_transient

CHAMPION, CHALLENGER = "champion", "challenger"


def registry_of(loop: Loop) -> Registry:
    """A client of the run's MLflow server."""
    return Registry(loop.endpoints.mlflow_url)


# MLflow restarts take seconds; every registry task is idempotent, so it is tried again.
@task(
    name="find champion",
    cache_policy=NO_CACHE,
    retries=3,
    retry_delay_seconds=5,
    retry_condition_fn=is_transient,
)
def find_champion(loop: Loop) -> Release | None:
    """The release in service, with its checkpoint on this machine, or None before the first one."""
    registry = registry_of(loop)
    release = champion(registry, loop.model_name)
    if release is None:
        return None
    local = download_checkpoint(
        registry, release, loop.state_dir / "releases" / release.checkpoint.digest[:16]
    )
    return release.model_copy(update={"checkpoint": local})


@task(name="find challenger", cache_policy=NO_CACHE, retries=0)
def find_release(loop: Loop, version: int | None, champion: Release | None) -> Release:
    """A version, or the alias challenger, whose evidence bears it; its checkpoint is brought to
    this machine.

    Raises:
        RegistryError: there is none, or its report does not bear it under the recipe.
    """
    registry = registry_of(loop)
    alias = CHALLENGER if version is None else None
    release = get_release(registry, loop.model_name, alias=alias, version=version)
    if release is None:
        raise RegistryError(
            f"model {loop.model_name} has nothing to roll out",
            got=f"no version {version}" if version else f"no alias {CHALLENGER}",
            fix=f"Run gate-drafter/{loop.recipe.name}: a drafter that passes becomes the "
            "challenger.",
        )
    local = download_checkpoint(
        registry, release, loop.state_dir / "releases" / release.checkpoint.digest[:16]
    )
    found = release.model_copy(update={"checkpoint": local})
    _check(loop, registry, found, champion)
    return found


def _check(loop: Loop, registry: Registry, release: Release, champion: Release | None) -> None:
    serving = (
        champion.checkpoint
        if champion is not None and champion.version != release.version
        else None
    )
    check_evidence(registry, release, recipe=loop.recipe_source, champion=serving)


@task(
    name="start MLflow run",
    cache_policy=NO_CACHE,
    retries=3,
    retry_delay_seconds=5,
    retry_condition_fn=is_transient,
)
def start_mlflow_run(loop: Loop, target: TargetRef, dataset: DatasetRef) -> str:
    """One MLflow run per training, with the resolved recipe and the lineage as parameters and
    tags.
    """
    return _open_run(loop, registry_of(loop), target, dataset)


@contextmanager
def finish_mlflow_run(loop: Loop, run_id: str) -> Iterator[None]:
    """Close the MLflow run when the block ends: FINISHED, or FAILED when it ends by an
    exception.
    """
    registry = registry_of(loop)
    try:
        yield
    except BaseException:
        registry.finish_run(run_id, failed=True)
        raise
    registry.finish_run(run_id)
    loop.mlflow_run_ids.append(run_id)


@task(
    name="find MLflow run",
    cache_policy=NO_CACHE,
    retries=3,
    retry_delay_seconds=5,
    retry_condition_fn=is_transient,
)
def mlflow_run_of(loop: Loop, target: TargetRef) -> str:
    """The run of the training that this process did; a gate alone or a re-bind opens one of its
    own.
    """
    if loop.mlflow_run_ids:
        return loop.mlflow_run_ids[-1]
    registry = registry_of(loop)
    run_id = _open_run(loop, registry, target, None)
    registry.finish_run(run_id)
    loop.mlflow_run_ids.append(run_id)
    return run_id


@task(
    name="register challenger",
    cache_policy=NO_CACHE,
    retries=3,
    retry_delay_seconds=5,
    retry_condition_fn=is_transient,
)
def register_if_passed(
    loop: Loop,
    target: TargetRef,
    checkpoint: CheckpointRef,
    *,
    champion: CheckpointRef | None,
    report: AcceptanceReport,
    decision: GateDecision,
    mlflow_run_id: str,
) -> Release | None:
    """Log report, decision and plots; a drafter that passed becomes a version with alias
    challenger.

    Raises:
        ConfigError: the report, decided again under the recipe, does not give this decision.
    """
    registry, shown = (
        registry_of(loop),
        sorted((loop.run_dir / "plots").iterdir()),
    )  # plots and the page
    with loop.stage("register"):
        if decision.verdict is not Verdict.PASS:
            for path in (
                loop.run_dir / "acceptance_report.json",
                loop.run_dir / "gate_decision.json",
                *shown,
            ):
                registry.log_artifact(mlflow_run_id, path, folder="gate")
            get_run_logger().warning("the gate said %s: nothing is registered", decision.verdict)
            return None
        prompts = prompts_of(loop.recipe)
        asked = Asked(loop.recipe, loop.budget, prompts, champion_to_beat(checkpoint, champion))
        check_decision(decision, report, asked=asked, signing_key=signing_key())
        release = register_release(
            registry,
            model_name=loop.model_name,
            checkpoint=checkpoint,
            target=target,
            gate=decision,
            report=report,
            run_id=mlflow_run_id,
            extra_artifacts=(*shown, loop.run_dir / PLAIN_ANSWERS),
        )
    get_run_logger().info(
        "registered %s version %d as challenger", release.model_name, release.version
    )
    return release


@task(
    name="conclude canary",
    cache_policy=NO_CACHE,
    retries=3,
    retry_delay_seconds=5,
    retry_condition_fn=is_transient,
)
def conclude_canary(
    loop: Loop, release: Release, champion: Release | None, canary: CanaryReport
) -> None:
    """Promote to champion, or take the alias challenger away; either way the log keeps why.

    Raises:
        RegistryError: the release's report no longer bears it.
    """
    registry = registry_of(loop)
    if canary.promoted:
        _check(loop, registry, release, champion)
        set_alias(registry, release, CHAMPION, reason=canary.reason, decision_digest=canary.digest)
    remove_alias(
        registry,
        release.model_name,
        CHALLENGER,
        reason=canary.reason,
        decision_digest=canary.digest,
    )


def _open_run(loop: Loop, registry: Registry, target: TargetRef, dataset: DatasetRef | None) -> str:
    run_id = registry.start_run(
        loop.model_name,
        name=loop.run_dir.name,
        params=_flatten(loop.recipe.model_dump(mode="json")),
        tags={
            "target.fingerprint": target.fingerprint.digest,
            "target.quantization": target.quantization,
            "dataset.digest": dataset.digest if dataset else "none",
            "recipe": loop.recipe.name,
            "budget": loop.budget or "default",
        },
    )
    if dataset is not None:
        registry.log_dataset(run_id, dataset)
    return run_id


def _flatten(value: dict[str, object], prefix: str = "") -> dict[str, object]:
    flat: dict[str, object] = {}
    for key, item in value.items():
        if isinstance(item, dict):
            flat |= _flatten(item, f"{prefix}{key}.")
        else:
            flat[prefix + key] = item
    return flat
