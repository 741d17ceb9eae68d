"""The parts together, without grpc or processes: what happens to records, leases, versions and batches."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import orjson
import pytest

from services.cli.metrics_catalogue import step_metric
from services.common.accounts import PeerState
from services.common.errors import (
    DeadlineError,
    InvalidRequestError,
    LeaseLostError,
    VersionConflictError,
)
from services.common.types import WeightVersion
from services.orchestrator.commands import AnnounceVersion, CancelGroup, LeavePool, PlayGroup
from services.orchestrator.groups import TaskGroup
from services.orchestrator.ingest import RecordOutcome
from services.orchestrator.pool import Held, Hello
from services.orchestrator.progress import progress
from services.orchestrator.run_control import RunState
from services.orchestrator.watch import Watch
from tests.unit.orchestrator.builders import failure, sequence, trajectory
from tests.unit.orchestrator.world import World, living

ENVELOPE = ("time", "kind", "policy", "step")  # of a row of metrics


async def test_first_durable_record_of_a_slot_wins_and_later_ones_are_counted(worlds: Callable[..., World]) -> None:
    world = worlds()
    replica = world.join()
    await world.publish(0)
    world.train()
    order = (await world.orders(replica))[0]
    name = order.task_group_id
    first, second = trajectory(name, 0, reward=1.0), trajectory(name, 0, reward=0.0)
    assert await world.send(first, second) == [RecordOutcome.ACCEPTED, RecordOutcome.DUPLICATE]
    assert await world.send(failure(name, 0)) == [RecordOutcome.DUPLICATE]
    assert world.ring.groups[name].outcomes[0] is first
    assert world.ring.counters["records_duplicate"] == 2
    await world.crash()
    outcome = world.ring.groups[name].outcomes[0]
    assert not isinstance(outcome, type(failure()))
    assert outcome.reward == 1.0


async def test_unknown_and_malformed_records_are_answered_and_counted(worlds: Callable[..., World]) -> None:
    world = worlds()
    replica = world.join()
    await world.publish(0)
    world.train()
    name = (await world.orders(replica))[0].task_group_id
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
    outcomes = world.ring.groups[name].outcomes
    assert [outcomes[i].reason for i in range(3)] == ["INVALID_RECORD"] * 3  # type: ignore[union-attr]
    assert "unknown policy 'nobody'" in outcomes[0].detail  # type: ignore[union-attr]
    assert "version 5 of model0 is from the future: the newest is 0" in outcomes[1].detail  # type: ignore[union-attr]
    assert world.ring.counters["records_unknown"] == 3
    assert world.ring.counters["records_invalid"] == 3


async def test_only_unresolved_indices_are_reissued_after_a_lost_lease(worlds: Callable[..., World]) -> None:
    world = worlds()
    lost = world.join("lost")
    await world.publish(0)
    world.train()
    orders = await world.orders(lost)
    name = orders[0].task_group_id
    await world.send(trajectory(name, 1, reward=1.0), failure(name, 2))
    orders += await world.orders(lost)  # the failure returned its quota
    other = world.join("other")
    assert await world.orders(other) == []
    world.clock.now += 20.0
    world.replica_side.report("other", "1", held=other.held, num_tokens=0, emission=[], gauges={})
    world.clock.now += 15.0
    await Watch(world.ring).tick()
    reissued = {order.task_group_id: order.indices for order in await world.orders(other)}
    assert reissued.pop(name) == (0, 3)
    assert set(reissued) == {order.task_group_id for order in orders[1:]}
    assert all(indices == (0, 1, 2, 3) for indices in reissued.values())
    # What the lost replica still brings counts if it is first.
    assert await world.send(trajectory(name, 0)) == [RecordOutcome.ACCEPTED]


async def test_a_restarted_orchestrator_sends_a_rejoining_replica_only_what_is_unresolved(
    worlds: Callable[..., World],
) -> None:
    world = worlds(late="drop")  # the finished sibling holds its place: no other task group is issued
    replica = world.join()
    await world.publish(0)
    world.train()
    orders = await world.orders(replica)
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
    assert world.ring.experience.admission.accounts["model0"].running_slots == 11
    assert world.ring.experience.buffers["model0"].num_sequences == 4


async def test_a_replica_that_does_not_come_back_after_a_restart_loses_its_lease(worlds: Callable[..., World]) -> None:
    world = worlds()
    await world.publish(0)
    world.train()
    orders = await world.orders(world.join())
    await world.crash()
    other = world.join("other")
    assert await world.orders(other) == []
    world.clock.now += 31.0
    world.join("other")
    await Watch(world.ring).tick()
    assert {o.task_group_id for o in await world.orders(world.ring.pool.get("other"))} == {
        o.task_group_id for o in orders
    }  # type: ignore[arg-type]


async def test_new_task_groups_go_on_in_the_curriculum_after_a_restart(worlds: Callable[..., World]) -> None:
    world = worlds()
    await world.publish(0)
    world.train()
    replica = world.join()
    before = await world.orders(replica)
    for order in before:
        await world.play(order)
    await world.trainer_side.pull_batch("model0", 1, 5.0)
    await world.crash()
    await world.publish(1)
    world.train()
    after = await world.orders(world.join(number=1))
    tasks = [o.task.task_id for o in (*before, *after)]
    assert len(after) == 2
    assert len(set(tasks)) == len(tasks)
    assert len({o.task_group_id for o in (*before, *after)}) == len(tasks)


async def test_batch_is_the_same_when_asked_again_with_other_rank_count(worlds: Callable[..., World]) -> None:
    world = worlds(minibatches=2)
    await world.publish(0)
    world.train()
    for order in await world.orders(world.join()):
        await world.play(order)
    batch = await world.trainer_side.pull_batch("model0", 1, 5.0)
    whole = batch.share(0, 1)
    assert not batch.replayed
    await world.crash()
    again = await world.trainer_side.pull_batch("model0", 1, 5.0)
    assert again.replayed
    assert again.record == batch.record
    for num_ranks in (1, 2, 3):
        shares = [again.share(rank, num_ranks) for rank in range(num_ranks)]
        assert {share.minibatches for share in shares} == {whole.minibatches}
        found = sorted((s for share in shares for s in share.sequences), key=lambda s: (s.minibatch, s.position))
        for left, right in zip(whole.sequences, found, strict=True):
            assert (left.sequence_id, left.minibatch, left.position) == (
                right.sequence_id,
                right.minibatch,
                right.position,
            )
            assert (left.group_mean, left.group_std, left.staleness) == (
                right.group_mean,
                right.group_std,
                right.staleness,
            )
            for a, b in zip(left.sequence.segments, right.sequence.segments, strict=True):
                assert a.token_ids.tobytes() == b.token_ids.tobytes()
                assert a.logprobs.tobytes() == b.logprobs.tobytes()


async def test_all_ranks_get_one_batch_however_they_ask(worlds: Callable[..., World]) -> None:
    world = worlds()
    await world.publish(0)
    asking = [asyncio.ensure_future(world.trainer_side.pull_batch("model0", 1, 20.0)) for _ in range(3)]
    asking[0].cancel()  # a rank that goes away does not disturb the others
    world.train()
    for order in await world.orders(world.join()):
        await world.play(order)
    batches = await asyncio.gather(*asking[1:])
    assert batches[0].record is batches[1].record
    assert world.ring.batches["model0"].newest_step == 1


async def test_a_trained_sequence_is_never_in_a_second_batch(worlds: Callable[..., World]) -> None:
    world = worlds()
    await world.publish(0)
    world.train()
    seen: list[str] = []
    for step in range(1, 4):
        replica = world.join(number=step - 1)
        for order in await world.orders(replica):
            await world.play(order, version=step - 1)
        batch = await world.trainer_side.pull_batch("model0", step, 5.0)
        seen += [entry.sequence_id for entry in batch.record.entries]
        await world.crash()
        await world.publish(step)
        world.train()
    assert len(seen) == len(set(seen)) == 24


async def test_a_pull_without_sequences_names_what_it_waited_for(worlds: Callable[..., World]) -> None:
    world = worlds()
    await world.publish(0)
    with pytest.raises(DeadlineError, match=r"model0: batch of step 1 \(8 sequences\) took longer"):
        await world.trainer_side.pull_batch("model0", 1, 0.05)
    with pytest.raises(InvalidRequestError, match="newest recorded batch is that of step 0"):
        await world.trainer_side.pull_batch("model0", 2, 0.05)
    with pytest.raises(InvalidRequestError, match="the run has 3 steps"):
        await world.trainer_side.pull_batch("model0", 4, 0.05)


async def test_a_replica_with_an_unknown_digest_gets_no_work_and_is_told_to_fetch(worlds: Callable[..., World]) -> None:
    world = worlds()
    await world.publish(0, digest="right")
    world.train()
    replica = world.join()  # holds version 0 with digest d0
    commands = await world.commands(replica)
    assert [c.version.digest for c in commands if isinstance(c, AnnounceVersion)] == ["right"]
    assert not any(isinstance(c, PlayGroup) for c in commands)
    assert "no replica holds a version" in world.ring.dispatcher.waits_for
    world.replica_side.report("a", "1", held={"model0": Held(0, "right")}, num_tokens=0, emission=[], gauges={})
    assert len(await world.orders(replica)) == 4


async def test_a_replica_that_fell_behind_the_staleness_bound_gets_no_training_work(
    worlds: Callable[..., World],
) -> None:
    world = worlds(max_staleness=0, late="drop")
    await world.publish(0)
    world.train()
    replica = world.join()
    for order in await world.orders(replica):
        await world.play(order)
    await world.trainer_side.pull_batch("model0", 1, 5.0)
    await world.publish(1)
    assert await world.orders(replica) == []
    fresh = world.join("fresh", number=1)
    assert len(await world.orders(fresh)) == 2


async def test_a_replica_that_still_holds_the_version_before_gets_only_what_can_be_trained_in_time(
    worlds: Callable[..., World],
) -> None:
    world = worlds(late="drop")  # batches of 8, max_staleness 1: 16 may be outstanding
    await world.publish(0)
    world.train()
    replica = world.join()
    orders = await world.orders(replica)
    for order in orders[:2]:
        await world.play(order)
    await world.trainer_side.pull_batch("model0", 1, 5.0)
    await world.publish(1)  # its batch returns 8, but 8 of version 0 stand before anything that replica would sample
    assert await world.orders(replica) == []
    assert "only for replicas that hold newer versions" in world.ring.dispatcher.waits_for
    world.replica_side.report("a", "1", held={"model0": Held(1, "d1")}, num_tokens=0, emission=[], gauges={})
    assert len(await world.orders(replica)) == 2


async def test_curation_passes_over_solved_tasks_also_after_a_restart(worlds: Callable[..., World]) -> None:
    world = worlds(curation="filter_solved", size=40)
    await world.publish(0)
    world.train()
    orders = await world.orders(world.join())
    solved = orders[0]
    played = TaskGroup(order=solved, position=world.ring.groups[solved.task_group_id].position)
    for index in solved.indices:
        played.resolve(trajectory(solved.task_group_id, index, reward=1.0))
    for _ in range(28):  # and once more below: 1 - 0.9 ** 29 is the first that reaches 0.95
        assert all(world.ring.training_orders.curation.accepts(row, 0) for row in range(10))
        world.ring.observe(played)
    await world.send(*(trajectory(solved.task_group_id, i, reward=1.0) for i in solved.indices))
    group = world.ring.training_orders
    [row] = [row for row in range(10) if not group.curation.accepts(row, 0)]
    assert group._source[row].task_id == solved.task.task_id
    await world.crash()
    curation = world.ring.training_orders.curation
    assert [r for r in range(10) if not curation.accepts(r, 0)] == [row]
    drawn = [world.ring.training_orders.next_group().order.task.task_id for _ in range(40)]
    assert solved.task.task_id not in drawn and len(set(drawn)) == 9


async def test_what_a_prompt_brought_is_observed_once_by_whichever_process_lives_to_do_it(
    worlds: Callable[..., World], monkeypatch: pytest.MonkeyPatch
) -> None:
    world = worlds(curation="filter_solved", size=40)
    await world.publish(0)
    world.train()
    first, second, *_ = await world.orders(world.join())
    row = world.ring.training_orders.row_of(world.ring.groups[second.task_group_id])
    await world.play(first)
    with monkeypatch.context() as dying:
        dying.setattr(world.ring, "observe", lambda group: None)  # it dies ahead of this
        await world.play(second)
    for _ in range(2):  # the first recovery observes the second group, and the next one reads of it
        await world.crash()
        averages = world.ring.training_orders.curation._average
        assert len(averages) == 2 and averages[row] == pytest.approx(0.1 * 0.5)


async def test_when_every_task_is_solved_they_are_played_rather_than_nothing(worlds: Callable[..., World]) -> None:
    world = worlds(curation="filter_solved")
    for row in list(range(10)) * 29:
        world.ring.training_orders.curation.observe(row, [1.0, 1.0])
    assert not any(world.ring.training_orders.curation.accepts(row, 0) for row in range(10))
    assert world.ring.training_orders.next_group().order.task.task_id


async def test_replicas_share_the_fetching_of_a_new_version_and_later_ones_fetch_from_those_that_hold_it(
    worlds: Callable[..., World],
) -> None:
    world = worlds()
    await world.publish(0)
    first, second = (world.join(name, weights_address=f"{name}:1") for name in "ab")
    hidden = world.join("c")
    for replica in (first, second, hidden):
        await world.commands(replica)
    await world.publish(1)
    told = [[c for c in await world.commands(r) if isinstance(c, AnnounceVersion)] for r in (first, second, hidden)]
    assert [len(announced) for announced in told] == [1, 1, 1]
    plans = [announced[0].plan for announced in told]
    assert all(plan is not None and plan.relays == ("a:1", "b:1") for plan in plans)
    assert [plan.own_stripe for plan in plans if plan is not None] == [0, 1, None]
    assert all(announced[0].version.sources == ("x:1",) for announced in told)

    world.replica_side.report("a", "1", held={"model0": Held(1, "d1")}, num_tokens=0, emission=[], gauges={})
    late = world.join("d", weights_address="d:1")
    [announced] = [c for c in await world.commands(late) if isinstance(c, AnnounceVersion)]
    assert announced.plan is None and announced.version.sources == ("a:1", "x:1")


async def test_version_conflicts_and_stale_trainers_are_refused(worlds: Callable[..., World]) -> None:
    world = worlds()
    world.trainer_side.join("model0", "t", 1, 0, {})
    assert await world.publish(0) == 0
    assert await world.publish(0) == 0
    with pytest.raises(VersionConflictError):
        await world.publish(0, digest="other")
    world.trainer_side.join("model0", "t2", 1, 0, {})
    with pytest.raises(LeaseLostError):
        await world.publish(0)
    assert await world.publish(0, incarnation="t2") == 0


async def test_work_goes_to_the_replica_with_the_most_free_slots(worlds: Callable[..., World]) -> None:
    world = worlds()
    small, large = world.join("small", slots=6), world.join("large", slots=12)
    await world.publish(0)
    world.train()
    assert len(await world.orders(large)) == 3
    assert len(await world.orders(small)) == 1
    assert "staleness quota full (model0: 16 of 16)" in world.ring.dispatcher.waits_for


async def test_pause_issues_nothing_and_starts_no_step_and_resume_goes_on(worlds: Callable[..., World]) -> None:
    world = worlds()
    trainer = world.trainer_side.join("model0", "t", 1, 0, {})
    await world.publish(0)
    replica = world.join()
    world.ring.pause()
    world.ring.pause()
    world.train()
    assert await world.orders(replica) == []
    await world.crash()
    assert world.ring.control.state is RunState.PAUSED
    trainer = world.trainer_side.join("model0", "t", 1, 0, {})
    assert trainer.mailbox is not None
    assert type(await trainer.mailbox.get()).__name__ == "PauseTraining"
    replica = world.join()
    world.train()
    assert await world.orders(replica) == []
    world.ring.resume()
    assert type(await trainer.mailbox.get()).__name__ == "ResumeTraining"
    assert len(await world.orders(replica)) == 4


async def test_little_free_disk_holds_back_new_work_and_says_so(
    worlds: Callable[..., World], monkeypatch: pytest.MonkeyPatch
) -> None:
    world = worlds()
    await world.publish(0)
    replica = world.join()
    monkeypatch.setattr(world.ring.journal, "free_bytes", lambda: 4_000_000)
    await Watch(world.ring).tick()
    world.train()
    assert await world.orders(replica) == []
    assert "free disk is below orchestrator.min_free_bytes" in world.ring.dispatcher.waits_for
    monkeypatch.undo()
    await Watch(world.ring).tick()
    assert len(await world.orders(replica)) == 4


async def test_a_task_group_that_is_never_done_is_taken_away(worlds: Callable[..., World]) -> None:
    world = worlds()
    await world.publish(0)
    world.train()
    replica = world.join()
    orders = await world.orders(replica)
    world.clock.now += 10.0 * 3 + 61.0
    world.ring.pool.join(Hello(replica_id="a", incarnation="1", num_slots=64, held=replica.held))
    await Watch(world.ring).tick()
    commands = await world.commands(replica)
    assert {c.task_group_id for c in commands if isinstance(c, CancelGroup)} == {o.task_group_id for o in orders}
    assert {c.order.task_group_id for c in commands if isinstance(c, PlayGroup)} == {o.task_group_id for o in orders}


async def test_a_task_group_that_loses_every_replica_is_given_up(worlds: Callable[..., World]) -> None:
    world = worlds(size=4, max_staleness=0)
    await world.publish(0)
    world.train()
    name = (await world.orders(world.join(incarnation="0")))[0].task_group_id
    for incarnation in range(1, 8):
        await world.orders(world.join(incarnation=str(incarnation)))
    assert name not in world.ring.groups
    assert world.ring.counters["failures_replicas_lost"] == 4


async def test_a_task_group_is_not_given_up_because_the_link_to_its_replica_flaps(worlds: Callable[..., World]) -> None:
    world = worlds(size=4, max_staleness=0)
    await world.publish(0)
    world.train()
    name = (await world.orders(world.join()))[0].task_group_id
    for _ in range(20):
        world.clock.now += 35.0
        await Watch(world.ring).tick()  # the lease has run out
        assert world.ring.pool.get("a") is None
        await world.orders(world.join(running=[name]))
    assert world.ring.groups[name].num_lost == 0
    assert world.ring.counters["failures_replicas_lost"] == 0
    assert await world.send(trajectory(name, 0)) == [RecordOutcome.ACCEPTED]


# --- evaluation and the run's life -----------------------------------------------------------------------------------


async def test_evaluation_comes_before_training_and_its_denominator_never_shrinks(worlds: Callable[..., World]) -> None:
    world = worlds()
    async with living(world):
        replica = world.join()
        await world.publish(0)
        await asyncio.sleep(0.05)
        orders = await world.orders(replica)
        assert world.ring.control.state is RunState.EVALUATING_START
        assert [dict(o.required_versions) for o in orders] == [{"model0": 0}] * 3
        await world.send(trajectory(orders[0].task_group_id, 0, reward=1.0), failure(orders[1].task_group_id, 0))
    await world.crash()
    async with living(world):
        replica = world.join()
        (left,) = await world.orders(replica)
        assert left.task_group_id == orders[2].task_group_id
        wrong = trajectory(left.task_group_id, 0, sequence(1.0, version=0), reward=1.0)
        await world.send(wrong)
        await asyncio.sleep(0.05)
        result = world.ring.evaluations.results["start/greedy"]
        assert (result.mean_reward, result.num_trajectories, result.num_failed) == (2 / 3, 3, 1)
        assert world.ring.control.state is RunState.TRAINING
        assert len(await world.orders(replica)) == 4


async def test_evaluation_groups_go_only_to_replicas_that_hold_the_version(worlds: Callable[..., World]) -> None:
    world = worlds()
    await world.publish(0)
    world.ring.apply_version(WeightVersion(policy="model0", number=1, digest="d1"), {})
    await world.ring.begin_evaluation("asked")
    old = world.join("old", number=0)
    assert await world.orders(old) == []
    new = world.join("new", number=1)
    orders = await world.orders(new)
    assert len(orders) == 3
    # While it plays, newer weights are not announced to it; afterwards they are.
    world.ring.apply_version(WeightVersion(policy="model0", number=2, digest="d2"), {})
    world.ring.announce("model0", True)
    assert not any(isinstance(c, AnnounceVersion) for c in await world.commands(new))
    for order in orders:
        await world.send(trajectory(order.task_group_id, 0, version=1))
    assert any(isinstance(c, AnnounceVersion) and c.version.number == 2 for c in await world.commands(new))


async def test_an_evaluation_on_a_version_that_nobody_holds_any_more_ends(worlds: Callable[..., World]) -> None:
    world = worlds()
    await world.publish(0)
    await world.ring.begin_evaluation("asked")
    world.join(number=0)
    await world.settle()  # decided: it is played on version 0
    world.ring.apply_version(WeightVersion(policy="model0", number=1, digest="d1"), {})
    watch = Watch(world.ring)
    for _ in range(8):
        world.join(number=1)
        await watch.tick()
        world.clock.now += 5.0
    await world.settle()
    result = world.ring.evaluations.results["asked/greedy"]
    assert (result.mean_reward, result.num_trajectories, result.num_failed) == (0.0, 3, 3)


async def test_stop_ends_the_run_before_its_last_step(worlds: Callable[..., World]) -> None:
    world = worlds()
    async with living(world) as life:
        await world.publish(0)
        replica = world.join()
        await world.orders(replica)
        world.ring.control.stop("enough")
        await asyncio.wait_for(life, 5)
        commands = await world.commands(replica)
        assert isinstance(commands[-1], LeavePool)
        assert world.ring.control.state is RunState.STOPPED
        assert (world.run_dir / "summary.json").is_file()
        late = world.join("late")
        assert [type(c) for c in await world.commands(late)] == [LeavePool]
    await world.crash()
    assert world.ring.control.state is RunState.STARTING  # started again, it goes on


async def test_a_run_in_which_every_rollout_fails_pauses_and_says_why(worlds: Callable[..., World]) -> None:
    world = worlds()
    ring = world.ring
    watch = Watch(ring)
    ring.ingest.failures_in_a_row = 255
    ring.ingest.last_failure = "TypeError: the reward is broken"
    world.clock.now += 2
    await watch.tick()
    assert not ring.control.paused
    ring.ingest.failures_in_a_row = 256
    world.clock.now += 2
    await watch.tick()
    assert ring.control.paused
    assert "the reward is broken" in ring.dispatcher.held_back
    assert "millrace resume" in ring.dispatcher.held_back
    ring.resume()
    world.clock.now += 2
    await watch.tick()
    assert not ring.control.paused
    assert ring.ingest.failures_in_a_row == 0
    assert "the reward is broken" not in ring.dispatcher.held_back


async def test_a_run_paused_because_replicas_could_not_reach_a_peer_goes_on_when_they_hear_of_it(
    worlds: Callable[..., World],
) -> None:
    world = worlds()
    ring, watch = world.ring, Watch(world.ring)
    replica = world.join()
    await watch.tick()

    async def heard(silent_s: float) -> None:
        gateway = PeerState(component="envgateway", silent_s=silent_s)
        world.replica_side.report("a", "1", held=replica.held, num_tokens=0, emission=[], gauges={}, peers=(gateway,))
        world.clock.now += 2
        await watch.tick()

    ring.ingest.failures_in_a_row = 256
    await heard(silent_s=40.0)
    assert ring.control.paused
    assert "by itself once replicas hear of envgateway again" in ring.dispatcher.held_back
    await heard(silent_s=42.0)
    assert ring.control.paused
    await heard(silent_s=0.0)
    assert not ring.control.paused and "failures" not in ring.dispatcher.holds
    assert ring.ingest.failures_in_a_row == 0

    ring.ingest.failures_in_a_row = 256
    await heard(silent_s=0.0)  # now it is not the gateway
    assert ring.control.paused
    await heard(silent_s=0.0)
    assert ring.control.paused


async def test_a_step_before_which_no_rollout_finished_has_no_mean_reward_of_rollouts(
    worlds: Callable[..., World],
) -> None:
    """Defect 12: the mean of the batch is not put in its place, neither in the metrics nor in the progress."""
    world = worlds()
    replica = world.join()
    await world.publish(0)
    world.train()
    orders = await world.orders(replica)
    assert len(orders) == 4  # two batches
    for order in orders:
        await world.play(order)
    for step in (1, 2):
        await world.trainer_side.pull_batch("model0", step, 1.0)
        await world.publish(step)
        told = progress(world.ring).policies[0].reward_mean
        assert told == (0.5 if step == 1 else None)
    path = world.run_dir / "metrics" / "orchestrator.jsonl"
    rows = [row for line in path.read_bytes().splitlines() if (row := orjson.loads(line))["kind"] == "training_step"]
    assert [row.get("rollout_reward_mean") for row in rows] == [0.5, None]
    assert [row["batch_reward_mean"] for row in rows] == [0.5, 0.5]
    assert [row["rollouts_finished"] for row in rows] == [16.0, 0.0]
    assert [key for row in rows for key in row if key not in ENVELOPE and step_metric(key) is None] == []


async def test_a_replica_of_thousands_of_slots_is_sent_all_its_orders_and_again_when_it_rejoins(
    worlds: Callable[..., World],
) -> None:
    world = worlds(size=4400, max_staleness=1, rollout={"group_size": 4})
    replica = world.join(slots=10_000)
    await world.publish(0)
    world.train()
    orders = await world.orders(replica)
    assert len(orders) > 1100
    running = [order.task_group_id for order in orders]
    assert world.join(slots=10_000, running=running) is replica
    assert [order.task_group_id for order in await world.orders(replica)] == running
    await world.crash()
    again = world.join(slots=10_000, running=running)
    assert sorted(order.task_group_id for order in await world.orders(again)) == sorted(running)


async def test_a_replica_that_plays_thousands_of_unknown_task_groups_can_join(worlds: Callable[..., World]) -> None:
    """As after the loss of a journal: otherwise it would try with the same groups for ever."""
    world = worlds()
    replica = world.join(running=[f"abc-{number}" for number in range(20_000)])
    commands = await world.commands(replica)
    assert replica.mailbox is not None and not replica.mailbox.closed
    assert 0 < sum(isinstance(command, CancelGroup) for command in commands) < 1024
    await world.publish(0)
    world.train()
    assert await world.orders(replica)
