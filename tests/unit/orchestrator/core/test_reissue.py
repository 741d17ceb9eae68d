"""Lost leases, restarts and silent replicas: open slots are issued again, and nothing else."""

from __future__ import annotations

from collections.abc import Callable

from services.common import records
from services.orchestrator.ingest import RecordOutcome
from services.orchestrator.members import CancelGroup, Hello, PlayGroup
from services.orchestrator.progress import progress
from tests.unit.orchestrator.builders import failure, sequence, trajectory
from tests.unit.orchestrator.world import World


async def test_only_unresolved_indices_are_reissued_after_a_lost_lease(worlds: Callable[..., World]) -> None:
    world = worlds()
    lost, orders = await world.begin("lost")
    name = orders[0].task_group_id
    await world.send(trajectory(name, 1, reward=1.0), failure(name, 2))
    orders += await world.orders(lost)  # the failure returned its quota
    other = world.join("other")
    assert await world.orders(other) == []
    world.clock.now += 20.0
    world.replica_api.report("other", "1", held=other.held, num_tokens=0, emission=[])
    world.clock.now += 15.0
    await world.watch().tick()
    reissued = {order.task_group_id: order.indices for order in await world.orders(other)}
    assert reissued.pop(name) == (0, 3)
    assert set(reissued) == {order.task_group_id for order in orders[1:]}
    assert all(indices == (0, 1, 2, 3) for indices in reissued.values())
    # A record of the lost replica counts if it is the first.
    assert await world.send(trajectory(name, 0)) == [RecordOutcome.ACCEPTED]


async def test_a_restarted_orchestrator_sends_a_rejoining_replica_only_what_is_unresolved(
    worlds: Callable[..., World],
) -> None:
    world = worlds(late="drop")  # the finished sibling holds its place: no other task group is issued
    _, orders = await world.begin()
    assert len(orders) == 4
    await world.play(orders[0])
    await world.send(trajectory(orders[1].task_group_id, 2))
    await world.crash()
    again = world.join(running=[o.task_group_id for o in orders[1:]])
    sent = {o.task_group_id: o.indices for o in await world.orders(again)}
    assert sent == {
        orders[1].task_group_id: (0, 1, 3),
        orders[2].task_group_id: (0, 1, 2, 3),
        orders[3].task_group_id: (0, 1, 2, 3),
    }
    assert world.core.experience.admission.accounts["model0"].running_slots == 11
    assert world.core.experience.buffers["model0"].num_sequences == 4


async def test_a_task_group_that_is_never_done_is_taken_away(worlds: Callable[..., World]) -> None:
    world = worlds()
    replica, orders = await world.begin()
    world.clock.now += 10.0 * 3 + 61.0
    world.core.pool.join(Hello(replica_id="a", incarnation="1", num_slots=64, held=replica.held))
    await world.watch().tick()
    commands = await world.commands(replica)
    assert {c.task_group_id for c in commands if isinstance(c, CancelGroup)} == {o.task_group_id for o in orders}
    assert {c.order.task_group_id for c in commands if isinstance(c, PlayGroup)} == {o.task_group_id for o in orders}


async def test_a_task_group_that_loses_every_replica_is_given_up(worlds: Callable[..., World]) -> None:
    world = worlds(size=4, max_staleness=0)
    name = (await world.begin(incarnation="0"))[1][0].task_group_id
    for incarnation in range(1, 8):
        await world.orders(world.join(incarnation=str(incarnation)))
    assert name not in world.core.groups
    assert world.core.counters["failures_replicas_lost"] == 4


async def test_a_task_group_is_not_given_up_because_the_link_to_its_replica_flaps(worlds: Callable[..., World]) -> None:
    world = worlds(size=4, max_staleness=0)
    name = (await world.begin())[1][0].task_group_id
    for _ in range(20):
        world.clock.now += 35.0
        await world.watch().tick()  # the lease has run out
        assert world.core.pool.get("a") is None
        await world.orders(world.join(running=[name]))
    assert world.core.groups[name].num_lost == 0
    assert world.core.counters["failures_replicas_lost"] == 0
    assert await world.send(trajectory(name, 0)) == [RecordOutcome.ACCEPTED]


