"""Rollouts that outlive ``max_staleness``, in a live core and after its recovery, in every mode."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from pydantic import ValidationError

from services.common.config.training import BatchConfig
from services.common.errors import DeadlineError
from services.common.records import TOO_OLD, Segment, StepFact, StopReason, TaskGroupOrder, TokenSequence
from services.orchestrator.buffer.assembly import Batch
from services.orchestrator.buffer.batches import ExperiencePipeline
from services.orchestrator.ingest import RecordOutcome
from services.orchestrator.journal import entries as records
from services.orchestrator.members import CancelGroup, Held, Replica
from tests.unit.common.test_serde import same
from tests.unit.orchestrator.builders import group as task_group
from tests.unit.orchestrator.builders import trajectory
from tests.unit.orchestrator.damage import loaded
from tests.unit.orchestrator.world import World

MODES = ["keep", "mask", "wait", "drop"]


def spanning(reward: float, *versions: int) -> TokenSequence:
    """Two tokens of each version."""
    segments = (Segment.environment([1, 2]), *(Segment.policy([3, 4], [-0.5, -0.25], v) for v in versions))
    return TokenSequence(policy="model0", segments=segments, reward=reward, stop_reason=StopReason.STOP)


async def finish(world: World, order: TaskGroupOrder, index: int, *versions: int) -> None:
    reward = float(index % 2)
    await world.send(trajectory(order.task_group_id, index, spanning(reward, *versions), reward=reward))


async def step(world: World, replica: Replica, number: int, timeout_s: float = 5.0) -> Batch:
    """One training step: its batch, its version, and the replica on that version."""
    batch = await world.trainer_api.pull_batch("model0", number, timeout_s)
    await world.publish(number)
    world.report(replica, number)
    return batch


async def straggling(world: World) -> tuple[Replica, TaskGroupOrder]:
    """Version 1 is out, and a group of version 0 has one open slot: with max_staleness 1 the group is due."""
    replica, (slow, *others) = await world.begin()
    for index in range(3):
        await finish(world, slow, index, 0)
    for order in others:
        for index in order.indices:
            await finish(world, order, index, 0)
    await step(world, replica, 1)
    for order in await world.orders(replica):
        for index in order.indices:
            await finish(world, order, index, 1)
    return replica, slow


@pytest.mark.parametrize("late", MODES)
async def test_a_batch_is_the_same_after_a_restart_whatever_becomes_of_late_tokens(
    worlds: Callable[..., World], late: str
) -> None:
    world = worlds(run={"steps": 9}, late=late, max_staleness=1, size=12)
    replica, orders = await world.begin()
    slow = orders[0]
    for order in orders[1:]:
        for index in order.indices:
            await finish(world, order, index, 0)
    for index in range(2):
        await finish(world, slow, index, 0)
    await step(world, replica, 1)
    for order in await world.orders(replica):
        for index in order.indices:
            await finish(world, order, index, 1)
    await finish(world, slow, 2, 0, 1)
    await finish(world, slow, 3, 0, 1)
    batches = [await step(world, replica, 2)]
    last = await world.orders(replica)
    for order in last:
        await finish(world, order, 0, 0, 1, 2)
        for index in order.indices[1:]:
            await finish(world, order, index, 2)
    batches.append(await step(world, replica, 3))
    for order in await world.orders(replica):
        for index in order.indices:
            await finish(world, order, index, 3)
    batches.append(await step(world, replica, 4))
    entries = {e.sequence_id: e for e in batches[0].record.entries}
    assert {entries[f"{slow.task_group_id}/{index}/0"].group_size for index in range(4)} == {4}
    oldest = {f"{order.task_group_id}/0/0" for order in last}  # their first tokens are of version 0
    seen: set[str] = set()
    for batch in batches[1:]:
        record, version = batch.record, batch.record.training_step - 1
        entries = {
            e.sequence_id: e for e in record.entries if e.sequence_id.split("/")[0] in {n.split("/")[0] for n in oldest}
        }
        seen |= entries.keys()
        assert {e.group_size for e in entries.values()} <= {4}, "statistics are of the whole group"
        trained = sum(m.num_trained_tokens for m in record.minibatches)
        assert trained == sum(s.num_trained_tokens for s in batch.sequences.values()), "denominators"
        assert record.statistics[StepFact.TOKENS_MASKED] == sum(e.num_masked_tokens for e in record.entries)
        for name in entries.keys() & oldest:
            young = 1 if late == "mask" else version  # the age of its oldest token that is trained
            assert entries[name].staleness == young
            assert entries[name].num_masked_tokens == (2 * (version - 1) if late == "mask" else 0)
    assert len(seen) >= 6, "their siblings were trained"
    if late == "drop":
        assert not oldest & seen
        assert world.core.counters["sequences_expired"] >= len(oldest)
    else:
        assert {name for name in oldest if name.split("/")[0] + "/1/0" in seen} == oldest & seen
    before = [(b.record, b.share(0, 1)) for b in batches]
    await world.crash()
    for number, (record, shared) in enumerate(before, start=2):
        again = await world.pull(number)
        assert again.record == record and same(again.share(0, 1), shared)


async def test_drop_cancels_what_could_only_be_dropped_and_trains_its_siblings(worlds: Callable[..., World]) -> None:
    world = worlds(run={"steps": 9}, late="drop", max_staleness=1)
    replica, slow = await straggling(world)
    assert world.core.groups[slow.task_group_id].born == {"model0": 0}
    batch = await world.pull(2)
    mine = [e for e in batch.record.entries if e.sequence_id.startswith(f"{slow.task_group_id}/")]
    assert [(e.staleness, e.group_size) for e in mine] == [(1, 3)] * 3, "the last step that may train them"
    assert [c.task_group_id for c in await world.commands(replica) if isinstance(c, CancelGroup)] == [
        slow.task_group_id
    ]
    assert slow.task_group_id not in world.core.groups
    assert slow.task_group_id not in replica.assignments
    assert world.core.counters["slots_cancelled"] == 1
    assert world.core.ingest.failures_in_a_row == 0, "nothing failed"
    assert batch.record.statistics[StepFact.SLOTS_CANCELLED] == 1
    assert batch.record.statistics["failures"] == 0
    failures = loaded(world.run_dir, records.FAILURE)
    assert [(f["task_group_id"], f["index"], f["reason"]) for f in failures] == [(slow.task_group_id, 3, TOO_OLD)]
    await world.crash()
    assert slow.task_group_id not in world.core.groups
    again = await world.pull(2)
    assert again.record == batch.record


@pytest.mark.parametrize(
    "late", ["keep", "wait"]
)  # in the other modes the last batch waits for the group: its siblings count
async def test_what_is_played_when_the_last_batch_is_put_together_is_cancelled(
    worlds: Callable[..., World], late: str
) -> None:
    """No batch can take the group any more, so the dispatcher cancels the group while the last step is computed."""
    world = worlds(run={"steps": 2}, late=late, max_staleness=2)
    replica, slow = await straggling(world)
    assert slow.task_group_id in world.core.groups
    await world.pull(2)
    cancelled = [c.task_group_id for c in await world.commands(replica) if isinstance(c, CancelGroup)]
    assert slow.task_group_id in cancelled
    assert world.core.groups == {} and replica.assignments == {}
    account = world.core.experience.admission.accounts["model0"]
    assert (account.running_slots, account.unfinished) == (0, 0)
    assert not account.has_room(), "and nothing is issued in its place"
    assert await finish_again(world, slow) == [RecordOutcome.DUPLICATE]
    again = await world.pull(2)
    await world.crash()
    assert world.core.groups == {}
    assert (await world.pull(2)).record == again.record
    await world.publish(2)


async def finish_again(world: World, order: TaskGroupOrder) -> list[RecordOutcome]:
    return await world.send(trajectory(order.task_group_id, 3, spanning(1.0, 0), reward=1.0))


async def test_wait_trains_a_due_group_first_and_waits_for_it_no_longer_than_its_share(
    worlds: Callable[..., World],
) -> None:
    world = worlds(run={"steps": 9}, late="wait", max_staleness=1)
    _, slow = await straggling(world)
    batches = world.core.batches["model0"]
    batches.late.step_s = 20.0  # taken by step 1
    pull = asyncio.ensure_future(world.trainer_api.pull_batch("model0", 2, 30.0))
    await world.settle()
    assert not pull.done() and batches.late.num_waited_for == 1
    assert batches.late.left_s() == 5.0
    world.clock.now += 4.0
    await finish(world, slow, 3, 0)
    batch = await pull
    assert batch.record.statistics[StepFact.LATE_WAIT_S] == 4.0
    first = {name.split("/")[0] for name in (e.sequence_id for e in batch.record.entries)}
    assert slow.task_group_id in first
    assert max(e.staleness for e in batch.record.entries) == 1, "it came before it was too old"


async def test_wait_is_over_after_its_share_and_happens_once(worlds: Callable[..., World]) -> None:
    world = worlds(run={"steps": 9}, late="wait", max_staleness=1)
    replica, slow = await straggling(world)
    late = world.core.batches["model0"].late
    late.step_s = 20.0
    with pytest.raises(DeadlineError, match="batch of step 2"):
        await world.trainer_api.pull_batch("model0", 2, 0.05)
    world.clock.now += 5.0
    batch = await world.pull(2)
    assert batch.record.statistics[StepFact.LATE_WAIT_S] == 5.0
    assert not any(e.sequence_id.startswith(f"{slow.task_group_id}/") for e in batch.record.entries)
    await world.publish(2)
    world.report(replica, 2)
    for order in await world.orders(replica):
        for index in order.indices:
            await finish(world, order, index, 2)
    late.step_s = 20.0
    batch = await world.pull(3)
    assert batch.record.statistics[StepFact.LATE_WAIT_S] == 0.0, "it has waited for that group"


async def test_on_which_version_open_slots_began_survives_a_restart_and_a_lost_replica(
    worlds: Callable[..., World],
) -> None:
    world = worlds(run={"steps": 9}, late="drop", max_staleness=2)
    replica, orders = await world.begin()
    for order in orders[1:4]:
        for index in order.indices:
            await finish(world, order, index, 0)
    await step(world, replica, 1)
    await world.crash()
    group = world.core.groups[orders[0].task_group_id]
    assert group.born == {"model0": 0}
    world.clock.now += world.core.pool.lease_s + 1  # its replica does not come back
    await world.watch().tick()
    world.train()
    assert orders[0].task_group_id in {o.task_group_id for o in await world.orders(world.join("b", number=1))}
    assert group.born == {"model0": 1}
    await world.crash()
    group = world.core.groups[orders[0].task_group_id]
    assert group.born == {"model0": 1}
    assert world.core.experience.unfinished


async def test_sampled_tokens_that_reached_no_record_can_be_counted(worlds: Callable[..., World]) -> None:
    """The difference is the tokens of cancelled rollouts; neither a lost lease nor a restart counts tokens twice."""
    world = worlds(run={"steps": 9}, late="drop", max_staleness=1)

    def report(replica: Replica, num_tokens: int) -> None:
        world.replica_api.report("a", "1", held={"model0": Held(0, "d0")}, num_tokens=num_tokens, emission=[])

    replica, orders = await world.begin()
    report(replica, 10)
    await finish(world, orders[0], 0, 0, 1)  # of a version from the future: the ledger records no such version
    await finish(world, orders[0], 1, 0)
    report(replica, 13)
    counters = world.core.counters
    assert (counters["tokens_sampled"], counters["tokens_recorded"]) == (13, 2)
    world.clock.now += world.core.pool.lease_s + 1
    await world.watch().tick()
    replica = world.join()
    report(replica, 20)
    assert counters["tokens_sampled"] == 20
    world.core.write_state()
    await world.settle()
    await world.crash()
    replica = world.join()
    report(replica, 30)  # unknown: an earlier process may have counted some of these
    report(replica, 35)
    assert world.core.counters["tokens_sampled"] == 25


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"late": "wait", "order": "fifo"}, "late: wait trains due groups first: set order: deadline, not fifo"),
        ({"late": "drop", "max_token_age": 9}, "max_token_age is 9, and late: drop"),
        ({"late": "mask", "max_token_age": 9}, "max_token_age is 9, and late: mask"),
        ({"max_token_age": 1, "max_staleness": 2}, r"max_token_age \(1\) is below max_staleness \(2\)"),
        ({"max_token_age": 4, "replay": {"ratio": 0.5}}, r"below replay.max_staleness \(8\): lower"),
        ({"late": "later"}, "'keep', 'mask', 'wait' or 'drop'"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(config: dict[str, Any], said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        BatchConfig(**config)


async def waiting(worlds: Callable[..., World], **settings: Any) -> tuple[World, asyncio.Task[Batch]]:
    """A batch that is there and waits for due groups, for 5 s at most."""
    world = worlds(late="wait", max_staleness=1, **settings)
    await straggling(world)
    batches = world.core.batches["model0"]
    batches.late.step_s = 20.0
    pull = asyncio.ensure_future(world.trainer_api.pull_batch("model0", 2, 30.0))
    await world.settle()
    assert batches.late.left_s() == 5.0
    return world, pull


@pytest.mark.parametrize(("other", "due"), [("drop", True), ("mask", False), ("keep", False), ("wait", False)])
def test_a_group_is_cancelled_only_where_every_policy_would_drop_it(other: Any, due: bool) -> None:
    experience = ExperiencePipeline(
        {"a": BatchConfig(late="drop", max_staleness=1), "b": BatchConfig(late=other, max_staleness=1)},
        num_steps=9,
        counters=Counter(),
    )
    group = task_group("g")
    group.born.update(a=0, b=0)
    experience.issued(group)
    for policy in ("a", "b"):
        experience.advanced(policy, 3)
    assert [found.id for found in experience.due("a")] == ["g"]
    assert experience.is_due_everywhere(group) is due


@pytest.mark.parametrize("rounds", range(5))
async def test_a_call_that_is_cancelled_as_the_buffer_changes_ends(worlds: Callable[..., World], rounds: int) -> None:
    world, pull = await waiting(worlds, run={"steps": 9})
    world.core.batches["model0"].notify()
    for _ in range(rounds):
        await asyncio.sleep(0)
    pull.cancel()
    for _ in range(50):
        await asyncio.sleep(0)
    assert pull.cancelled(), "the call would go on for a rank that has left"
