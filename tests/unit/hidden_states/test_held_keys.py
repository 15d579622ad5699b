"""The writing side's budget and the sweep of orphans, against a store of a few lines."""

from __future__ import annotations

import pytest

from components.hidden_states.in_vllm.held_keys import HeldKeys, StoreRefusedError


class Store:
    def __init__(self) -> None:
        self.keys: set[str] = set()
        self.is_down = False

    def batch_is_exist(self, keys: list[str]) -> list[int]:
        return [-1 if self.is_down else int(key in self.keys) for key in keys]

    def remove(self, key: str, force: bool) -> int:
        assert force
        if self.is_down:
            return -900
        if key not in self.keys:
            return -704
        self.keys.remove(key)
        return 0


def put(held: HeldKeys, store: Store, key: str, num_bytes: int) -> None:
    held.admit(key, num_bytes, store=store)
    store.keys.add(key)
    held.confirm(key)


def test_refuses_past_the_budget_until_a_reader_removed_something() -> None:
    held = HeldKeys(budget_bytes=100, orphan_ttl_s=60)
    store = Store()
    put(held, store, "a", 60)
    with pytest.raises(StoreRefusedError, match="60 of 100 bytes held unread in 1 samples"):
        held.admit("b", 50, store=store)
    store.keys.remove("a")
    put(held, store, "b", 50)


def test_a_key_being_put_is_not_taken_for_a_removed_one() -> None:
    held = HeldKeys(budget_bytes=100, orphan_ttl_s=60)
    store = Store()
    held.admit("slow", 60, store=store)
    with pytest.raises(StoreRefusedError):
        held.admit("b", 50, store=store)


def test_a_store_that_does_not_answer_frees_nothing() -> None:
    held = HeldKeys(budget_bytes=100, orphan_ttl_s=60)
    store = Store()
    put(held, store, "a", 60)
    store.keys.clear()
    store.is_down = True
    with pytest.raises(StoreRefusedError):
        held.admit("b", 50, store=store)


def test_orphans_are_swept_after_their_time() -> None:
    now = [0.0]
    held = HeldKeys(budget_bytes=100, orphan_ttl_s=60, clock=lambda: now[0])
    store = Store()
    put(held, store, "old", 40)
    now[0] = 30.0
    put(held, store, "young", 40)
    now[0] = 61.0
    assert held.sweep(store) == 1
    assert store.keys == {"young"}
    store.is_down = True
    now[0] = 1000.0
    assert held.sweep(store) == 0
    store.is_down = False
    assert held.sweep(store) == 1
    put(held, store, "whole", 100)
