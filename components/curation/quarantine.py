"""Bad rows: set aside with a reason, counted, never fatal and never dropped in silence."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from components.contracts import write_atomic

EXAMPLES_PER_REASON = 20
"""Rows described in full per source and reason. Counts are exact; the examples are bounded so
memory stays flat.
"""


class BadRowError(Exception):
    """Raised by row readers; its text is the reason a row is quarantined under. Never leaves this
    component.
    """


@dataclass
class Quarantine:
    """Counts of bad rows by source and reason, with a bounded number of examples."""

    counts: Counter[tuple[str, str]] = field(default_factory=Counter)
    examples: list[dict[str, str]] = field(default_factory=list)

    def add(self, source: str, reason: str, *, where: str, detail: str = "") -> None:
        """Set one row aside.

        Args:
            source: its source.
            reason: what it is counted under.
            where: locates it: a file and line, a row number, a conversation id.
            detail: what is particular to this row, such as the words it shares with an evaluation
                prompt.
        """
        self.counts[source, reason] += 1
        if self.counts[source, reason] <= EXAMPLES_PER_REASON:
            example = {"source": source, "reason": reason, "where": where}
            self.examples.append(example | ({"detail": detail} if detail else {}))

    @property
    def total(self) -> int:
        """Rows set aside."""
        return self.counts.total()

    def by_source(self) -> dict[str, dict[str, int]]:
        """Counts as {source: {reason: rows}}, sorted."""
        table: dict[str, dict[str, int]] = {}
        for (source, reason), count in sorted(self.counts.items()):
            table.setdefault(source, {})[reason] = count
        return table

    def write(self, path: Path) -> Path:
        """Write the examples as JSON lines."""
        lines = [json.dumps(example, ensure_ascii=True) for example in self.examples]
        return write_atomic(path, "".join(f"{line}\n" for line in lines))
