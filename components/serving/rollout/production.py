"""The engine that answers production traffic behind the splitter, between rollouts and after the
flow that began it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Self

from components.contracts import Arm, ArmEndpoint, Record, TargetFingerprint
from components.serving.engines.engine import Engine, EngineIdentity, stop_engine
from components.system import guard

RECORD_NAME = "production.json"


class ProductionEngine(Record):
    """An engine in service, as another process finds it."""

    endpoint: ArmEndpoint
    fingerprint: TargetFingerprint
    pid: int
    start_ticks: int

    @classmethod
    def find(cls, folder: Path) -> Self | None:
        """The engine recorded in `folder`, if it still runs.

        Raises:
            ConfigError: the record is damaged.
        """
        path = Path(folder) / RECORD_NAME
        if not path.is_file():
            return None
        recorded = cls.read(path)
        return recorded if guard.process_start(recorded.pid) == recorded.start_ticks else None

    def serves(self, *, fingerprint: TargetFingerprint, checkpoint_digest: str | None) -> bool:
        """Whether this engine serves that drafter (None: no draft) on that target."""
        return (
            self.fingerprint == fingerprint and self.endpoint.checkpoint_digest == checkpoint_digest
        )

    def stop(self) -> None:
        """End the engine; it must not hold traffic any more."""
        stop_engine(EngineIdentity(pid=self.pid, start_ticks=self.start_ticks))


def put_into_production(
    engine: Engine, *, fingerprint: TargetFingerprint, folder: Path, owner_pid: int
) -> None:
    """Let `engine` serve on, owned by `owner_pid` (the services' supervisor), and end the one it
    replaces.

    Call it when the splitter sends all traffic to `engine`. The record is written before the old
    engine ends, so a crash between the two leaves one engine too many, never none.

    Raises:
        EngineError: the engine or the new owner is gone.
    """
    replaced = ProductionEngine.find(folder)
    identity = engine.hand_over(owner_pid)
    ProductionEngine(
        endpoint=engine.endpoint(Arm.CHAMPION if engine.spec.checkpoint else Arm.NO_DRAFT),
        fingerprint=fingerprint,
        pid=identity.pid,
        start_ticks=identity.start_ticks,
    ).write(Path(folder) / RECORD_NAME)
    if replaced is not None and replaced.pid != identity.pid:
        replaced.stop()
