"""Split by content: the id decides, so a conversation stays in its split whatever else is added or
reordered.

Near-duplicates are removed before the split, so no pair at or above the threshold can lie in both
splits; `dedup.cross_similarity` measures that on the finished dataset and an expectation holds it.
"""

from __future__ import annotations

from collections.abc import Set

from components.errors import CurationError

TRAIN = "train"
VALIDATION = "validation"
_BITS = 64


def split_of(content_id: str, *, validation_share: float) -> str:
    """`train` or `validation` for a conversation id (hex): the id's first 64 bits as a number in
    [0, 1).
    """
    position = int(content_id[: _BITS // 4], 16) / 2**_BITS
    return VALIDATION if position < validation_share else TRAIN


def check_both_splits(splits: Set[str], *, num_conversations: int) -> None:
    """Refuse an empty split.

    Raises:
        CurationError: no conversation in one of the splits.
    """
    for split in (TRAIN, VALIDATION):
        if split not in splits:
            raise CurationError(
                f"no conversation fell into the {split} split",
                got=f"{num_conversations} conversations",
                fix="Raise num_conversations or validation_share.",
            )
