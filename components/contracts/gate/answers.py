"""The plain engine's greedy answers, kept so that later answers to the same prompts can be compared
with them.
"""

from __future__ import annotations

from pydantic import Field

from components.contracts.record import Record


class PlainAnswer(Record):
    """Token ids of one answer, and the best tokens at each of its positions."""

    token_ids: tuple[int, ...] = Field(description="an end token included")
    top: tuple[tuple[tuple[int, float], ...], ...] = Field(
        description="per position (token id, log-probability), the most probable first"
    )


class PlainAnswers(Record):
    """What the plain engine answered to a gate's prompts."""

    answers: dict[str, PlainAnswer] = Field(description="by prompt id")
