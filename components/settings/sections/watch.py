"""The watch for new versions of a target, and what one of them leads to."""

from __future__ import annotations

from pydantic import Field

from components.settings.base import Settings


class WatchSettings(Settings):
    """Where new versions of the target appear."""

    path: str | None = Field(
        default=None, description="folder or symlink watched; None: the target's own source"
    )
    interval_s: float = Field(default=60, gt=0)
    rebind_acceptance_share: float = Field(
        default=0.97,
        gt=0,
        le=1,
        description="old drafter on new target against its own release: at or above re-bind",
    )
    retrain_num_conversations: int | None = Field(
        default=None, description="curation size of a retrain"
    )
