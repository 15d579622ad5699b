"""Whether a candidate is the champion's weights under another binding: then there is nothing to
compare it with.
"""

from __future__ import annotations

from pathlib import Path

from components.contracts import CheckpointRef, digest_file


def champion_to_beat(candidate: CheckpointRef, champion: CheckpointRef | None) -> str | None:
    """Digest of the champion that `candidate` must be measured against; None where there is no
    other drafter.
    """
    if (
        champion is None
        or champion.digest == candidate.digest
        or has_same_weights(candidate, champion)
    ):
        return None
    return champion.digest


def has_same_weights(one: CheckpointRef, other: CheckpointRef) -> bool:
    """Both checkpoints hold the same weight files, byte by byte, whatever target they are bound
    to.
    """
    ours, theirs = _weights(one), _weights(other)
    return bool(ours) and ours == theirs


def _weights(checkpoint: CheckpointRef) -> dict[str, str]:
    files = sorted(Path(checkpoint.path).glob("*.safetensors"))
    return {file.name: digest_file(file) for file in files}
