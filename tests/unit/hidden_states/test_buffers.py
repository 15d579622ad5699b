"""Credits and ring: never over capacity, never two owners of a byte, never stuck."""

from __future__ import annotations

import threading

from hypothesis import given, settings
from hypothesis import strategies as st

from components.hidden_states.buffers import Credits, Region, Ring

NOW = 0.0


def test_credits_wait_for_room() -> None:
    credits = Credits(100)
    assert credits.acquire(80, timeout_s=NOW)
    assert not credits.acquire(21, timeout_s=NOW)
    threading.Timer(0.05, credits.release, [80]).start()
    assert credits.acquire(21, timeout_s=5)
    assert (credits.used_bytes, credits.peak_bytes) == (21, 80)


def test_ring_wraps_and_counts_what_it_skips() -> None:
    ring = Ring(1024)
    first, second = (ring.allocate(448, timeout_s=NOW) for _ in range(2))
    assert first is not None and second is not None
    assert ring.allocate(192, timeout_s=NOW) is None  # 128 at the end, nothing before the head
    ring.release(first)
    third = ring.allocate(192, timeout_s=NOW)
    assert third is not None and (third.start, third.skipped) == (0, 128)
    assert ring.used_bytes == 448 + 192 + 128
    ring.release(second)
    ring.release(third)
    assert ring.used_bytes == 0


def test_release_out_of_order_and_twice() -> None:
    ring = Ring(256)
    regions = [ring.allocate(64, timeout_s=NOW) for _ in range(4)]
    assert all(regions)
    for place in (2, 2, 1, 3):
        ring.release(regions[place])  # type: ignore[arg-type]
    assert ring.used_bytes == 256  # the oldest is still held
    assert ring.num_held == 1
    ring.release(regions[0])  # type: ignore[arg-type]
    assert ring.used_bytes == 0


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 700), st.integers(0, 5)), max_size=80), st.randoms())
def test_regions_never_overlap(steps: list[tuple[int, int]], random: object) -> None:
    ring = Ring(1024)
    held: list[Region] = []
    for num_bytes, num_released in steps:
        region = ring.allocate(num_bytes, timeout_s=NOW)
        if region is not None:
            assert 0 <= region.start < region.end <= ring.capacity_bytes
            assert all(region.end <= other.start or other.end <= region.start for other in held)
            held.append(region)
        for _ in range(min(num_released, len(held))):
            ring.release(held.pop(random.randrange(len(held))))  # type: ignore[attr-defined]
        assert sum(r.end - r.start for r in held) <= ring.used_bytes <= ring.capacity_bytes
    for region in held:
        ring.release(region)
    assert ring.used_bytes == 0
    assert ring.allocate(1024, timeout_s=NOW) is not None
