"""The watch for new versions of a target, and what one of them leads to."""

from __future__ import annotations

from pydantic import Field

from components.settings.base import Settings


class WatchSettings(Settings):
    """Where new versions of the target appear, and when the old drafter still does on one.

    How often the watch looks is the schedule of `watch-target` in `prefect.yaml`; how much a
    retrain collects is `curation.num_conversations` of the overlay that the watch runs with.
    """

    path: str | None = Field(
        default=None,
        description="Folder, or link to one, that holds the target in production; until something"
        " is there, the target's own source counts. Null watches that source, and for a package a"
        " link in the state folder.",
    )
    rebind_acceptance_share: float = Field(
        default=0.97,
        gt=0,
        le=1,
        description="Share of its acceptance length that the old drafter must keep on a changed"
        " target, over the same prompts: at or above it the drafter is bound to the new target and"
        " goes to the gate, below it a new one is trained.",
    )
