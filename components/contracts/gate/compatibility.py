"""Which requests a plain engine serves, and which of them one that drafts does."""

from __future__ import annotations

from datetime import datetime
from enum import StrEnum
from typing import Literal, get_args

from components.contracts.record import Record

RequestFeature = Literal[
    "chat",
    "stream",
    "max_tokens_1",
    "empty_message",
    "n",
    "logprobs",
    "stop",
    "json_schema",
    "tool_choice_none",
    "top_k",
    "top_p",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "logit_bias",
    "seed",
    "end_of_context",
    "past_the_context",
]
FEATURES: tuple[RequestFeature, ...] = get_args(RequestFeature)
"""In the order they are asked for and shown."""


class Served(StrEnum):
    """What became of a request."""

    OK = "ok"
    REFUSED = "refused"
    WRONG = "wrong"


class CompatibilityRow(Record):
    """One kind of request, on both engines."""

    feature: RequestFeature
    plain: Served
    drafting: Served
    detail: str = ""

    @property
    def is_lost(self) -> bool:
        """Whether the plain engine serves it and the drafting one does not."""
        return self.plain is Served.OK and self.drafting is not Served.OK


class CompatibilityTable(Record):
    """Measured once per engine version and drafting method: none of it is a matter of one drafter's
    weights.
    """

    engine_version: str
    method: str
    device: str
    model: str
    rows: tuple[CompatibilityRow, ...]
    created_at: datetime
