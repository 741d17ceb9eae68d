"""Evaluations during training: pinned on spare replicas, else on a share of slots; no running work is cancelled."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace

import pytest

from services.common.errors import ConfigError
from services.common.records import Purpose, Sampling
from services.common.telemetry.metrics import RolloutKey
from services.orchestrator.evaluation import EvaluationPass
from services.orchestrator.journal.entries import (
    EvaluationResult,
    difference,
    from_json,
    to_json,
)
from services.orchestrator.members import AnnounceVersion, CancelGroup, Held, Hello, Replica
from tests.unit.orchestrator.builders import failure, sequence, trajectory
from tests.unit.orchestrator.world import World, living
from tests.waiting import WAIT_S


def split(orders: list) -> tuple[list, list]:  # type: ignore[type-arg]
    """(training, evaluation)"""
    return [o for o in orders if o.purpose is Purpose.TRAIN], [o for o in orders if o.purpose is Purpose.EVALUATION]


async def train_one_step(world: World, orders: list, step: int, version: int) -> None:  # type: ignore[type-arg]
    for order in orders:
        await world.play(order, version)
    await world.pull(step)
    await world.publish(step)


async def test_with_replicas_to_spare_one_is_pinned_and_the_others_go_on(worlds: Callable[..., World]) -> None:
    world = worlds(run={"steps": 9}, evaluation={"every": 1, "at_start": False}, max_staleness=2)
    async with living(world):
        await world.publish(0)
        first, second = world.join("first", slots=16), world.join("second", slots=16)
        training, _ = split(await world.orders(first) + await world.orders(second))
        assert len(training) == 6, "as the quota allows"
        await train_one_step(world, training[:2], 1, 0)
        await world.settle()
        assert split(await world.orders(first) + await world.orders(second))[1] == [], "version 1 is nowhere yet"
        for replica in (first, second):
            world.report(replica, 1)
        got = {replica.replica_id: split(await world.orders(replica)) for replica in (first, second)}
        (pinned,) = [name for name, (_, evaluation) in got.items() if evaluation]
        evaluation = got[pinned][1]
        assert [dict(order.required_versions) for order in evaluation] == [{"model0": 1}] * 3
        # It keeps its version while the run goes on, and finishes its running work.
        await world.publish(2)
        evaluator = first if pinned == "first" else second
        commands = await world.commands(evaluator)
        assert not any(isinstance(c, AnnounceVersion | CancelGroup) for c in commands)
        other = second if evaluator is first else first
        assert any(isinstance(c, AnnounceVersion) for c in await world.commands(other))
        await world.send(*(trajectory(o.task_group_id, 0, version=1, reward=1.0) for o in evaluation))
        result = world.core.evaluations.results["step-1/greedy"]
        assert (result.pinned, dict(result.versions), result.mean_reward) == (True, {"model0": 1}, 1.0)
        assert any(isinstance(c, AnnounceVersion) for c in await world.commands(evaluator)), "now it moves on"


async def test_a_lone_replica_evaluates_on_a_share_and_says_which_versions(worlds: Callable[..., World]) -> None:
    world = worlds(run={"steps": 9}, evaluation={"every": 1, "at_start": False, "share": 0.125}, max_staleness=2)
    async with living(world):
        await world.publish(0)
        replica = world.join(slots=16)
        training, _ = split(await world.orders(replica))
        assert len(training) == 4, "all slots train"
        await train_one_step(world, training[:2], 1, 0)
        await world.settle()
        await world.play(training[2])  # frees 4 slots
        training, evaluation = split(await world.orders(replica))
        assert len(evaluation) == 2, "an eighth of 16 slots"
        assert not evaluation[0].required_versions
        assert len(training) == 2, "no more fit beside them"
        await world.send(trajectory(evaluation[0].task_group_id, 0, version=0, reward=1.0))
        _, more = split(await world.orders(replica))
        await world.send(
            failure(evaluation[1].task_group_id, 0), trajectory(more[0].task_group_id, 0, version=1, reward=1.0)
        )
        result = world.core.evaluations.results["step-1/greedy"]
        assert not result.pinned
        assert (dict(result.versions), dict(result.newest_versions)) == ({"model0": 0}, {"model0": 1})
        (score,) = result.datasets
        assert (score.name, score.num_items, score.failed) == ("held_out", 3, ("2",))
        assert (score.mean_reward.value, score.pass_at[0].share.value) == (2 / 3, 2 / 3)


async def test_a_dataset_may_have_its_own_number_of_samples(worlds: Callable[..., World]) -> None:
    world = worlds(held_out={"large": {}, "small": {"samples_per_task": 3}})
    async with living(world):
        await world.publish(0)
        replica = world.join(slots=16)
        _, evaluation = split(await world.orders(replica))
        assert [len(order.indices) for order in evaluation] == [1, 1, 1, 3, 3, 3]
        for order in evaluation:
            await world.send(
                *(trajectory(order.task_group_id, i, version=0, reward=float(i == 0)) for i in order.indices)
            )
        result = world.core.evaluations.results["start/greedy"]
        assert {score.name: score.samples_per_item for score in result.datasets} == {"large": 1, "small": 3}
        assert (result.num_trajectories, result.mean_reward) == (12, (1 + 1 / 3) / 2)


async def test_an_evaluator_that_dies_is_replaced_by_one_with_the_same_version(worlds: Callable[..., World]) -> None:
    world = worlds(run={"steps": 9}, evaluation={"every": 1, "at_start": False}, max_staleness=4)
    async with living(world):
        await world.publish(0)
        replicas = {name: world.join(name, number=0, slots=16) for name in ("first", "second", "third")}
        training = [o for r in replicas.values() for o in await world.orders(r)]
        await train_one_step(world, training[:2], 1, 0)
        await world.settle()
        for replica in replicas.values():
            world.report(replica, 1)
        got = {name: split(await world.orders(replica))[1] for name, replica in replicas.items()}
        (pinned,) = [name for name, orders in got.items() if orders]
        left = replicas.pop(pinned)
        world.clock.now += 20.0
        for replica in replicas.values():
            world.report(replica, 1)
        world.clock.now += 20.0
        assert [r.replica_id for r in world.core.pool.expire()] == [left.replica_id]
        for order in training[2:]:
            await world.play(order)
        world.core.dispatcher.schedule()
        again = [o for r in replicas.values() for o in split(await world.orders(r))[1]]
        assert {o.task_group_id for o in got[pinned]} <= {o.task_group_id for o in again}


async def test_each_policy_that_plays_apart_is_evaluated_by_itself(worlds: Callable[..., World]) -> None:
    world = worlds(policies=("a", "b"), rollout={"policies": "apart"})
    for policy in ("a", "b"):
        await world.publish(0, policy=policy)
    replica = world.join()
    await world.core.begin_evaluation("asked")
    orders = await world.orders(replica)
    assert sorted(order.policies for order in orders) == [("a",)] * 3 + [("b",)] * 3
    for order in orders:
        (policy,) = order.policies
        await world.send(trajectory(order.task_group_id, 0, sequence(policy=policy), reward=float(policy == "a")))
    results = {name: result.mean_reward for name, result in world.core.evaluations.results.items()}
    assert results == {"asked/greedy/a": 1.0, "asked/greedy/b": 0.0}


async def test_a_run_that_only_evaluates_takes_the_replicas_checkpoint_for_its_version(
    worlds: Callable[..., World],
) -> None:
    world = worlds(run={"steps": 0})
    async with living(world) as life:
        replica = world.join()
        await world.settle()
        orders = await world.orders(replica)
        assert [dict(order.required_versions) for order in orders] == [{"model0": 0}] * 3
        await world.send(*(trajectory(order.task_group_id, 0, reward=1.0) for order in orders))
        other = world.replica_api.join(
            Hello(replica_id="other", incarnation="1", num_slots=8, held={"model0": Held(0, "another digest")})
        )
        assert not world.core.dispatcher.may_play(other.held, {"model0": 0}), "it loaded something else"
        await world.settle()
        end = await world.orders(replica)
        await world.send(*(trajectory(order.task_group_id, 0, reward=1.0) for order in end))
        await asyncio.wait_for(life, WAIT_S)
    assert world.core.evaluations.results["start/greedy"].mean_reward == 1.0


async def test_no_more_trajectories_of_evaluations_are_played_at_once_than_is_allowed(
    worlds: Callable[..., World],
) -> None:
    world = worlds(run={"steps": 9}, evaluation={"at_start": True, "max_in_flight": 2}, max_staleness=2)
    async with living(world):
        await world.publish(0)
        _, first = split(await world.orders(world.join(slots=16)))
        assert len(first) == 2, "of three, with slots for all"
        assert "evaluation.max_in_flight" in world.core.dispatcher.waits_for
    await world.crash()  # work in progress continues
    async with living(world):
        replica = world.join(slots=16, running=[order.task_group_id for order in first])
        again = split(await world.orders(replica))[1]
        assert {order.task_group_id for order in again} == {order.task_group_id for order in first}
        await world.send(trajectory(first[0].task_group_id, 0, version=0, reward=1.0))
        _, more = split(await world.orders(replica))
        assert len(more) == 1
        await world.send(
            failure(first[1].task_group_id, 0), trajectory(more[0].task_group_id, 0, version=0, reward=1.0)
        )
        result = world.core.evaluations.results["start/greedy"]
        assert (result.num_trajectories, result.num_failed) == (3, 1)


def test_a_task_whose_samples_could_never_be_issued_together_is_refused(worlds: Callable[..., World]) -> None:
    with pytest.raises(ConfigError, match="max_in_flight 3 is below samples_per_task 4"):
        worlds(evaluation={"samples_per_task": 4, "max_in_flight": 3})


async def test_a_rows_seed_depends_on_its_dataset_and_row_and_on_nothing_else(worlds: Callable[..., World]) -> None:
    """Common random numbers: not on the evaluation, the version, the samples, other datasets, or a restart."""

    async def seeds(world: World, evaluation_id: str) -> dict[str, list[int]]:
        await world.core.begin_evaluation(evaluation_id)
        version = world.core.ledgers["model0"].newest_number
        orders = await world.orders(world.join(number=version))
        await world.send(
            *(trajectory(o.task_group_id, i, version=version, reward=1.0) for o in orders for i in o.indices)
        )
        found: dict[str, list[int]] = {}
        for row in world.core.evaluations.rows:
            found.setdefault(row[0], []).append(orders.pop(0).seed)
        assert not orders
        return found

    world = worlds(run={"steps": 9}, held_out={"one": {}, "two": {}})
    await world.publish(0)
    first = await seeds(world, "asked-1")
    await world.publish(1)
    assert await seeds(world, "asked-2") == first, "of another version"
    await world.crash()
    assert await seeds(world, "asked-3") == first, "after a restart"
    assert len({seed for of_one in first.values() for seed in of_one}) == 6

    other = worlds(run={"steps": 9}, held_out={"zero": {}, "two": {"samples_per_task": 2}})
    await other.publish(0)
    assert (await seeds(other, "asked"))["two"] == first["two"], "beside other datasets, with more samples"


async def test_an_evaluation_is_compared_with_the_first_of_its_kind_item_by_item_also_after_a_restart(
    worlds: Callable[..., World],
) -> None:
    samplings = {"greedy": {"temperature": 0.0}, "drawn": {}}
    world = worlds(run={"steps": 9}, evaluation={"samplings": samplings}, held_out={"one": {}, "two": {}})

    async def evaluate(evaluation_id: str, rewards: list[float]) -> None:
        await world.core.begin_evaluation(evaluation_id)
        version = world.core.ledgers["model0"].newest_number
        orders = await world.orders(world.join(number=version))
        for order, reward in zip(orders, rewards * 2, strict=True):
            await world.send(trajectory(order.task_group_id, 0, version=version, reward=reward))

    await world.publish(0)
    await evaluate("first", [0.0, 0.0, 1.0, 0.5, 0.5, 0.5])
    await world.crash()
    await world.publish(1)
    await evaluate("second", [1.0, 0.0, 1.0, 0.5, 0.0, 0.25])
    first, second = (world.core.evaluations.results[f"{name}/drawn"] for name in ("first", "second"))
    assert (first.compared_with, first.difference) == ("", None)
    assert second.compared_with == "first/drawn"
    one, two = second.datasets
    assert (one.item_rewards, two.item_rewards) == ((1.0, 0.0, 1.0), (0.5, 0.0, 0.25))
    assert one.difference == difference(first.datasets[0], one) and one.difference is not None
    assert one.difference.value == pytest.approx(1 / 3) and two.difference is not None
    assert two.difference.value == pytest.approx(-0.25)
    assert second.difference is not None and second.difference.value == pytest.approx((1 / 3 - 0.25) / 2)
    await world.crash()
    assert world.core.evaluations.results["second/drawn"] == second


def test_a_pass_counts_rewards_that_programs_can_forge() -> None:
    current = EvaluationPass(
        name="start/greedy", evaluation_id="start", wanted={}, sampling=Sampling(), samples=(1,) * 3
    )
    marked = {RolloutKey.REWARD_OPAQUE.value: 1.0}
    current.note(trajectory("g0"), 1.0, 0)
    current.note(trajectory("g1", 0, replace(sequence(), metrics=marked)), 1.0, 1)
    current.note(replace(trajectory("g2"), metrics=marked), 1.0, 2)  # of an episode
    result = current.result((), None, 0.0)
    assert result.num_opaque == 2 and from_json(EvaluationResult, to_json(result)) == result


async def test_a_lone_replica_is_pinned_also_for_a_pass_that_is_larger_than_its_slots(
    worlds: Callable[..., World],
) -> None:
    evaluation = {"every": 1, "at_start": False, "samples_per_task": 4}  # 12 trajectories
    world = worlds(run={"steps": 9}, evaluation=evaluation, max_staleness=2)
    async with living(world):
        await world.publish(0)
        replica = world.join(slots=8)
        training, _ = split(await world.orders(replica))
        assert len(training) == 2
        await train_one_step(world, training, 1, 0)
        world.report(replica, 1)
        played: list[str] = []
        while "step-1/greedy" not in world.core.evaluations.results:
            training, evaluation = split(await world.orders(replica))
            assert not training or len(played) + len(evaluation) in (0, 3), "none between the first task and the last"
            for order in training:
                await world.play(order, 1)
            assert all(dict(order.required_versions) == {"model0": 1} for order in evaluation)
            for order in evaluation:
                played.append(order.task_group_id)
                await world.send(*(trajectory(order.task_group_id, i, version=1) for i in order.indices))
        result = world.core.evaluations.results["step-1/greedy"]
        assert (result.pinned, dict(result.versions), dict(result.newest_versions)) == (True, *[{"model0": 1}] * 2)


@pytest.mark.parametrize("share", [None, 0.125])
async def test_an_evaluation_of_a_step_that_would_repeat_the_one_of_the_end_is_skipped(
    worlds: Callable[..., World], share: float | None
) -> None:
    evaluation = {"every": 1, "at_start": False, "share": share}
    world = worlds(run={"steps": 2}, evaluation=evaluation, max_staleness=2)

    async def ends(replica: Replica) -> None:
        _, orders = split(await world.orders(replica))
        assert [dict(order.required_versions) for order in orders] == [{"model0": 2}] * 3
        assert list(world.core.evaluations.results) == []
        assert [current.name for current in world.core.evaluations.passes.values()] == ["end/greedy"]

    async with living(world):
        await world.publish(0)
        replica = world.join(slots=16)
        training, _ = split(await world.orders(replica))
        await train_one_step(world, training[:2], 1, 0)
        await world.settle()
        started = split(await world.orders(replica))[1]  # of a share: played by whatever version there is
        assert bool(started) == bool(share)
        for order in training[2:4]:
            await world.play(order)
        await world.pull(2)
        world.core.dispatcher.train = False
        world.report(replica, 2)  # the replica is past version 1
        await world.publish(2)
        await world.settle()
        commands = await world.commands(replica)
        assert {c.task_group_id for c in commands if isinstance(c, CancelGroup)} >= {o.task_group_id for o in started}
    await world.crash()
    async with living(world):
        await world.settle()
        await ends(world.join(number=2))


@pytest.mark.parametrize("restarts", [False, True])
async def test_an_evaluation_of_a_step_whose_version_is_lost_is_begun_again_on_the_step_reached(
    worlds: Callable[..., World], restarts: bool
) -> None:
    samplings = {"greedy": {"temperature": 0.0}, "sampled": {"temperature": 1.0}}
    evaluation = {"every": 1, "at_start": False, "samples_per_task": 4, "samplings": samplings}
    world = worlds(run={"steps": 9}, evaluation=evaluation, max_staleness=2)
    async with living(world):
        await world.publish(0)
        replica = world.join(slots=8)
        training, _ = split(await world.orders(replica))
        await train_one_step(world, training, 1, 0)
        world.report(replica, 1)
        for order in split(await world.orders(replica))[0]:
            await world.play(order)
        _, lost = split(await world.orders(replica))
        assert len(lost) == 2 and all(dict(order.required_versions) == {"model0": 1} for order in lost)
        await world.send(trajectory(lost[0].task_group_id, 0, version=1, reward=1.0))
        await world.publish(2)
        replica, watch = world.join(number=2, slots=8, incarnation="2"), world.watch()
        for _ in range(8):
            world.report(replica, 2)
            await watch.tick()
            world.clock.now += 5.0
        await world.settle()
        assert {current.evaluation_id for current in world.core.evaluations.passes.values()} == {"step-2"}
        assert world.core.ingest.failures_in_a_row == 0 and not world.core.control.paused
    if restarts:
        await world.crash()
    async with living(world):
        replica = world.join(number=2, slots=8, incarnation="3")
        while len(world.core.evaluations.results) < 2:
            for order in await world.orders(replica):
                if order.purpose is Purpose.EVALUATION:
                    assert dict(order.required_versions) == {"model0": 2}
                await world.send(*(trajectory(order.task_group_id, i, version=2, reward=1.0) for i in order.indices))
        results = world.core.evaluations.results
        assert {name: (r.mean_reward, r.num_failed) for name, r in results.items()} == {
            "step-2/greedy": (1.0, 0), "step-2/sampled": (1.0, 0),
        }  # fmt: skip
