"""CPU-heavy curation under Prefect's Dask task runner, where the recipe asks for it
(`curation.task_runner: dask`).
"""

from __future__ import annotations

import pickle
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from components.curation.chunks import Apply, apply_here
from components.errors import ConfigError
from components.serving.engines.command import available_cores
from components.settings import CurationSettings
from tasks.dask import work_on_chunk

T = TypeVar("T")
R = TypeVar("R")

CONNECT_TIMEOUT_S = 10
CHUNKS_UNDER_WAY = 32
"""Chunks handed to the cluster before the first result is awaited: it bounds memory here and busy
workers there.
"""


@contextmanager
def applied(settings: CurationSettings) -> Iterator[Apply]:
    """Where the recipe wants its CPU-heavy steps done: in this process, or on a Dask cluster.

    Without `dask_address` a local cluster is started for as long as the context lasts, one process
    per core.

    Raises:
        ConfigError: no cluster answers at `dask_address`.
    """
    if settings.task_runner == "threads":
        yield apply_here
        return

    with _dask_runner(settings.dask_address) as runner:
        try:
            runner.client  # noqa: B018  connects: at the first use, and not before
        except OSError as error:
            raise ConfigError(
                "no Dask cluster answers",
                got=f"{settings.dask_address}: {error}",
                fix="Start it, or correct curation.dask_address.",
            ) from error
        yield _under(runner)


def _dask_runner(address: str | None) -> Any:
    from prefect_dask.task_runners import DaskTaskRunner

    if address is not None:
        return DaskTaskRunner(address=address, client_kwargs={"timeout": CONNECT_TIMEOUT_S})
    kwargs = {"n_workers": available_cores(), "threads_per_worker": 1, "dashboard_address": None}
    return DaskTaskRunner(cluster_kwargs=kwargs)


def _under(runner: Any) -> Apply:
    def apply(work: Callable[[T], R], chunks: Iterable[T], /) -> Iterable[R]:
        under_way: deque[Any] = deque()
        for chunk in chunks:
            under_way.append(runner.submit(work_on_chunk, {"packed": pickle.dumps((work, chunk))}))
            if len(under_way) >= CHUNKS_UNDER_WAY:
                yield pickle.loads(under_way.popleft().result())
        while under_way:
            yield pickle.loads(under_way.popleft().result())

    return apply
