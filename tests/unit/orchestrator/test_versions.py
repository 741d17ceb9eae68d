"""Versions: their ledger, who fetches a new one from whom, and the order in which a large pool hears of it."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.common.errors import InvalidRequestError, VersionConflictError
from services.common.pb import pool_pb2
from services.common.records import FetchPlan, WeightVersion
from services.common.wire import read
from services.orchestrator.members import AnnounceVersion, Held, Replica, ReplicaCommand
from services.orchestrator.versions import AT_ONCE, MAX_HOLDERS, MAX_RELAYS, NEXT_S, FanOut, VersionLedger
from tests.unit.orchestrator.world import World
from tests.waiting import WAIT_S


def version(number: int, digest: str = "", *sources: str) -> WeightVersion:
    return WeightVersion(policy="p", number=number, digest=digest or f"d{number}", sources=sources)


# --- the ledger --------------------------------------------------------------------------------------------------------


def test_a_ledger_refuses_other_digests_and_gaps_and_refreshes_addresses() -> None:
    ledger = VersionLedger("p")
    with pytest.raises(InvalidRequestError, match="version 1 of p cannot follow version -1"):
        ledger.record(version(1))
    assert ledger.record(version(0, "", "old:1"))
    with pytest.raises(VersionConflictError, match="has digest d0, not other"):
        ledger.record(version(0, "other"))
    assert ledger.versions[0].digest == "d0"
    assert not ledger.record(version(0, "", "new:1")) and not ledger.record(version(0))
    assert ledger.newest is not None and ledger.newest.sources == ("new:1",)


# --- sources -----------------------------------------------------------------------------------------------------------


def replica(number: int, held: int = 3, *, reachable: bool = True) -> Replica:
    address = f"h{number}:1" if reachable else ""
    return Replica(
        replica_id=f"r{number}", incarnation="1", lease_until=0.0, weights_address=address, held={"p": Held(held, "d")}
    )


receivers = st.lists(st.tuples(st.sampled_from([3, 2, -1]), st.booleans()), max_size=60).map(
    lambda drawn: [replica(n, held, reachable=reachable) for n, (held, reachable) in enumerate(drawn)]
)


@given(members=receivers)
def test_every_shard_has_one_owner_who_can_be_reached_and_holds_the_same_base(members: list[Replica]) -> None:
    fanout = FanOut()
    fanout.published("p", members)
    for base in {member.held["p"] for member in members}:
        same = [member for member in members if member.held["p"] == base]
        plans = {m.weights_address or m.replica_id: fanout.plans["p"].get(m.replica_id) for m in same}
        addresses = {m.weights_address for m in same if m.weights_address}
        if len(same) == 1 or not addresses:
            assert set(plans.values()) == {None}
            continue
        (relays,) = {plan.relays for plan in plans.values() if plan is not None}
        assert set(relays) <= addresses and len(set(relays)) == len(relays) == min(MAX_RELAYS, len(addresses))
        owners = {plan.own_shard: who for who, plan in plans.items() if plan is not None and plan.own_shard is not None}
        assert owners == dict(enumerate(relays)), "the publisher sends one copy"


def test_late_receivers_spread_over_the_holders_and_end_at_the_publisher() -> None:
    fanout, newest = FanOut(), version(4, "", "publisher:1")
    holders = [f"h{n}:1" for n in range(5)]
    named = [fanout.sources(newest, "h9:1", holders) for _ in range(10)]
    assert all(len(sources) == MAX_HOLDERS + 1 and sources[-1] == "publisher:1" for sources in named)
    assert Counter(sources[0] for sources in named) == Counter(dict.fromkeys(holders, 2))
    assert fanout.sources(newest, "h0:1", ["h0:1", ""]) == ("publisher:1",)


def test_a_plan_that_names_a_shard_it_does_not_have_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="names shard 2"):
        read(FetchPlan, pool_pb2.FetchPlan(relays=["a:1", "b:1"], own_stripe=2))


# --- announcements -----------------------------------------------------------------------------------------------------


async def test_a_large_pool_hears_of_a_version_a_part_at_a_time_and_of_the_newest_only(
    worlds: Callable[..., World],
) -> None:
    world = worlds()
    await world.publish(0)
    replicas = [world.join(f"r{number:03d}", slots=1) for number in range(3 * AT_ONCE)]
    await world.publish(1)
    told = [replica for replica in replicas if replica.moving]
    assert len(told) < len(replicas), "not all at one moment"
    world.core.pool.expect(replicas[-1].replica_id, "another life")  # replicas that left hear of no version
    await world.publish(2)
    async with asyncio.timeout(WAIT_S):
        while not all(replica.announced == {"model0": (2, world.clock.now)} for replica in replicas[:-1]):
            await asyncio.sleep(NEXT_S)
    for replica in (replicas[0], replicas[-2]):
        heard = [c.version.number for c in await world.commands(replica) if isinstance(c, AnnounceVersion)]
        assert heard in ([2], [1, 2])
    assert replicas[-1].announced.get("model0", (0, 0.0))[0] < 2


async def test_relays_hear_of_a_version_before_those_that_fetch_from_them(
    worlds: Callable[..., World],
) -> None:
    world = worlds()
    await world.publish(0)
    # Relays are the first by address, here those that joined last.
    replicas = [
        world.join(f"r{number:03d}", slots=1, weights_address=f"h{1000 - number:04d}:1")
        for number in range(2 * AT_ONCE)
    ]
    told: list[str] = []
    send = world.core.pool.send

    def noted(replica: Replica, version: ReplicaCommand) -> bool:
        told.append(replica.replica_id)
        return send(replica, version)

    world.core.pool.send = noted  # type: ignore[method-assign]
    await world.publish(1)
    async with asyncio.timeout(WAIT_S):
        while len(told) < len(replicas):
            await asyncio.sleep(NEXT_S)
    plans = {r.replica_id: c.plan for r in replicas for c in await world.commands(r) if isinstance(c, AnnounceVersion)}
    relays = {name for name, plan in plans.items() if plan is not None and plan.own_shard is not None}
    assert len(relays) > 1 and relays <= {r.replica_id for r in replicas[-AT_ONCE:]}
    assert set(told[: len(relays)]) == relays
    world.core.dispatcher.announcer.sync(replicas[-1], again=True)
    [command] = [c for c in await world.commands(replicas[-1]) if isinstance(c, AnnounceVersion)]
    assert command.plan is None, "a second announcement means that the plan was lost"
