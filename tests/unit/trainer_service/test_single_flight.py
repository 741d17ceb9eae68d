"""Concurrent requests share one computation, other keys do not wait, and the cache is bounded."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import pytest

from services.common.errors import DeadlineError, InfrastructureError
from services.trainer.publish.single_flight import SingleFlightCache
from tests.waiting import WAIT_S


@dataclass
class Thing:
    size_bytes: int


def get(store: SingleFlightCache[Thing], key: object, size: int, made: list[object]) -> Thing:
    def make() -> Thing:
        made.append(key)
        return Thing(size)

    return store.get(key, make, "a thing", WAIT_S)  # type: ignore[arg-type]


def test_callers_share_one_computation_and_other_keys_do_not_wait() -> None:
    store: SingleFlightCache[Thing] = SingleFlightCache(100)
    begun, go = threading.Event(), threading.Event()
    made: list[str] = []

    def slowly() -> Thing:
        made.append("slow")
        begun.set()
        assert go.wait(WAIT_S)
        return Thing(1)

    with ThreadPoolExecutor(5) as threads:
        asking = [threads.submit(store.get, "slow", slowly, "the slow one", WAIT_S) for _ in range(4)]
        assert begun.wait(WAIT_S)
        assert threads.submit(get, store, "other", 1, []).result(WAIT_S).size_bytes == 1
        with pytest.raises(DeadlineError, match=r"the slow one took longer than 0\.01 s"):
            store.get("slow", slowly, "the slow one", 0.01)
        go.set()
        things = [one.result(WAIT_S) for one in asking]
    assert made == ["slow"]
    assert all(thing is things[0] for thing in things)


def test_each_waiting_caller_gets_the_error_and_the_next_call_tries_again() -> None:
    store: SingleFlightCache[Thing] = SingleFlightCache(100)
    begun, go = threading.Event(), threading.Event()

    def fail() -> Thing:
        begun.set()
        assert go.wait(WAIT_S)
        raise InfrastructureError("it broke")

    with ThreadPoolExecutor(2) as threads:
        first = threads.submit(store.get, "a", fail, "a thing", WAIT_S)
        assert begun.wait(WAIT_S)
        second = threads.submit(store.get, "a", fail, "a thing", WAIT_S)
        go.set()
        for asked in (first, second):
            with pytest.raises(InfrastructureError, match="it broke"):
                asked.result(WAIT_S)
    assert get(store, "a", 3, []).size_bytes == 3


def test_the_least_recently_used_value_goes_when_there_are_too_many_bytes() -> None:
    store: SingleFlightCache[Thing] = SingleFlightCache(10)
    made: list[object] = []
    for key, size in (("a", 4), ("b", 4), ("a", 4), ("c", 4), ("a", 4), ("b", 4)):
        get(store, key, size, made)
    assert made == ["a", "b", "c", "b"], "b went for c, because a had been used since"
    assert store.size_bytes <= 10


def test_one_value_is_kept_at_any_size() -> None:
    store: SingleFlightCache[Thing] = SingleFlightCache(10)
    get(store, "a", 4, [])
    get(store, "large", 40, [])
    assert [thing.size_bytes for thing in store] == [40]
