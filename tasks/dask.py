"""A part of curation's CPU-heavy work as a task, for a Dask cluster."""

from __future__ import annotations

import pickle

from prefect import task
from prefect.cache_policies import NO_CACHE

from tasks.retry import transient


# Work and chunk travel as one byte string: Prefect walks through every object of a parameter, and
# there are thousands.
@task(
    name="curate chunk",
    cache_policy=NO_CACHE,
    **transient(retries=2, delay_s=5),
)
def work_on_chunk(packed: bytes) -> bytes:
    """Unpack, work, pack."""
    work, chunk = pickle.loads(packed)
    return pickle.dumps(work(chunk))
