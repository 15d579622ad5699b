"""Waits for extraction engines that start while the trainer builds its drafter."""

from __future__ import annotations

import time
from collections.abc import Sequence

import httpx

from components.errors import EngineError

POLL_S = 0.5


def wait_for_engines(urls: Sequence[str], *, timeout_s: float) -> None:
    """Return when every engine answers /health.

    Raises:
        EngineError: one does not in `timeout_s` from now.
    """
    deadline = time.monotonic() + timeout_s
    with httpx.Client(timeout=5.0) as client:
        for url in urls:
            while not _answers(client, url):
                if time.monotonic() > deadline:
                    raise EngineError(
                        "the extraction engine does not answer",
                        got=url,
                        expected=f"within {timeout_s:g} s",
                    )
                time.sleep(POLL_S)


def _answers(client: httpx.Client, url: str) -> bool:
    try:
        return client.get(f"{url}/health").status_code == httpx.codes.OK
    except httpx.TransportError:
        return False
