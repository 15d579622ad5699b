"""MLflow: runs, releases, aliases."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

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
from components.stages.run import Run

CHAMPION, CHALLENGER = "champion", "challenger"


def registry_of(run: Run) -> Registry:
    """A client of the run's MLflow server."""
    return Registry(run.endpoints.mlflow_url)


def find_champion(run: Run) -> Release | None:
    """The release in service, with its checkpoint on this machine, or None before the first one."""
    registry = registry_of(run)
    release = champion(registry, run.model_name)
    if release is None:
        return None
    local = download_checkpoint(
        registry, release, run.state_dir / "releases" / release.checkpoint.digest[:16]
    )
    return release.model_copy(update={"checkpoint": local})


def find_release(run: Run, version: int | None, champion: Release | None) -> Release:
    """A version, or the alias challenger, whose evidence bears it; its checkpoint is brought to
    this machine.

    Raises:
        RegistryError: there is none, or its report does not bear it under the recipe.
    """
    registry = registry_of(run)
    alias = CHALLENGER if version is None else None
    release = get_release(registry, run.model_name, alias=alias, version=version)
    if release is None:
        raise RegistryError(
            f"model {run.model_name} has nothing to roll out",
            got=f"no version {version}" if version else f"no alias {CHALLENGER}",
            fix=f"Run gate-drafter/{run.recipe.name}: a drafter that passes becomes the "
            "challenger.",
        )

    local = download_checkpoint(
        registry, release, run.state_dir / "releases" / release.checkpoint.digest[:16]
    )
    found = release.model_copy(update={"checkpoint": local})
    _check(run, registry, found, champion)

    return found


def _check(run: Run, registry: Registry, release: Release, champion: Release | None) -> None:
    serving = (
        champion.checkpoint
        if champion is not None and champion.version != release.version
        else None
    )
    check_evidence(registry, release, recipe=run.recipe_source, champion=serving)


def start_mlflow_run(run: Run, target: TargetRef, dataset: DatasetRef) -> str:
    """One MLflow run per training, with the resolved recipe and the lineage as parameters and
    tags.
    """
    return _open_run(run, registry_of(run), target, dataset)


@contextmanager
def finish_mlflow_run(run: Run, run_id: str) -> Iterator[None]:
    """Close the MLflow run when the block ends: FINISHED, or FAILED when it ends by an
    exception.
    """
    registry = registry_of(run)
    try:
        yield
    except BaseException:
        registry.finish_run(run_id, failed=True)
        raise
    registry.finish_run(run_id)
    run.mlflow_run_ids.append(run_id)


def mlflow_run_of(run: Run, target: TargetRef) -> str:
    """The run of the training that this process did; a gate alone or a re-bind opens one of its
    own.
    """
    if run.mlflow_run_ids:
        return run.mlflow_run_ids[-1]
    registry = registry_of(run)
    run_id = _open_run(run, registry, target, None)
    registry.finish_run(run_id)
    run.mlflow_run_ids.append(run_id)
    return run_id


def register_if_passed(
    run: Run,
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
    registry = registry_of(run)
    # Plots and the page.
    shown = sorted((run.run_dir / "plots").iterdir())
    with run.stage("register"):
        if decision.verdict is not Verdict.PASS:
            for path in (
                run.run_dir / "acceptance_report.json",
                run.run_dir / "gate_decision.json",
                *shown,
            ):
                registry.log_artifact(mlflow_run_id, path, folder="gate")
            run.reporter.warning("the gate said %s: nothing is registered", decision.verdict)
            return None
        prompts = prompts_of(run.recipe)
        asked = Asked(run.recipe, run.size, prompts, champion_to_beat(checkpoint, champion))
        check_decision(decision, report, asked=asked, signing_key=signing_key())
        release = register_release(
            registry,
            model_name=run.model_name,
            checkpoint=checkpoint,
            target=target,
            gate=decision,
            report=report,
            run_id=mlflow_run_id,
            extra_artifacts=(*shown, run.run_dir / PLAIN_ANSWERS),
        )

    run.reporter.info("registered %s version %d as challenger", release.model_name, release.version)
    return release


def conclude_canary(
    run: Run, release: Release, champion: Release | None, canary: CanaryReport
) -> None:
    """Promote to champion, or take the alias challenger away; either way the log keeps why.

    Raises:
        RegistryError: the release's report no longer bears it.
    """
    registry = registry_of(run)
    if canary.promoted:
        _check(run, registry, release, champion)
        set_alias(registry, release, CHAMPION, reason=canary.reason, decision_digest=canary.digest)
    remove_alias(
        registry,
        release.model_name,
        CHALLENGER,
        reason=canary.reason,
        decision_digest=canary.digest,
    )


def _open_run(run: Run, registry: Registry, target: TargetRef, dataset: DatasetRef | None) -> str:
    run_id = registry.start_run(
        run.model_name,
        name=run.run_dir.name,
        params=_flatten(run.recipe.model_dump(mode="json")),
        tags={
            "target.fingerprint": target.fingerprint.digest,
            "target.quantization": target.quantization,
            "dataset.digest": dataset.digest if dataset else "none",
            "recipe": run.recipe.name,
            "size": run.size or "default",
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
