"""Peak memory of everything the loop runs: process trees sampled once a second."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from types import TracebackType
from typing import Self

import psutil

MIB = 2**20


class MemorySampler:
    """Samples the memory of process trees in a thread; `peak_mib` is the largest sum seen.

    Memory is proportional set size (PSS) where the kernel tells it, so pages that processes share
    (model files, shared memory) count once; elsewhere resident set size, which counts them once per
    process.

    Args:
        roots: process ids whose trees count, or a function that returns them at each sample
            (services come and go).
        interval_s: time between samples.
    """

    def __init__(
        self, roots: Iterable[int] | Callable[[], Iterable[int]], *, interval_s: float = 1.0
    ) -> None:
        fixed = () if callable(roots) else tuple(roots)
        self._roots: Callable[[], Iterable[int]] = roots if callable(roots) else lambda: fixed
        self._interval_s = interval_s
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="memory-sampler", daemon=True)
        self._peak_bytes = 0
        self._num_samples = 0

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stop.set()
        self._thread.join(timeout=10 + self._interval_s)
        self._sample()

    @property
    def peak_mib(self) -> float:
        """Largest sum so far, MiB."""
        return self._peak_bytes / MIB

    @property
    def num_samples(self) -> int:
        """Samples taken so far."""
        return self._num_samples

    def _run(self) -> None:
        while not self._stop.wait(self._interval_s):
            self._sample()

    def _sample(self) -> None:
        self._peak_bytes = max(
            self._peak_bytes, sum(process_bytes(pid) for pid in tree_pids(self._roots()))
        )
        self._num_samples += 1


def tree_pids(roots: Iterable[int]) -> set[int]:
    """Ids of the processes `roots` and of all their descendants; ids of processes that have ended
    are left out.
    """
    pids: set[int] = set()
    for root in roots:
        try:
            process = psutil.Process(root)
            pids.update({root, *(child.pid for child in process.children(recursive=True))})
        except psutil.NoSuchProcess:
            continue
    return pids


def process_bytes(pid: int) -> int:
    """Memory of one process, bytes: PSS, or RSS where PSS cannot be read; 0 once the process has
    ended.
    """
    try:
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass  # not Linux, another user's process, or ended: RSS answers or says so
    try:
        return int(psutil.Process(pid).memory_info().rss)
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return 0
