"""A drafter checkpoint: the files that bind and calibrate it, its digest, and the reference to
it.
"""

from __future__ import annotations

from pathlib import Path

from pydantic import Field

from components.contracts.digests import digest_file, digest_json
from components.contracts.record import Reference
from components.contracts.target import TargetFingerprint
from components.errors import CheckpointError

FINGERPRINT_FILE = "target_fingerprint.json"
"""Name of the file inside a drafter checkpoint that binds it to one target."""

CALIBRATION_FILE = "calibration.json"
"""Name of the file inside a drafter checkpoint that calibrates its confidence head; absent where it
has none.
"""


def digest_checkpoint(path: Path) -> str:
    """sha256 (hex) of a drafter checkpoint: over (relative name, sha256) of what decides how it
    drafts.

    That is config.json, *.safetensors, the binding and, where there is one, the calibration of the
    confidence head. Logs, optimiser states and reports beside the weights do not count.

    Raises:
        CheckpointError: `path` holds no config.json, weights or fingerprint file.
    """
    root = Path(path)
    files = [root / "config.json", root / FINGERPRINT_FILE, *sorted(root.glob("*.safetensors"))]
    missing = [file.name for file in files[:2] if not file.is_file()] + ["*.safetensors"] * (
        len(files) == 2
    )
    files += sorted(root.glob(CALIBRATION_FILE))

    if missing:
        raise CheckpointError(
            f"{root} is not a complete checkpoint", got=f"no {', '.join(missing)}"
        )

    return digest_json(
        sorted((file.relative_to(root).as_posix(), digest_file(file)) for file in files)
    )


class CheckpointRef(Reference):
    """A drafter checkpoint that vLLM loads as it stands, bound to a target by
    `target_fingerprint.json`.
    """

    path: str
    digest: str = Field(
        description="over config.json, the weight files, the binding and the calibration"
    )
    algorithm: str = Field(description="dspark, dflash or eagle3")
    fingerprint: TargetFingerprint
    dataset_digest: str | None = None
    parent_digest: str | None = Field(
        default=None, description="checkpoint it was warm-started or re-bound from"
    )
    step: int = 0
    num_trained_tokens: int = 0
    num_draft_tokens: int = Field(description="K, draft tokens proposed per target step")
    expected_acceptance_length: float | None = Field(
        default=None, description="teacher-forced on the validation split, bonus token included"
    )
