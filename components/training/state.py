"""Complete trainer state on disk: weights, optimizer, random numbers, place in the stream, curves.

<folder>/step-00000100/state.pt    renamed into place once written; the last N are kept
<folder>/best.pt                   weights of the longest acceptance so far
<folder>/diverged-00000100.pt      the packs of a step whose loss or gradients were not finite
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any
from uuid import uuid4

import torch

from components.errors import CheckpointError

STATE_FILE = "state.pt"


class StateFolder:
    """States of one training run, newest last."""

    def __init__(self, folder: Path, *, keep: int) -> None:
        self._folder = Path(folder)
        self._keep = keep

    def save(self, state: dict[str, Any], *, step: int) -> Path:
        """Write a state and drop all but the newest ones.

        Raises:
            CheckpointError: it cannot be written (disk full); older states are untouched.
        """
        final = self._folder / f"step-{step:08d}"
        if final.exists():  # the stop fell on a step that was saved already
            return final
        _write_folder(final, state)
        for old in self._complete()[: -self._keep]:
            shutil.rmtree(old, ignore_errors=True)
        return final

    def load_newest(self) -> dict[str, Any] | None:
        """The newest complete state, or None.

        Raises:
            CheckpointError: it cannot be read.
        """
        folders = self._complete()
        if not folders:
            return None
        state: dict[str, Any] = _load(folders[-1] / STATE_FILE)
        return state

    def save_best(self, weights: dict[str, torch.Tensor]) -> None:
        """Replace the best weights."""
        temporary = self._folder / f".best-{uuid4().hex[:8]}.pt"
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            _write(temporary, weights)
            temporary.replace(self._folder / "best.pt")
        except OSError as error:
            raise CheckpointError(
                "the best weights cannot be written", got=f"{self._folder}: {error}"
            ) from None
        finally:
            temporary.unlink(missing_ok=True)

    def load_best(self) -> dict[str, torch.Tensor] | None:
        """The best weights, or None."""
        path = self._folder / "best.pt"
        weights: dict[str, torch.Tensor] | None = _load(path) if path.is_file() else None
        return weights

    def save_batch(self, packs: list[dict[str, Any]], *, step: int) -> Path:
        """Keep the packs of a step that diverged; `torch.load` gives their tensors, bounds and
        sample ids back.

        Raises:
            CheckpointError: they cannot be written.
        """
        path = self._folder / f"diverged-{step:08d}.pt"
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            _write(path, packs)
        except OSError as error:
            raise CheckpointError(
                "the batch that diverged cannot be written", got=f"{path}: {error}"
            ) from None
        return path

    def clear(self) -> None:
        """Remove everything: a run that does not resume starts from nothing."""
        shutil.rmtree(self._folder, ignore_errors=True)

    def _complete(self) -> list[Path]:
        return sorted(
            folder for folder in self._folder.glob("step-*") if (folder / STATE_FILE).is_file()
        )


def _write_folder(final: Path, state: dict[str, Any]) -> None:
    temporary = final.parent / f".{final.name}-{uuid4().hex[:8]}"
    try:
        temporary.mkdir(parents=True)
        _write(temporary / STATE_FILE, state)
        temporary.rename(final)
    except OSError as error:
        raise CheckpointError(
            "the training state cannot be written", got=f"{final}: {error}"
        ) from None
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _write(path: Path, value: Any) -> None:
    with path.open("wb") as file:
        torch.save(value, file)
        file.flush()
        os.fsync(file.fileno())


def _load(path: Path) -> Any:
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # noqa: BLE001  # a torn file makes the unpickler raise anything
        raise CheckpointError("the training state cannot be read", got=f"{path}: {error}") from None
