"""CPU-heavy work in chunks, so that it can be done here or, by a setting, under Prefect's Dask task
runner.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol, TypeVar

T = TypeVar("T")
R = TypeVar("R")

CHUNK = 2048
"""Conversations of one piece of work: enough that a task run of its own is worth it (chosen, not
measured).
"""

MAX_ROUND = 16 * CHUNK
"""Conversations drawn before the first of them is judged, at most: work for sixteen cores."""


class Apply(Protocol):
    """Applies `work` to each chunk and gives the results in the order of the chunks, as `map` does.

    `work` and chunks may be sent to other processes, so both must pickle.
    """

    def __call__(self, work: Callable[[T], R], chunks: Iterable[T], /) -> Iterable[R]:
        """Results of `work`, in order."""


def apply_here(work: Callable[[T], R], chunks: Iterable[T], /) -> Iterable[R]:
    """One chunk after the other, in this process."""
    return map(work, chunks)


def round_size(num_conversations: int, *, least: int) -> int:
    """Conversations to draw before they are judged: an eighth of those wanted, so that little is
    drawn for nothing, and the same wherever the work is done, so that the dataset is the same too.
    """
    return max(least, min(MAX_ROUND, num_conversations // 8))
