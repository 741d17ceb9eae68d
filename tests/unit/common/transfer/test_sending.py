"""A send budget holds its rate over all sharers, and counts the sent bytes."""

from __future__ import annotations

import asyncio
import time

from services.common.transfer.bulk import SendBudget
from tests.waiting import WAIT_S


async def test_without_a_limit_nothing_waits_and_everything_is_counted() -> None:
    budget = SendBudget()
    async with asyncio.timeout(WAIT_S):  # at any rate of a network so many bytes take longer
        for transport in ("bulk", "grpc", "bulk"):
            await budget.take(1 << 40, transport)
    assert budget.num_bytes_sent == 3 << 40
    assert budget.num_bytes_by_transport == {"bulk": 2 << 40, "grpc": 1 << 40}


async def test_senders_share_the_rate_in_the_order_of_asking() -> None:
    budget = SendBudget(1_000_000)
    ended: list[int] = []

    async def send(number: int) -> None:
        await budget.take(100_000, "grpc")
        ended.append(number)

    began = time.monotonic()
    await asyncio.gather(*(send(number) for number in range(5)))
    assert time.monotonic() - began >= 0.39, "half a second of bytes, less the burst"
    assert ended == [0, 1, 2, 3, 4]


async def test_unused_rate_is_not_saved_up() -> None:
    budget = SendBudget(1_000_000)
    await asyncio.sleep(0.5)
    began = time.monotonic()
    await budget.take(400_000, "grpc")
    assert time.monotonic() - began >= 0.25
