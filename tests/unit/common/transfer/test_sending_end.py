"""The sending end of weights: tickets, the rate that transports share, and the source of a payload."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from services.common.errors import NotFoundError
from services.common.transfer import bulk
from services.common.transfer.bulk import SendBudget, Tickets
from services.common.transfer.servicer import source_of
from tests.clock import Clock

SOURCE: Any = object()


def test_a_ticket_is_for_one_payload_and_no_two_are_alike() -> None:
    tickets = Tickets()
    first, second = tickets.give(SOURCE, "a"), tickets.give(SOURCE, "a")
    assert first != second
    assert tickets.use(first).payload_id == "a"
    with pytest.raises(NotFoundError):
        tickets.use(bytes(len(first)))


def test_a_ticket_expires_without_use_and_using_renews_it() -> None:
    clock = Clock()
    tickets = Tickets(10.0, clock)
    used, unused = tickets.give(SOURCE, "a"), tickets.give(SOURCE, "b")
    clock.now = 9.0
    tickets.use(used)
    clock.now = 11.0
    with pytest.raises(NotFoundError):
        tickets.use(unused)
    assert tickets.use(used).payload_id == "a"
    clock.now = 21.0
    with pytest.raises(NotFoundError):
        tickets.use(used)
    assert len(tickets) == 0


def test_the_number_of_tickets_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bulk, "MOST_TICKETS", 3)
    tickets = Tickets()
    given = [tickets.give(SOURCE, str(number)) for number in range(5)]
    assert len(tickets) == 3
    assert tickets.use(given[-1]).payload_id == "4"
    with pytest.raises(NotFoundError):
        tickets.use(given[0])


async def test_senders_share_the_rate_in_the_order_of_asking() -> None:
    budget = SendBudget(1_000_000)
    ended: list[int] = []

    async def send(number: int) -> None:
        await budget.take(100_000)
        ended.append(number)

    began = time.monotonic()
    await asyncio.gather(*(send(number) for number in range(5)))
    assert time.monotonic() - began >= 0.39, "half a second of bytes, less the burst"
    assert ended == [0, 1, 2, 3, 4]


async def test_unused_rate_is_not_saved_up() -> None:
    budget = SendBudget(1_000_000)
    await asyncio.sleep(0.5)
    began = time.monotonic()
    await budget.take(400_000)
    assert time.monotonic() - began >= 0.25


def test_a_source_is_found_by_the_policy_that_its_payloads_begin_with() -> None:
    sources: dict[str, Any] = {"a": "A", "a:b": "AB"}
    assert source_of("a:1:full:x", sources) == "A"
    assert source_of("a:b:1:full:x", sources) == "AB"
    with pytest.raises(NotFoundError):
        source_of("c:1", sources)
