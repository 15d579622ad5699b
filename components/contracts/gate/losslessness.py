"""What was seen of greedy and sampled outputs with a drafter against those of the plain engine."""

from __future__ import annotations

from pydantic import Field

from components.contracts.record import Record


class Divergence(Record):
    """Where two greedy answers to one prompt part first, and what the plain engine thought
    there.
    """

    position: int = Field(ge=0, description="index of the first token that differs, from 0")
    margin_nats: float | None = Field(
        ge=0,
        description="log-probability the plain engine gave its own token less that of the other "
        "answer's token;"
        " None: one answer ends there without an end token, which rounding cannot explain",
    )
    is_lower_bound: bool = Field(
        default=False,
        description="the other token was not among those the plain engine told of: the margin "
        "is at least this",
    )


class SelfComparison(Record):
    """The plain engine's greedy answers against its own: what this machine's rounding does by
    itself.
    """

    num_in_flight: int = Field(ge=1, description="requests in flight while it answered again")
    digests: dict[str, str] = Field(
        description="by prompt id: sha256 of the token ids it answered this time"
    )
    divergences: dict[str, Divergence] = Field(
        description="by prompt id, where the two answers differ"
    )
    num_gaps: int = Field(
        ge=0,
        description="positions of equal context at which both answers tell the same two "
        "best tokens",
    )
    max_gap_change_nats: float = Field(
        ge=0,
        description="largest change of the gap between the two best tokens there; a token "
        "changes where it is more"
        " than the gap",
    )

    @property
    def num_compared(self) -> int:
        """Prompts that were answered again."""
        return len(self.digests)


class SampledOutputs(Record):
    """First tokens of many answers to a few prompts at a temperature, with the drafter and without
    it.
    """

    temperature: float = Field(gt=0)
    plain: dict[str, tuple[tuple[int, ...], ...]] = Field(
        description="by prompt id: token ids of each draw of the plain engine"
    )
    drafted: dict[str, tuple[tuple[int, ...], ...]] = Field(
        description="by prompt id: token ids of each draw of the candidate's engine"
    )
