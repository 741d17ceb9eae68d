"""A replica in the pool over real gRPC: broken streams, lost leases, repeated orders, drain."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.common.errors import DeadlineError, InvalidRequestError, LeaseLostError
from services.common.pb import pool_pb2, pool_pb2_grpc
from services.common.records import Purpose
from services.common.rpc.client import channel
from services.common.telemetry.accounts import TimeAccount
from services.inference.gateway import GatewayClient
from services.inference.loading import LoadedPolicy
from services.inference.records_out import TrajectorySender
from services.inference.replica import MOST_PERIOD_S, EmissionLog, Replica, ReplicaIdentity
from services.inference.rollouts import RolloutPlayer
from services.inference.weights.updater import AnnouncedVersions
from services.inference.workflows.single import SingleTurn, SingleTurnSettings
from tests.integration.inference.peers import FakeOrchestrator, indices_of
from tests.unit.inference.fakes import make_order, served_policy
from tests.waiting import WAIT_S, until


class Member:
    """All parts of a replica but its process."""

    def __init__(self, replica: Replica, player: RolloutPlayer, sender: TrajectorySender) -> None:
        self.replica = replica
        self.player = player
        self.sender = sender
        self.membership: asyncio.Task[None]


@asynccontextmanager
async def joined(
    orchestrator: FakeOrchestrator, *, engine: dict[str, Any] | None = None, **settings: float
) -> AsyncIterator[Member]:
    emissions = EmissionLog()
    policy = await served_policy(["hello"], version=-1, on_tokens=emissions.on_tokens, **(engine or {}))
    weights = AnnouncedVersions("model0", policy.engine)
    account = TimeAccount("replica/a", num_lanes=8)
    gateway = GatewayClient(account)
    async with channel(orchestrator.address) as connection:
        sender = TrajectorySender(pool_pb2_grpc.PoolServiceStub(connection), replica_id="a", incarnation="i1")
        player = RolloutPlayer(
            workflows=dict.fromkeys(
                Purpose, SingleTurn(SingleTurnSettings(reward="tests.integration.inference.peers:one"))
            ),
            policies={"model0": policy},
            gateway=gateway,
            sink=sender,
            replica_id="a",
            num_slots=8,
            infra_retries=0,
            account=account,
        )
        policies = {"model0": LoadedPolicy(served=policy, weights=weights)}
        identity = ReplicaIdentity(replica_id="a", incarnation="i1", num_slots=8)
        replica = Replica(
            connection,
            identity,
            policies=policies,
            player=player,
            gateway=gateway,
            emissions=emissions,
            account=account,
            **{"report_period_s": 0.05, **settings},
        )
        member = Member(replica, player, sender)
        member.membership = asyncio.create_task(replica.run())
        others = [asyncio.create_task(work) for work in (sender.run(), weights.run())]
        try:
            yield member
        finally:
            for task in (member.membership, *others):
                task.cancel()
            await asyncio.gather(member.membership, *others, return_exceptions=True)
            await player.close()
            await gateway.stop()


async def holds(orchestrator: FakeOrchestrator, number: int) -> None:
    orchestrator.announce("model0", number)
    await until(
        lambda: any(v.number == number for r in orchestrator.reports[-1:] for v in r.held_versions), f"version {number}"
    )


async def test_a_replica_joins_reports_and_plays(orchestrator: FakeOrchestrator) -> None:
    async with joined(orchestrator):
        await until(lambda: orchestrator.reports)
        assert orchestrator.joins[0].held_versions[0].number == -1
        await holds(orchestrator, 0)
        orchestrator.order(make_order(indices=(0, 3)))
        await until(lambda: len(orchestrator.records) == 2)
        report = orchestrator.reports[-1]
        assert (report.replica_id, report.incarnation) == ("a", "i1")
        await until(lambda: orchestrator.reports[-1].num_generated_tokens > 0)
        assert any(r.emission_intervals for r in orchestrator.reports)
        slots, weights = orchestrator.reports[-1].accounts
        assert (slots.component, slots.num_lanes, weights.component) == ("replica/a", 8, "replica/a/weights/model0")
        assert {"generating", "waiting for task groups"} <= {a.activity for a in slots.activities}
    trajectory = orchestrator.records[0].trajectory
    assert trajectory.reward == 1.0
    assert {s.weight_version for s in trajectory.sequences[0].segments} == {-1, 0}


async def test_a_broken_stream_is_joined_again_by_the_same_incarnation(orchestrator: FakeOrchestrator) -> None:
    async with joined(orchestrator, engine={"latency_s": 1.0}) as member:
        await holds(orchestrator, 0)
        orchestrator.order(make_order())
        await until(lambda: member.player.num_running == 4)
        await orchestrator.stop()
        await orchestrator.start()
        await until(lambda: len(orchestrator.joins) == 2)
        again = orchestrator.joins[1]
        assert again.incarnation == "i1"
        assert list(again.running_task_group_ids) == ["g0"]
        assert again.held_versions[0].number == 0
        orchestrator.order(make_order())  # a restarted orchestrator issues unresolved slots again
        await until(lambda: len(orchestrator.records) >= 4)
        await member.player.wait_until_idle()
        await member.sender.wait_until_acknowledged(10.0)
    assert sorted(indices_of(orchestrator.slots)) == [0, 1, 2, 3]
    assert member.player.counters.repeated == 4


async def test_a_lost_lease_is_taken_anew(orchestrator: FakeOrchestrator) -> None:
    async with joined(orchestrator) as member:
        await until(lambda: orchestrator.reports)
        orchestrator.report_error = LeaseLostError("run out")
        await until(lambda: len(orchestrator.joins) == 2)
        orchestrator.report_error = None
        num_reports = len(orchestrator.reports)
        await until(lambda: len(orchestrator.reports) > num_reports)
        assert not member.membership.done()


async def test_a_replica_id_that_another_process_claims_ends_membership(orchestrator: FakeOrchestrator) -> None:
    async with joined(orchestrator) as member:
        for _ in range(3):
            orchestrator.end_stream(LeaseLostError("started again elsewhere", holder="another incarnation"))
        with pytest.raises(LeaseLostError, match="--replica-id"):
            async with asyncio.timeout(WAIT_S):
                await member.membership


async def test_a_refused_join_ends_membership(orchestrator: FakeOrchestrator) -> None:
    orchestrator.join_error = InvalidRequestError("num_slots must be 1 or more")
    async with joined(orchestrator) as member:
        with pytest.raises(InvalidRequestError, match="num_slots"):
            async with asyncio.timeout(WAIT_S):
                await member.membership


async def test_an_orchestrator_that_stays_away_is_given_up_by_name(orchestrator: FakeOrchestrator) -> None:
    async with joined(orchestrator, away_timeout_s=0.3) as member:
        await until(lambda: orchestrator.reports)
        await orchestrator.stop()
        with pytest.raises(DeadlineError, match="orchestrator has been away"):
            async with asyncio.timeout(WAIT_S):
                await member.membership


async def test_reports_come_as_seldom_as_they_are_asked_for_within_bounds(orchestrator: FakeOrchestrator) -> None:
    orchestrator.next_report_s = 3600.0
    async with joined(orchestrator) as member:
        await holds(orchestrator, 0)
        await until(lambda: member.replica.report_period_s == MOST_PERIOD_S, "a longer one would lose the lease")
        orchestrator.next_report_s = -1.0
        await holds(orchestrator, 1)  # reported at once, independent of the period
        await until(lambda: member.replica.report_period_s == 0.05)
        told = len(orchestrator.reports)
        await until(lambda: len(orchestrator.reports) > told + 1)


async def test_a_cancelled_group_is_not_reported_and_frees_its_slots(orchestrator: FakeOrchestrator) -> None:
    async with joined(orchestrator, engine={"latency_s": 60.0}) as member:
        await holds(orchestrator, 0)
        orchestrator.order(make_order("g0"))
        orchestrator.order(make_order("g1", indices=(0,)))
        await until(lambda: member.player.num_running == 5)
        orchestrator.cancel("g0")
        await until(lambda: member.player.num_running == 1)
        await until(lambda: list(orchestrator.reports[-1].running_task_group_ids) == ["g1"])
        assert orchestrator.records == []


async def test_an_order_that_cannot_be_read_fails_its_slots_and_nothing_else(orchestrator: FakeOrchestrator) -> None:
    async with joined(orchestrator) as member:
        await holds(orchestrator, 0)
        orchestrator._commands.put_nowait(
            pool_pb2.JoinPoolResponse(run_task_group=pool_pb2.RunTaskGroup(task_group_id="bad", indices=[0]))
        )
        orchestrator.order(make_order(indices=(0,)))
        await until(lambda: len(orchestrator.records) == 2)
        assert not member.membership.done()
    assert sorted(orchestrator.slots) == [("bad", 0), ("g0", 0)]
    (failure,) = [r.failure for r in orchestrator.records if r.WhichOneof("record") == "failure"]
    assert failure.reason == "INVALID_REQUEST"


async def test_a_drained_replica_takes_nothing_new_and_keeps_its_lease(orchestrator: FakeOrchestrator) -> None:
    async with joined(orchestrator, engine={"latency_s": 0.5}) as member:
        await holds(orchestrator, 0)
        orchestrator.order(make_order())
        await until(lambda: member.player.num_running == 4)
        orchestrator.drain()
        orchestrator.end_stream()
        await until(lambda: member.replica.drain_requested.is_set())
        num_reports = len(orchestrator.reports)
        await until(lambda: len(orchestrator.reports) > num_reports + 2)
        await member.player.wait_until_idle()
        await member.sender.wait_until_acknowledged(10.0)
        member.replica.leave()
        async with asyncio.timeout(WAIT_S):
            await member.membership
    assert sorted(indices_of(orchestrator.slots)) == [0, 1, 2, 3]
    assert len(orchestrator.joins) == 1


# -- Intervals in which tokens came, and shares of waiting.


def intervals(log: EmissionLog, times: list[float]) -> list[tuple[float, float]]:
    for at in times:
        log.on_tokens(1, at)
    return log.take()


def test_an_interval_goes_on_over_a_report_without_a_hole() -> None:
    log = EmissionLog()
    assert intervals(log, [1.0, 1.02]) == [(1.0, 1.02)]
    assert log.take() == []
    assert intervals(log, [1.05]) == [(1.02, 1.05)]
    assert intervals(log, [3.0]) == [(3.0, 3.0)]


@given(
    step_s=st.floats(0.001, 5.0),
    bursts=st.lists(st.tuples(st.integers(4, 60), st.floats(8.0, 100.0)), min_size=3, max_size=12),
    report_s=st.floats(1.0, 10.0),
)
def test_the_intervals_cover_the_time_of_generation_whatever_a_decoding_step_takes(
    step_s: float, bursts: list[tuple[int, float]], report_s: float
) -> None:
    """Bursts of tokens, one each step, with pauses of 8 steps or more between them; reports at intervals."""
    log, now, reported_at = EmissionLog(), 1000.0, 1000.0
    found: list[tuple[float, float]] = []
    generating = 0.0
    for number, (num_steps, pause_steps) in enumerate(bursts):
        for _ in range(num_steps if number else num_steps + 12):
            now += step_s
            log.on_tokens(1, now)
            if now - reported_at > report_s:
                found += log.take()
                reported_at = now
        if number:  # the first burst teaches the log what a step takes
            generating += (num_steps - 1) * step_s
        now += max(pause_steps * step_s, 0.2)
    found += log.take()
    assert all(a[1] <= b[0] for a, b in itertools.pairwise(found))
    covered = sum(end - begin for begin, end in found)
    first = (bursts[0][0] + 11) * step_s
    assert generating * 0.99 <= covered + 1e-6 <= (generating + first) * 1.01 + 2e-6
