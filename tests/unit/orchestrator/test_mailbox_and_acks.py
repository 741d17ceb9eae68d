from __future__ import annotations

import asyncio

import pytest

from services.common.errors import LeaseLostError
from services.orchestrator.ingest import RecordOutcome
from services.orchestrator.members import Mailbox
from services.orchestrator.services.pool import MAX_ACKS, MAX_OPEN, AckQueue
from tests.waiting import WAIT_S


async def test_a_full_mailbox_refuses_instead_of_waiting() -> None:
    mailbox: Mailbox[int] = Mailbox(capacity=2)
    assert mailbox.put(1)
    assert mailbox.put(2)
    assert not mailbox.put(3)
    assert [await mailbox.get(), await mailbox.get()] == [1, 2]


async def test_a_closed_mailbox_is_read_to_its_end() -> None:
    mailbox: Mailbox[int] = Mailbox()
    mailbox.put(1)
    mailbox.close()
    assert not mailbox.put(2)
    assert [await mailbox.get(), await mailbox.get()] == [1, None]


async def test_a_mailbox_closed_with_an_error_tells_it_at_once() -> None:
    mailbox: Mailbox[int] = Mailbox()
    mailbox.put(1)
    reading = asyncio.ensure_future(mailbox.get())
    mailbox.close(LeaseLostError("gone"))
    with pytest.raises(LeaseLostError):
        await reading


async def test_records_are_acknowledged_as_they_are_answered_and_all_before_the_end() -> None:
    acks = AckQueue()
    first, second = acks.open(1), acks.open(2)
    second(RecordOutcome.DUPLICATE)
    assert await acks.next() == [(2, RecordOutcome.DUPLICATE)]
    acks.end()
    pending = asyncio.ensure_future(acks.next())
    await asyncio.sleep(0)
    assert not pending.done()
    first(RecordOutcome.ACCEPTED)
    assert await pending == [(1, RecordOutcome.ACCEPTED)]
    assert await acks.next() == []


async def test_at_most_sixteen_are_acknowledged_at_once_and_reading_stops_when_too_many_are_open() -> None:
    acks = AckQueue()
    answers = [acks.open(number) for number in range(MAX_OPEN)]
    assert acks.full
    for answer in answers:
        answer(RecordOutcome.ACCEPTED)
    assert len(await acks.next()) == MAX_ACKS
    assert not acks.full


async def test_a_message_that_is_not_full_lingers_until_the_stream_ends() -> None:
    acks: AckQueue[int] = AckQueue(linger_s=600.0)
    acks.open(0)(0)
    async with asyncio.timeout(WAIT_S):
        assert await acks.next() == [(0, 0)]
        lingering = asyncio.ensure_future(acks.linger())
        acks.open(1)(1)
        await asyncio.sleep(0)
        assert not lingering.done()
        acks.end()
        await lingering
        assert await acks.next() == [(1, 1)]
        assert await acks.next() == []
    await AckQueue[int](linger_s=0.01).linger()
