"""Releases: registered model versions of MLflow, each one drafter checkpoint that passed a gate on
one target.

Artifacts of a release, in the run that made it, under `release-<gate digest>/`: checkpoint/ (what
vLLM loads), gate_decision.json, acceptance_report.json, extra/ (plots), and last release.json,
which marks it complete.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

from mlflow.exceptions import MlflowException

from components.contracts import (
    AcceptanceReport,
    Arm,
    CheckpointRef,
    GateDecision,
    Promotion,
    Record,
    Release,
    TargetRef,
    Verdict,
    digest_checkpoint,
)
from components.errors import ConfigError, FingerprintMismatchError, RegistryError
from components.registry.client import MISSING_CODES, Registry
from components.registry.promotions import create_model, move_alias

CHAMPION = "champion"
CHALLENGER = "challenger"
_COMPLETE_TAG = "dspark.release"

RecordT = TypeVar("RecordT", bound=Record)


def register_release(
    registry: Registry,
    *,
    model_name: str,
    checkpoint: CheckpointRef,
    target: TargetRef,
    gate: GateDecision,
    report: AcceptanceReport,
    run_id: str,
    extra_artifacts: Sequence[Path] = (),
) -> Release:
    """Upload the checkpoint with its evidence into run `run_id`, register it as a version, and make
    it `challenger`.

    Registering the same checkpoint with the same gate decision again completes or returns the first
    version.

    Raises:
        RegistryError: the gate did not pass, judged another checkpoint, target or report; the
            checkpoint on disk is not the one that was judged; or MLflow refused.
        FingerprintMismatchError: the checkpoint is bound to another target.
    """
    check_releasable(checkpoint=checkpoint, target=target, gate=gate, report=report)
    folder = f"release-{gate.digest[:16]}"
    _upload_checkpoint(registry, run_id, checkpoint, folder=f"{folder}/checkpoint")
    registry.log_text(run_id, gate.model_dump_json(indent=2), name=f"{folder}/gate_decision.json")
    registry.log_text(
        run_id, report.model_dump_json(indent=2), name=f"{folder}/acceptance_report.json"
    )

    for path in extra_artifacts:
        registry.log_artifact(run_id, path, folder=f"{folder}/extra")
    create_model(registry, model_name)
    candidate = report.arms[Arm.CANDIDATE]
    tags = {
        **{
            f"fingerprint.{part}": digest
            for part, digest in target.fingerprint.model_dump().items()
        },
        "checkpoint_digest": checkpoint.digest,
        "gate_digest": gate.digest,
        "report_digest": report.digest,
        "acceptance_length": f"{candidate.acceptance_length:.4f}",
        "schedule": str([list(step) for step in gate.speculative_schedule]),
        "drafter_out_above": "never"
        if gate.drafter_out_above is None
        else str(gate.drafter_out_above),
        "algorithm": checkpoint.algorithm,
        "target": target.source,
        "quantization": target.quantization,
    }

    release = Release(
        model_name=model_name,
        version=_create_version(registry, model_name, run_id=run_id, folder=folder, tags=tags),
        checkpoint=checkpoint,
        target=target,
        gate_digest=gate.digest,
        run_id=run_id,
        speculative_schedule=gate.speculative_schedule,
        drafter_out_above=gate.drafter_out_above,
        acceptance_length=candidate.acceptance_length,
    )

    _complete(registry, release, folder)
    set_alias(registry, release, CHALLENGER, reason="the gate passed", decision_digest=gate.digest)
    return release


def check_releasable(
    *, checkpoint: CheckpointRef, target: TargetRef, gate: GateDecision, report: AcceptanceReport
) -> None:
    """Check that gate, report, checkpoint and target speak of the same things and that the gate
    passed.

    Raises:
        RegistryError, FingerprintMismatchError: as `register_release`.
    """
    if gate.verdict is not Verdict.PASS:
        raise RegistryError(
            "only a checkpoint that passed its gate is released",
            got=gate.verdict.value,
            expected="pass",
        )
    if gate.candidate_digest != checkpoint.digest:
        raise RegistryError(
            "the gate judged another checkpoint",
            got=gate.candidate_digest,
            expected=checkpoint.digest,
        )
    if gate.report_digest != report.digest:
        raise RegistryError(
            "the gate judged another report", got=gate.report_digest, expected=report.digest
        )
    if (
        gate.target_fingerprint != target.fingerprint
        or report.target.fingerprint != target.fingerprint
    ):
        raise FingerprintMismatchError(
            "the gate was held on another target", expected=target.fingerprint.digest
        )
    if checkpoint.fingerprint != target.fingerprint:
        raise FingerprintMismatchError(
            "the checkpoint is bound to another target",
            got=checkpoint.fingerprint.digest,
            expected=target.fingerprint.digest,
            fix="Re-bind or retrain the drafter, then gate it on this target.",
        )

    on_disk = digest_checkpoint(Path(checkpoint.path))
    if on_disk != checkpoint.digest:
        raise RegistryError(
            "the checkpoint changed since it was judged", got=on_disk, expected=checkpoint.digest
        )


def get_release(
    registry: Registry, model_name: str, *, alias: str | None = None, version: int | None = None
) -> Release | None:
    """The release that `alias` or `version` names (give exactly one), or None if there is no such
    model or version.

    Raises:
        RegistryError: the version exists, but its registration was never completed or does not
            match its record.
    """
    if (alias is None) == (version is None):
        raise RegistryError(
            "a release is named by alias or by version",
            got=(alias, version),
            expected="exactly one",
        )
    client = registry.client

    def get() -> Any | None:
        try:
            if alias is not None:
                return client.get_model_version_by_alias(model_name, alias)
            return client.get_model_version(model_name, str(version))
        except MlflowException as error:
            if error.error_code in MISSING_CODES or (
                "alias" in str(error) and "not found" in str(error)
            ):
                return None
            raise

    found = registry.call(f"read the release {model_name} {alias or version}", get)
    return _read_release(registry, found) if found is not None else None


def list_releases(registry: Registry, model_name: str) -> list[Release]:
    """All completed releases of the model, oldest first."""
    versions = registry.call(
        f"list the versions of {model_name}",
        lambda: list(
            registry.client.search_model_versions(f"name = '{model_name}'", max_results=10_000)
        ),
    )
    complete = [version for version in versions if _COMPLETE_TAG in version.tags]
    return [
        _read_release(registry, version)
        for version in sorted(complete, key=lambda v: int(v.version))
    ]


def champion(registry: Registry, model_name: str) -> Release | None:
    """The release that serves now, or None."""
    return get_release(registry, model_name, alias=CHAMPION)


def download_checkpoint(registry: Registry, release: Release, destination: Path) -> CheckpointRef:
    """Download the release's checkpoint as folder `destination` and verify its digest; it appears
    whole or not at all.

    A `destination` that holds this very checkpoint already is kept.

    Raises:
        RegistryError: the download is not the registered checkpoint, or something else stands at
            `destination`.
    """
    destination = Path(destination)
    local = release.checkpoint.model_copy(update={"path": str(destination)})
    if destination.exists():
        if digest_checkpoint(destination) != release.checkpoint.digest:
            raise RegistryError("another checkpoint stands at the destination", got=destination)
        return local

    destination.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(
        dir=destination.parent, prefix=f".{destination.name}."
    ) as temporary:
        name = f"release-{release.gate_digest[:16]}/checkpoint"
        folder = registry.download_artifact(release.run_id, name, destination=Path(temporary))
        found = digest_checkpoint(folder)
        if found != release.checkpoint.digest:
            raise RegistryError(
                f"{release.model_name} version {release.version} is damaged in the artifact store",
                got=found,
                expected=release.checkpoint.digest,
            )
        folder.rename(destination)

    return local


def acceptance_report_of(registry: Registry, release: Release) -> AcceptanceReport:
    """The measurement the release passed its gate with.

    Raises:
        RegistryError: it is missing from the artifact store, or cannot be read.
    """
    return _evidence(registry, release, AcceptanceReport, "acceptance_report.json")


def gate_decision_of(registry: Registry, release: Release) -> GateDecision:
    """The decision the release was registered by.

    Raises:
        RegistryError: it is missing from the artifact store, was changed, or is not the one that
            was registered.
    """
    decision = _evidence(registry, release, GateDecision, "gate_decision.json")
    if decision.digest != release.gate_digest:
        raise RegistryError(
            f"the gate decision of {release.model_name} version {release.version} is not the "
            "registered one",
            got=decision.digest,
            expected=release.gate_digest,
        )
    return decision


def download_extra(registry: Registry, release: Release, name: str, destination: Path) -> Path:
    """Download a further file of the release's evidence into the folder `destination`.

    Raises:
        RegistryError: the release has no such file.
    """
    folder = f"release-{release.gate_digest[:16]}/extra"
    return registry.download_artifact(release.run_id, f"{folder}/{name}", destination=destination)


def _evidence(registry: Registry, release: Release, kind: type[RecordT], name: str) -> RecordT:
    with tempfile.TemporaryDirectory() as folder:
        path = registry.download_artifact(
            release.run_id, f"release-{release.gate_digest[:16]}/{name}", destination=Path(folder)
        )
        try:
            return kind.read(path)
        except ConfigError as error:
            raise RegistryError(
                f"{release.model_name} version {release.version} has a damaged {name}", got=error
            ) from error


def set_alias(
    registry: Registry, release: Release, alias: str, *, reason: str, decision_digest: str
) -> Promotion:
    """Move `alias` to the release: first into the promotions log, then in MLflow.

    Raises:
        RegistryError: as `promotions.move_alias`.
    """
    return move_alias(
        registry,
        release.model_name,
        alias=alias,
        to_version=release.version,
        reason=reason,
        decision_digest=decision_digest,
    )


def remove_alias(
    registry: Registry, model_name: str, alias: str, *, reason: str, decision_digest: str
) -> Promotion:
    """Take `alias` off the model, logged as `set_alias` is."""
    return move_alias(
        registry,
        model_name,
        alias=alias,
        to_version=None,
        reason=reason,
        decision_digest=decision_digest,
    )


def _upload_checkpoint(
    registry: Registry, run_id: str, checkpoint: CheckpointRef, *, folder: str
) -> None:
    """Upload what serving needs, and no optimiser state that may lie beside it."""
    with tempfile.TemporaryDirectory() as staging:
        for file in sorted(Path(checkpoint.path).iterdir()):
            if file.suffix in (".json", ".safetensors", ".jinja") and file.is_file():
                _link_or_copy(file, Path(staging) / file.name)
        registry.log_artifact(run_id, Path(staging), folder=folder)


def _link_or_copy(source: Path, destination: Path) -> None:
    try:
        destination.hardlink_to(source.resolve())
    except OSError:  # another file system
        shutil.copyfile(source, destination)


def _create_version(
    registry: Registry, model_name: str, *, run_id: str, folder: str, tags: dict[str, str]
) -> int:
    client = registry.client
    source = (
        registry.call("find the run", lambda: client.get_run(run_id)).info.artifact_uri
        + f"/{folder}/checkpoint"
    )

    def create() -> int:
        for version in client.search_model_versions(f"name = '{model_name}'", max_results=10_000):
            same_run = version.run_id == run_id
            if same_run and version.tags.get("gate_digest") == tags["gate_digest"]:
                return int(version.version)
        return int(
            client.create_model_version(model_name, source, run_id=run_id, tags=tags).version
        )

    return registry.call(f"register a version of {model_name}", create)


def _complete(registry: Registry, release: Release, folder: str) -> None:
    """Write release.json, then the tag that says so: a version without it was interrupted and is
    never served.
    """
    name = f"{folder}/release.json"
    registry.log_text(release.run_id, release.model_dump_json(indent=2), name=name)
    client = registry.client
    registry.call(
        "complete the release",
        lambda: client.set_model_version_tag(
            release.model_name, str(release.version), _COMPLETE_TAG, name
        ),
    )


def _read_release(registry: Registry, version: Any) -> Release:
    """The record and the version's tags must say the same: either may have been changed by hand."""
    where = f"{version.name} version {version.version}"
    name = version.tags.get(_COMPLETE_TAG)
    if name is None:
        raise RegistryError(
            f"{where} was never completed",
            expected=f"the tag {_COMPLETE_TAG}",
            fix="Register it again from its run, or delete the version.",
        )

    with tempfile.TemporaryDirectory() as temporary:
        release = Release.read(
            registry.download_artifact(version.run_id, name, destination=Path(temporary))
        )

    recorded = (release.model_name, release.version, release.checkpoint.digest, release.gate_digest)
    registered = (
        version.name,
        int(version.version),
        version.tags.get("checkpoint_digest"),
        version.tags.get("gate_digest"),
    )

    if recorded != registered:
        raise RegistryError(
            f"the record of {where} does not match its tags", got=recorded, expected=registered
        )
    return release
