"""Rows left after each curation step, in order."""

from __future__ import annotations

from collections.abc import Mapping

STEPS = (
    "read",
    "well_formed",
    "not_held_out",
    "filtered",
    "unique",
    "not_near_duplicate",
    "decontaminated",
    "answered",
    "rendered",
)
"""What the counts mean: rows read from the sources; those that could be read as a conversation;
those that are not evaluation's; those the prompt filters passed; after exact and near duplicates;
after decontamination; with at least one answer by the target; and with tokens and a mask.
"""


class Funnel:
    """Counts rows passing each step."""

    def __init__(self, counts: Mapping[str, int] | None = None) -> None:
        self._counts: dict[str, int] = dict(counts or {})

    def passed(self, step: str, num_rows: int = 1) -> None:
        """Count rows that are left after `step`."""
        assert step in STEPS, step
        self._counts[step] = self._counts.get(step, 0) + num_rows

    def as_dict(self) -> dict[str, int]:
        """Counts of the steps that ran, in order."""
        return {step: self._counts[step] for step in STEPS if step in self._counts}
