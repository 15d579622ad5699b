"""The append-only promotions log of a registered model: who stood where, when, why, on which
decision.

MLflow's aliases keep no history, so each move is first written here and then made. An entry is a
parameter of one dedicated run per model: MLflow refuses to change a parameter, so an entry cannot
be overwritten, and of two writers of the same index one is refused and tries the next. Each entry
carries the digest of the one before, so a log that was altered behind MLflow's back does not
verify.
"""

from __future__ import annotations

from typing import Any

from mlflow.exceptions import MlflowException
from pydantic import ValidationError

from components.contracts import Promotion, now_utc
from components.errors import RegistryError
from components.registry.client import MISSING_CODES, Registry, is_connection_error

EXPERIMENT = "promotions"
_RUN_TAG = "dspark.promotions_run_id"
_MAX_ENTRY_CHARS = 6000  # MLflow cuts longer parameter values off
_MAX_RACES = 20


def promotions(registry: Registry, model_name: str) -> list[Promotion]:
    """All entries of the model's log, oldest first, the chain verified.

    Raises:
        RegistryError: an entry is missing, unreadable or does not follow from the one before it.
    """
    run_id = _find_run(registry, model_name)
    if run_id is None:
        return []
    entries = _read_entries(registry, run_id)
    verify_chain(entries)
    return entries


def verify_chain(entries: list[Promotion]) -> None:
    """Check indices, and that each entry carries the digest of the one before.

    Raises:
        RegistryError: naming the first entry that does not follow.
    """
    previous: str | None = None
    for index, entry in enumerate(entries, start=1):
        if entry.index != index or entry.previous_digest != previous:
            raise RegistryError(
                f"the promotions log of {entry.model_name} is broken at entry {index}",
                got=f"index {entry.index}, previous digest {entry.previous_digest}",
                expected=f"index {index}, previous digest {previous}",
                fix="Entries were changed or removed outside this project; do not trust aliases "
                "until it is explained.",
            )
        previous = entry.digest


def verify_aliases(registry: Registry, model_name: str) -> list[str]:
    """Differences between the log's last word on each alias and where the alias stands; empty when
    all agree.

    Raises:
        RegistryError: as `promotions`.
    """
    logged = {entry.alias: entry.to_version for entry in promotions(registry, model_name)}
    actual = alias_versions(registry, model_name)
    return [
        f"{alias}: the log says {logged.get(alias)}, MLflow says {actual.get(alias)}"
        for alias in sorted({*logged, *actual})
        if logged.get(alias) != actual.get(alias)
    ]


def alias_versions(registry: Registry, model_name: str) -> dict[str, int]:
    """Where each alias of the model stands; empty when the model does not exist."""
    model = find_model(registry, model_name)
    return {alias: int(version) for alias, version in (model.aliases if model else {}).items()}


def move_alias(
    registry: Registry,
    model_name: str,
    *,
    alias: str,
    to_version: int | None,
    reason: str,
    decision_digest: str,
) -> Promotion:
    """Write the move of `alias` into the log, then make it. `to_version` None removes the alias.

    Repeating a move that was written but not made (a crash in between) only makes it.

    Raises:
        RegistryError: the model does not exist, the entry is too long, or the log does not verify.
    """
    run_id = _find_run(registry, model_name) or _create_run(registry, model_name)
    for _ in range(_MAX_RACES):
        entries = _read_entries(registry, run_id)
        verify_chain(entries)
        standing = alias_versions(registry, model_name).get(alias)
        last = next((entry for entry in reversed(entries) if entry.alias == alias), None)
        if last and (last.to_version, last.decision_digest, last.reason) == (
            to_version,
            decision_digest,
            reason,
        ):
            return _make(registry, last)
        entry = Promotion(
            index=len(entries) + 1,
            model_name=model_name,
            alias=alias,
            from_version=standing,
            to_version=to_version,
            reason=reason,
            decision_digest=decision_digest,
            previous_digest=entries[-1].digest if entries else None,
            created_at=now_utc(),
        )
        if _append(registry, run_id, entry):
            return _make(registry, entry)

    raise RegistryError(
        f"the promotions log of {model_name} is written by too many others at once", got=_MAX_RACES
    )


def find_model(registry: Registry, model_name: str) -> Any | None:
    """The registered model, or None."""

    def get() -> Any | None:
        try:
            return registry.client.get_registered_model(model_name)
        except MlflowException as error:
            if error.error_code in MISSING_CODES:
                return None
            raise

    return registry.call(f"read the model {model_name}", get)


def create_model(registry: Registry, model_name: str) -> None:
    """Create the registered model and its log, if they are not there."""
    client = registry.client

    def create() -> None:
        try:
            client.create_registered_model(
                model_name, description="Drafters of one target, kept in step with it."
            )
        except MlflowException as error:
            if error.error_code != "RESOURCE_ALREADY_EXISTS":
                raise

    registry.call(f"create the model {model_name}", create)
    if _find_run(registry, model_name) is None:
        _create_run(registry, model_name)


def _make(registry: Registry, entry: Promotion) -> Promotion:
    client = registry.client
    name = entry.model_name
    alias = entry.alias
    version = entry.to_version

    if version is None:
        registry.call(
            f"remove the alias {alias}", lambda: client.delete_registered_model_alias(name, alias)
        )
        return entry

    registry.call(
        f"set the alias {alias}",
        lambda: client.set_registered_model_alias(name, alias, str(version)),
    )
    registry.call(
        "tag the version",
        lambda: client.set_model_version_tag(
            name, str(version), f"dspark.promoted.{alias}", entry.digest
        ),
    )

    return entry


def _append(registry: Registry, run_id: str, entry: Promotion) -> bool:
    """Write one entry; False when another process wrote this index first."""
    text = entry.model_dump_json()
    if len(text) > _MAX_ENTRY_CHARS:
        raise RegistryError(
            "a promotion's reason is too long", got=f"{len(entry.reason)} characters", expected=5000
        )

    def append() -> bool:
        try:
            registry.client.log_param(run_id, _key(entry.index), text)
        except MlflowException as error:
            if is_connection_error(error) or "already logged" not in str(error):
                raise
            return False
        return True

    return registry.call("write the promotions log", append)


def _read_entries(registry: Registry, run_id: str) -> list[Promotion]:
    params = registry.call(
        "read the promotions log", lambda: registry.client.get_run(run_id)
    ).data.params
    try:
        return [Promotion.model_validate_json(params[key]) for key in sorted(params)]
    except ValidationError as error:
        raise RegistryError(
            "the promotions log holds something else", got=error.errors()[0]["msg"]
        ) from None


def _find_run(registry: Registry, model_name: str) -> str | None:
    model = find_model(registry, model_name)
    return model.tags.get(_RUN_TAG) if model else None


def _create_run(registry: Registry, model_name: str) -> str:
    if find_model(registry, model_name) is None:
        raise RegistryError("no such registered model", got=model_name)
    run_id = registry.start_run(
        EXPERIMENT, name=model_name, params={}, tags={"dspark.model_name": model_name}
    )
    client = registry.client
    registry.call(
        "name the promotions log",
        lambda: client.set_registered_model_tag(model_name, _RUN_TAG, run_id),
    )
    return run_id


def _key(index: int) -> str:
    return f"{index:06d}"
