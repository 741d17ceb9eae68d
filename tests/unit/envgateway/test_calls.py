"""Calls that are repeated with the same key."""

from __future__ import annotations

import asyncio

import pytest

from services.envgateway.calls import SharedCalls
from tests.waiting import until


class Work:
    def __init__(self, seconds: float = 0.02) -> None:
        self.started = 0
        self.cancelled = 0
        self._seconds = seconds

    async def __call__(self) -> int:
        self.started += 1
        number = self.started
        try:
            await asyncio.sleep(self._seconds)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        return number


async def test_the_same_key_joins_and_then_gets_the_stored_result() -> None:
    shared: SharedCalls[int] = SharedCalls(10)
    work = Work()
    assert await asyncio.gather(shared.run("k", work), shared.run("k", work)) == [1, 1]
    assert await shared.run("k", work) == 1
    assert await shared.run("other", work) == 2


async def test_an_empty_key_shares_no_call() -> None:
    shared: SharedCalls[int] = SharedCalls(10)
    work = Work()
    await asyncio.gather(shared.run("", work), shared.run("", work))
    assert work.started == 2 and len(shared) == 0


async def test_the_call_lives_as_long_as_one_waiter() -> None:
    shared: SharedCalls[int] = SharedCalls(10)
    work = Work(0.3)
    first, second = (asyncio.create_task(shared.run("k", work)) for _ in range(2))
    await asyncio.sleep(0)
    first.cancel()
    assert await second == 1 and work.cancelled == 0
    lonely = asyncio.create_task(shared.run("l", work))
    await until(lambda: work.started == 2, every_s=0)
    lonely.cancel()
    with pytest.raises(asyncio.CancelledError):
        await lonely
    await asyncio.sleep(0)
    assert work.cancelled == 1
    assert await shared.run("l", work) == 3


async def test_errors_and_unwanted_results_are_not_stored() -> None:
    shared: SharedCalls[int] = SharedCalls(10, keep=lambda n: n > 1)
    work = Work(0)

    async def fail() -> int:
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        await shared.run("k", fail)
    assert [await shared.run("k", work) for _ in range(3)] == [1, 2, 2]


async def test_the_store_is_bounded() -> None:
    shared: SharedCalls[int] = SharedCalls(5)
    work = Work(0)
    for number in range(50):
        await shared.run(str(number), work)
    assert len(shared) <= 5
