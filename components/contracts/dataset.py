"""A curated dataset, and the conversations that none may hold because evaluation measures on
them.
"""

from __future__ import annotations

import hashlib

from pydantic import Field

from components.contracts.record import Reference
from components.contracts.target import TargetFingerprint


def is_held_out(text: str) -> bool:
    """Whether a conversation opening with `text` belongs to evaluation (one in twenty), never to
    training.

    A hash of the content decides, so the answer is stable under row order and growth of the source.
    """
    normalised = " ".join(text.lower().split())
    return int(hashlib.sha256(normalised.encode()).hexdigest()[:8], 16) % 20 == 0


class DatasetRef(Reference):
    """A curated dataset on disk: Arrow shards and a manifest, bound to the target that wrote the
    answers.
    """

    path: str
    digest: str = Field(
        description="over the content of all shards, independent of paths and times"
    )
    fingerprint: TargetFingerprint
    num_conversations: dict[str, int] = Field(description="by split: train, validation")
    num_tokens: dict[str, int]
    num_loss_tokens: dict[str, int]
    funnel: dict[str, int] = Field(description="rows left after each curation step, in order")
    docs_path: str = Field(description="index.html of the Great Expectations Data Docs")