async def test_a_replica_that_plays_thousands_of_unknown_task_groups_can_join(worlds: Callable[..., World]) -> None:
    """As after the loss of a journal: otherwise the curation would try the same groups for ever."""
    world = worlds()
    replica = world.join(running=[f"abc-{number}" for number in range(20_000)])
    commands = await world.commands(replica)
    assert replica.mailbox is not None and not replica.mailbox.closed
    assert 0 < sum(isinstance(command, CancelGroup) for command in commands) < 1024
    await world.publish(0)
    world.train()
    assert await world.orders(replica)


async def test_a_replica_that_comes_back_with_fewer_slots_gets_nothing_until_it_has_played(
    worlds: Callable[..., World],
) -> None:
    world = worlds(max_staleness=4)
    _, orders = await world.begin(slots=8)
    given = [order.task_group_id for order in orders]
    assert len(given) == 2
    again = world.join(slots=1, running=given)
    assert {order.task_group_id for order in await world.orders(again)} == set(given), "what it plays already"
    (shown,) = progress(world.core).replicas
    assert (shown.num_slots, shown.num_running) == (1, 8)
    await world.play(orders[0])
    assert await world.orders(again) == []
    await world.play(orders[1])
    assert len(await world.orders(again)) == 1, "an idle replica plays a group that is larger than itself"


TOLD = ("task_groups_issued", "tokens_recorded", "slots_cancelled", "failures_infrastructure")


async def test_what_was_recorded_behind_the_newest_state_is_counted_again_once(worlds: Callable[..., World]) -> None:
    world = worlds()
    _, (first, second, *_) = await world.begin()
    await world.send(trajectory(first.task_group_id, 0))
    world.core.write_state()
    await world.send(trajectory(first.task_group_id, 1))
    await world.send(failure(second.task_group_id, 0))
    await world.send(failure(second.task_group_id, 1, records.TOO_OLD))
    before = {name: world.core.counters[name] for name in TOLD}
    assert all(before.values()), before
    for _ in range(2):
        await world.crash()
        assert {name: world.core.counters[name] for name in TOLD} == before


# --- the first durable record of a slot wins


async def test_first_durable_record_of_a_slot_wins_and_later_ones_are_counted(worlds: Callable[..., World]) -> None:
    world = worlds()
    name = (await world.begin())[1][0].task_group_id
    first, second = trajectory(name, 0, reward=1.0), trajectory(name, 0, reward=0.0)
    assert await world.send(first, second) == [RecordOutcome.ACCEPTED, RecordOutcome.DUPLICATE]
    assert await world.send(failure(name, 0)) == [RecordOutcome.DUPLICATE]
    assert world.core.groups[name].outcomes[0] is first
    assert world.core.counters["records_duplicate"] == 2
    await world.crash()
    outcome = world.core.groups[name].outcomes[0]
    assert not isinstance(outcome, type(failure()))
    assert outcome.reward == 1.0


async def test_unknown_and_malformed_records_are_answered_and_counted(worlds: Callable[..., World]) -> None:
    world = worlds()
    name = (await world.begin())[1][0].task_group_id
    assert await world.send(trajectory("abc-99999999", 0), trajectory("other-00000001", 0), trajectory(name, 7)) == [
        RecordOutcome.UNKNOWN,
        RecordOutcome.UNKNOWN,
        RecordOutcome.UNKNOWN,
    ]
    nan = trajectory(name, 2, reward=float("nan"))
    assert (
        await world.send(trajectory(name, 0, sequence(policy="nobody")), trajectory(name, 1, sequence(version=5)), nan)
        == [RecordOutcome.INVALID] * 3
    )
    outcomes = world.core.groups[name].outcomes
    assert [outcomes[i].reason for i in range(3)] == ["INVALID_RECORD"] * 3  # type: ignore[union-attr]
    assert "unknown policy 'nobody'" in outcomes[0].detail  # type: ignore[union-attr]
    assert "the version of a segment is 5; it must be -1 to 0, the newest" in outcomes[1].detail  # type: ignore[union-attr]
    assert world.core.counters["records_unknown"] == 3
    assert world.core.counters["records_invalid"] == 3
