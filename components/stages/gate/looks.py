"""How often a candidate was measured for a decision on a target: each look spends some of the
rules' levels.

One append-only file per candidate and target, a line per report that was decided on. Deciding on
the same report again is no new look; measuring again is, whatever prompts were added.
"""

from __future__ import annotations

import json
from pathlib import Path

from components.contracts import (
    AcceptanceReport,
    CheckpointRef,
    GateDecision,
    TargetFingerprint,
    append_line,
)
from components.errors import ConfigError


def next_look(state_dir: Path, fingerprint: TargetFingerprint, candidate: CheckpointRef) -> int:
    """Number, from 1, of a measurement of `candidate` that begins now.

    Raises:
        ConfigError: the file of looks cannot be read.
    """
    return 1 + len(_reports(_path(state_dir, fingerprint, candidate.digest)))


def record_look(state_dir: Path, report: AcceptanceReport, decision: GateDecision) -> None:
    """Keep that `report` was decided on, once."""
    path = _path(state_dir, report.target.fingerprint, decision.candidate_digest)
    if report.digest in _reports(path):
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    entry = {
        "report": report.digest,
        "look": report.look,
        "verdict": decision.verdict.value,
        "at": report.created_at.isoformat(),
    }
    append_line(path, json.dumps(entry))


def _path(state_dir: Path, fingerprint: TargetFingerprint, candidate_digest: str) -> Path:
    return state_dir / "looks" / f"{fingerprint.digest[:16]}-{candidate_digest[:16]}.jsonl"


def _reports(path: Path) -> list[str]:
    """Digests of the reports that were decided on, in order."""
    if not path.is_file():
        return []
    try:
        return [
            str(json.loads(line)["report"])
            for line in path.read_text().splitlines()
            if line.strip()
        ]
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{path} is not a list of looks",
            got=f"{type(error).__name__}: {error}",
            fix="Repair its last line, or move the file away: the next measurement then counts "
            "as the first.",
        ) from None
