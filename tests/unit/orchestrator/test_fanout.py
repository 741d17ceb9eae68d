"""Sources of a version: every shard has one owner, and no plan names an unreachable replica."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.common.errors import InvalidRequestError
from services.common.pb import pool_pb2
from services.common.records import FetchPlan, WeightVersion
from services.common.wire import read, write
from services.orchestrator.versions import MAX_HOLDERS, FanOut, Receiver

BASE = (3, "d3")
VERSION = WeightVersion(policy="p", number=4, digest="d4", sources=("publisher:1",))


def replicas(count: int, *, base: tuple[int, str] = BASE, first: int = 0) -> list[Receiver]:
    return [Receiver(replica_id=f"r{n}", address=f"h{n}:1", base=base) for n in range(first, first + count)]


receivers = st.lists(
    st.tuples(st.booleans(), st.sampled_from([(3, "d3"), (2, "d2"), (-1, "")])), max_size=24
).map(
    lambda drawn: [
        Receiver(replica_id=f"r{n}", address=f"h{n}:1" if reachable else "", base=base)
        for n, (reachable, base) in enumerate(drawn)
    ]
)  # fmt: skip


@given(members=receivers, max_relays=st.integers(0, 20))
def test_every_shard_has_one_owner_who_can_be_reached_and_wants_the_same(
    members: list[Receiver], max_relays: int
) -> None:
    fanout = FanOut({"p": max_relays})
    fanout.published("p", members)
    plans = {member: plan for member in members if (plan := fanout.take_plan("p", member.replica_id)) is not None}
    for member, plan in plans.items():
        assert 1 <= len(plan.relays) <= max_relays and "" not in plan.relays
        assert len(set(plan.relays)) == len(plan.relays)
        same = [other for other in plans if other.base == member.base]
        assert all(plans[other].relays == plan.relays for other in same)
        owners = Counter(plans[other].own_shard for other in same if plans[other].own_shard is not None)
        assert owners == Counter(range(len(plan.relays)))
        if plan.own_shard is not None:
            assert plan.relays[plan.own_shard] == member.address
        assert {other.address for other in same} >= set(plan.relays)


@given(members=receivers)
def test_the_publisher_sends_one_copy_to_each_group_that_shares_a_base(members: list[Receiver]) -> None:
    fanout = FanOut({"p": 16})
    fanout.published("p", members)
    copies = 0.0
    for member in members:
        plan = fanout.take_plan("p", member.replica_id)
        if plan is None:
            group = [other for other in members if other.base == member.base]
            assert len(group) == 1 or not any(other.address for other in group)
        elif plan.own_shard is not None:
            copies += 1 / len(plan.relays)
    shared = {m.base for m in members if sum(o.base == m.base for o in members) > 1}
    reachable = {m.base for m in members if m.address}
    assert abs(copies - len(shared & reachable)) < 1e-9


@given(
    plan=st.builds(
        FetchPlan, relays=st.lists(st.text(min_size=1), min_size=1).map(tuple), own_shard=st.none() | st.just(0)
    )
)
def test_a_plan_crosses_the_wire_unchanged(plan: FetchPlan) -> None:
    assert read(FetchPlan, write(plan, pool_pb2.FetchPlan())) == plan


def test_a_plan_that_names_a_shard_it_does_not_have_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="names shard 2"):
        read(FetchPlan, pool_pb2.FetchPlan(relays=["a:1", "b:1"], own_stripe=2))


def test_a_replica_alone_has_no_plan() -> None:
    fanout = FanOut({"p": 16})
    fanout.published("p", [*replicas(1), *replicas(1, base=(2, "d2"), first=1)])
    assert fanout.take_plan("p", "r0") is None and fanout.take_plan("p", "r1") is None


def test_a_plan_is_told_once_and_is_void_with_the_next_version() -> None:
    fanout = FanOut({"p": 16})
    fanout.published("p", replicas(3))
    assert fanout.take_plan("p", "r0") is not None
    assert fanout.take_plan("p", "r0") is None
    fanout.published("p", [])
    assert fanout.take_plan("p", "r1") is None


def test_late_receivers_spread_over_the_holders_and_end_at_the_publisher() -> None:
    fanout = FanOut({"p": 16})
    holders = [f"h{n}:1" for n in range(5)]
    named = [fanout.sources(VERSION, "h9:1", holders) for _ in range(10)]
    assert all(len(sources) == MAX_HOLDERS + 1 and sources[-1] == "publisher:1" for sources in named)
    assert Counter(sources[0] for sources in named) == Counter(dict.fromkeys(holders, 2))


def test_nobody_is_told_to_fetch_from_itself_or_from_where_nobody_listens() -> None:
    fanout = FanOut({"p": 16})
    assert fanout.sources(VERSION, "h0:1", ["h0:1", ""]) == ("publisher:1",)


def test_without_relays_everybody_fetches_from_the_publisher() -> None:
    fanout = FanOut({"p": 0})
    fanout.published("p", replicas(4))
    assert fanout.take_plan("p", "r0") is None
    assert fanout.sources(VERSION, "h9:1", ["h0:1"]) == ("publisher:1",)
