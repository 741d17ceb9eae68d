"""Replicas: leases, work and mailboxes, and the acknowledgements of their records."""

from __future__ import annotations

import asyncio

import pytest

from services.common.errors import CapacityError, LeaseLostError
from services.orchestrator.ingest import RecordOutcome
from services.orchestrator.members import (
    MOST_REPORT_S,
    MOST_REPORTS_PER_S,
    REJOIN_S,
    REPORT_S,
    CancelGroup,
    Held,
    Hello,
    Mailbox,
    ReplicaPool,
)
from services.orchestrator.services.pool import MAX_ACKS, MAX_OPEN, AckQueue
from tests.clock import Clock
from tests.unit.orchestrator.builders import group

# --- pool


def hello(name: str = "a", incarnation: str = "1", num_slots: int = 8) -> Hello:
    return Hello(replica_id=name, incarnation=incarnation, num_slots=num_slots, held={"model0": Held(0, "d0")})


def pool_with_orphans() -> tuple[ReplicaPool, Clock, list[str]]:
    clock = Clock()
    orphans: list[str] = []
    pool = ReplicaPool(30.0, clock)
    pool.on_orphaned = orphans.extend
    return pool, clock, orphans


def report(pool: ReplicaPool, name: str = "a", incarnation: str = "1") -> None:
    pool.report(name, incarnation, held={"model0": Held(0, "d0")}, num_tokens=0)


def test_what_a_replica_played_whose_stream_broke_is_given_away_once_it_has_been_silent() -> None:
    pool, clock, orphans = pool_with_orphans()
    replica = pool.join(hello())
    pool.assign(replica, group(size=2))
    assert replica.mailbox is not None
    clock.now = 10.0
    pool.stream_ended(replica, replica.mailbox)
    clock.now = 10.0 + REJOIN_S - 0.1
    assert pool.give_away() == [] and orphans == []
    clock.now = 10.0 + REJOIN_S
    assert pool.give_away() == [replica] and orphans == ["g"]
    assert pool.owner("g") is None and not replica.assignments
    assert pool.give_away() == [], "once"
    other = pool.join(hello("b"))
    pool.assign(other, group(size=2))
    assert pool.join(hello()) is replica, "its lease goes on"
    assert orphans == ["g"]


def test_a_replica_that_reports_or_rejoins_after_its_stream_broke_keeps_its_work() -> None:
    for heard in (report, lambda pool: pool.join(hello())):
        pool, clock, orphans = pool_with_orphans()
        replica = pool.join(hello())
        pool.assign(replica, group(size=2))
        assert replica.mailbox is not None
        pool.stream_ended(replica, replica.mailbox)
        clock.now = 2.0
        heard(pool)
        clock.now = 20.0
        assert pool.give_away() == [] and orphans == []
        assert replica.assignments["g"].open_slots == {0, 1}


async def test_a_new_incarnation_ends_the_older_lease_at_once() -> None:
    pool, _, orphans = pool_with_orphans()
    old = pool.join(hello())
    pool.assign(old, group(size=1))
    stream = old.mailbox
    new = pool.join(hello(incarnation="2"))
    assert orphans == ["g"]
    assert old.mailbox is None
    assert stream is not None
    with pytest.raises(LeaseLostError, match="elsewhere") as told:
        await stream.get()
    assert told.value.metadata["holder"] == "2", "not told like a lease that ran out, after which one joins again"
    assert new.num_free == 8
    with pytest.raises(LeaseLostError):
        report(pool, incarnation="1")


async def test_a_replica_that_does_not_read_loses_its_stream_and_not_its_lease() -> None:
    pool, _, orphans = pool_with_orphans()
    replica = pool.join(hello())
    mailbox = replica.mailbox
    assert mailbox is not None
    while pool.send(replica, CancelGroup("g", "")):
        pass
    assert replica.mailbox is None
    with pytest.raises(CapacityError, match="join again"):
        await mailbox.get()
    assert pool.get("a") is replica
    assert orphans == []


def test_a_drained_replica_that_left_early_is_gone_once_its_last_slot_is_resolved() -> None:
    pool, _, orphans = pool_with_orphans()
    replica = pool.join(hello())
    pool.assign(replica, group(size=1))
    pool.drain_all("test")
    assert replica.mailbox is not None
    pool.stream_ended(replica, replica.mailbox)
    assert pool.get("a") is replica
    pool.resolved("g", 0)
    assert pool.get("a") is None
    assert orphans == []


def test_a_larger_pool_is_asked_to_report_less_often_and_several_times_in_a_lease() -> None:
    pool, clock, _ = pool_with_orphans()
    asked = []
    for number in range(2000):
        pool.join(hello(f"r{number}"))
        asked.append(pool.report_every_s)
    assert asked[0] == asked[399] == REPORT_S and asked[-1] == MOST_REPORT_S <= pool.lease_s / 6
    assert 1000 / asked[999] <= MOST_REPORTS_PER_S
    assert ReplicaPool(2.0, clock).report_every_s == REPORT_S


def test_the_freest_replica_that_serves_and_fits_is_chosen() -> None:
    pool = ReplicaPool(30.0, Clock())
    for number, name in enumerate("abcde"):
        held = {"p": Held(number % 2, "d")}
        pool.join(Hello(replica_id=name, incarnation="1", num_slots=8 + number, held=held))
    assert pool.freest(1, lambda replica: True) is pool.get("e")
    pool.assign(pool.replicas["e"], group(size=9))
    assert pool.freest(1, lambda replica: replica.held["p"].number == 0) is pool.get("c")
    assert pool.freest(11, lambda replica: replica.replica_id != "d") is pool.get("c"), "idle: a larger group fits"
    pool.drain_all("test")
    assert pool.freest(1, lambda replica: True) is None


# --- mailboxes


async def test_a_full_mailbox_refuses_instead_of_waiting() -> None:
    mailbox: Mailbox[int] = Mailbox(capacity=2)
    assert mailbox.put(1)
    assert mailbox.put(2)
    assert not mailbox.put(3)
    mailbox.close()
    assert [await mailbox.get(), await mailbox.get(), await mailbox.get()] == [1, 2, None], "it is read to its end"


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
