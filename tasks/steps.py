"""Steps of a stage as Prefect tasks."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from prefect import task
from prefect.cache_policies import NO_CACHE

from tasks.retry import is_transient

ResultT = TypeVar("ResultT")


def as_task(name: str, work: Callable[[], ResultT], /) -> ResultT:
    """Do `work` as a Prefect task of this name, tried once more after what a restart of a service
    can cure.
    """
    # Measurements go on where they were: what was counted is in a journal.
    step = task(
        name=name,
        cache_policy=NO_CACHE,
        retries=1,
        retry_delay_seconds=5,
        retry_condition_fn=is_transient,
    )
    return step(work)()
