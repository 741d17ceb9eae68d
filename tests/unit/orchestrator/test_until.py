"""``run.until``: training ends when an evaluation holds its threshold, and says so, also after a crash."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from services.common.config.training import UntilConfig
from services.common.errors import DeadlineError
from services.common.records import Purpose, TaskGroupOrder
from services.orchestrator.evaluation import Threshold
from services.orchestrator.groups import RunState
from services.orchestrator.journal.entries import EvaluationResult, score
from services.orchestrator.members import Replica, StopTraining, TrainerRequest
from services.orchestrator.progress import progress
from tests.unit.orchestrator.builders import sequence, trajectory
from tests.unit.orchestrator.world import World, living
from tests.waiting import WAIT_S, until

Make = Callable[..., World]


def result(name: str, reward: float, elapsed_s: float = 0.0, **datasets: float) -> EvaluationResult:
    scores = tuple(
        score(dataset, ["", ""], [[value, value], [value, value]], [0, 0], 1.0)
        for dataset, value in (datasets or {"held_out": reward}).items()
    )
    return EvaluationResult(
        name=name, versions={}, newest_versions={}, pinned=True, mean_reward=reward, num_trajectories=4, num_failed=0,
        datasets=scores, elapsed_s=elapsed_s,
    )  # fmt: skip


def threshold(
    *found: EvaluationResult, policies: tuple[str, ...] = (), failed_reward: float | None = None, **settings: Any
) -> Threshold:
    config = UntilConfig(**{"evaluation": "sampled", "at_least": 0.9, **settings})
    return Threshold(config, {one.name: one for one in found}, policies, failed_reward=failed_reward)


# --- the rule ---------------------------------------------------------------------------------------------------------


def test_one_good_evaluation_is_not_enough() -> None:
    lucky = [result("step-2/sampled", 0.95, 2.0), result("step-4/sampled", 0.8, 4.0)]
    assert not threshold(*lucky).reached
    state = threshold(*lucky, result("step-6/sampled", 0.9, 6.0), result("step-8/sampled", 0.92, 8.0)).state()
    assert (state.reached, state.step, state.seconds, state.newest) == (True, 8, 8.0, 0.92)


def test_the_order_is_that_of_the_steps_and_the_first_time_counts() -> None:
    later = [result(f"step-{step}/sampled", 0.1 * (step > 9), float(step)) for step in (10, 9, 11, 2)]
    state = threshold(*later, at_least=0.1).state()
    assert (state.reached, state.step) == (True, 11)
    after = [result("step-2/sampled", 0.9), result("step-4/sampled", 0.9, 4.0), result("step-6/sampled", 0.1, 6.0)]
    assert threshold(*after).state().step == 4, "what was reached stays reached"


def test_only_the_evaluations_of_the_start_and_of_steps_count() -> None:
    others = [result(name, 1.0) for name in ("end/sampled", "asked-1/sampled", "step-2/greedy", "step-x/sampled")]
    state = threshold(*others, in_a_row=1).state()
    assert (state.reached, state.newest) == (False, None)
    state = threshold(*others, result("start/sampled", 1.0, 0.5), in_a_row=1).state()
    assert (state.reached, state.step, state.seconds) == (True, 0, 0.5)


def test_a_dataset_or_a_share_of_passes_may_be_meant() -> None:
    two = result("step-2/sampled", 0.7, easy=1.0, hard=0.4)
    assert threshold(two, at_least=0.7, in_a_row=1).reached
    assert not threshold(two, at_least=0.71, in_a_row=1).reached
    assert threshold(two, dataset="easy", in_a_row=1).reached
    assert not threshold(two, dataset="hard", at_least=0.5, in_a_row=1).reached
    assert threshold(two, metric="pass@2", at_least=0.5, in_a_row=1).state().newest == 0.5


def test_policies_that_play_apart_reach_it_in_the_same_evaluation() -> None:
    found = [result("step-2/sampled/a", 0.9), result("step-2/sampled/b", 0.4), result("step-4/sampled/a", 0.8)]
    wanted: dict[str, Any] = {"at_least": {"a": 0.9, "b": 0.5}, "in_a_row": 1, "policies": ("a", "b")}
    assert not threshold(*found, **wanted).reached
    assert not threshold(*found, result("step-4/sampled/b", 0.9), **wanted).reached
    both = [result("step-6/sampled/a", 0.9, 6.0), result("step-6/sampled/b", 0.5, 7.0)]
    state = threshold(*found, *both, **wanted).state()
    assert (state.reached, state.step, state.seconds) == (True, 6, 7.0)


def test_a_failed_sample_never_reaches_it() -> None:
    def failing(rewards: list[float], num_failed: int) -> EvaluationResult:
        scored = score("held_out", ["t"], [rewards], [num_failed], 1.0)
        return replace(result("step-2/sampled", 0.0), datasets=(scored,), num_failed=num_failed)

    nothing_scored, few_failed = failing([0.0, 0.0], 2), failing([0.9, 0.9, 0.0], 1)
    assert not threshold(nothing_scored, at_least=-0.1, in_a_row=1).reached
    assert not threshold(nothing_scored, at_least=0.0, in_a_row=1).reached
    assert not threshold(failing([0.1, 1.0], 1), at_least=0.5, in_a_row=1, failed_reward=1.0).reached
    assert threshold(few_failed, at_least=0.5, in_a_row=1).reached, "they only lower it"
    assert threshold(failing([-0.2, -1.0], 1), at_least=-0.7, in_a_row=1, failed_reward=-1.0).reached
    assert threshold(few_failed, at_least=0.5, in_a_row=1, metric="pass@1").state().newest == 0.0


# --- the run ----------------------------------------------------------------------------------------------------------


def make(worlds: Make, **settings: Any) -> World:
    """Three tasks to evaluate, all in flight at once on one replica of 64 slots."""
    until = {"evaluation": "greedy", "at_least": 0.9, **settings.pop("until", {})}
    evaluation = {"every": 1, "at_start": False, **settings.pop("evaluation", {})}
    return worlds(run={"steps": 9, "until": until}, evaluation=evaluation, **settings)


def state_of(world: World) -> RunState:
    return world.core.control.state


async def play_training(world: World, replica: Replica, version: int) -> list[TaskGroupOrder]:
    """Run the training orders; returns the orders of evaluations."""
    kept = []
    for order in await world.orders(replica):
        if order.purpose is Purpose.TRAIN:
            await world.play(order, version)
        else:
            kept.append(order)
    return kept


async def train(world: World, replica: Replica, step: int) -> list[TaskGroupOrder]:
    """One training step and the replica's switch to its version; returns the orders of the evaluation after that."""
    await play_training(world, replica, step - 1)
    await world.pull(step)
    await world.publish(step)
    world.report(replica, step)
    return await play_training(world, replica, step)


async def answer(world: World, orders: list[TaskGroupOrder], reward: float) -> None:
    assert orders and all(dict(order.required_versions) for order in orders)
    for order in orders:
        version = order.required_versions["model0"]
        await world.send(trajectory(order.task_group_id, 0, sequence(reward, version), reward=reward))


async def test_training_ends_when_two_evaluations_in_a_row_hold(worlds: Make) -> None:
    world = make(worlds)
    async with living(world) as life:
        await world.publish(0)
        replica = world.join()
        await world.settle()
        trainer = world.trainer_api.join("model0", "t", 1, 0)
        for step, reward in ((1, 1.0), (2, 0.5), (3, 1.0)):
            await answer(world, await train(world, replica, step), reward)
            assert state_of(world) is RunState.TRAINING
        orders = await train(world, replica, 4)
        await answer(world, orders, 1.0)
        await until(lambda: state_of(world) is RunState.EVALUATING_END)
        with pytest.raises(DeadlineError):
            await world.trainer_api.pull_batch("model0", 5, timeout_s=0.05)
        now = progress(world.core)
        assert now.threshold.reached and now.threshold.step == 4
        assert now.policies[0].num_steps == 4
        assert not any("trainer model0 waits" in wait for wait in now.waits)
        assert trainer.mailbox is not None
        assert [await trainer.mailbox.get() for _ in range(len(trainer.mailbox))] == [TrainerRequest.SAVE_CHECKPOINT]
        again = world.trainer_api.join("model0", "t", 1, 0)
        assert again.mailbox is not None and await again.mailbox.get() == TrainerRequest.SAVE_CHECKPOINT
        end = await world.orders(replica)
        assert [order.purpose for order in end] == [Purpose.EVALUATION] * 3, "and nothing to train"
        await answer(world, end, 1.0)
        await asyncio.wait_for(life, WAIT_S)
        assert state_of(world) is RunState.FINISHED
        told = json.loads((world.run_dir / "summary.json").read_text())
        assert told["steps"] == {"model0": 4}
        assert (told["until"]["reached"], told["until"]["step"]) == (True, 4)
        assert trainer.mailbox is not None
        commands = [await trainer.mailbox.get() for _ in range(len(trainer.mailbox))]
        assert [command.reason for command in commands if isinstance(command, StopTraining)] == [
            "the threshold is reached"
        ]


async def test_a_crash_after_the_threshold_held_does_not_train_on(worlds: Make) -> None:
    world = make(worlds, until={"in_a_row": 1})
    async with living(world):
        await world.publish(0)
        replica = world.join()
        orders = await train(world, replica, 1)
        await world.pull(2)
        await answer(world, orders, 1.0)
        before = progress(world.core).threshold
    await world.crash()
    assert progress(world.core).threshold == before
    async with living(world) as life:
        replica = world.join(number=1)
        await world.publish(1)
        assert await world.orders(replica) == [], "neither training nor an evaluation while a batch is with the trainer"
        assert (await world.pull(2)).replayed
        await world.publish(2)
        with pytest.raises(DeadlineError):
            await world.trainer_api.pull_batch("model0", 3, timeout_s=0.05)
        world.report(replica, 2)
        await answer(world, await world.orders(replica), 0.0)
        await asyncio.wait_for(life, WAIT_S)
        assert state_of(world) is RunState.FINISHED
    await world.crash()
    assert state_of(world) is RunState.FINISHED


async def test_a_threshold_that_holds_before_training_ends_the_run_without_a_step(worlds: Make) -> None:
    world = make(worlds, until={"in_a_row": 1, "at_least": -5.0}, evaluation={"at_start": True})
    async with living(world) as life:
        await world.publish(0)
        replica = world.join()
        for _ in range(2):  # start and end
            await answer(world, await world.orders(replica), 0.0)
            await world.settle()
        await asyncio.wait_for(life, WAIT_S)
    told = json.loads((world.run_dir / "summary.json").read_text())
    assert (told["steps"], told["until"]["reached"], told["until"]["step"]) == ({"model0": 0}, True, 0)
    assert world.core.counters["task_groups_issued"] == 6


async def test_evaluations_of_steps_play_their_samplings_and_the_next_tasks(worlds: Make) -> None:
    samplings = {"greedy": {"temperature": 0.0}, "other": {"temperature": 1.0}}
    evaluation = {"during_samplings": ["greedy"], "during_tasks": 1, "samplings": samplings}
    world = make(worlds, evaluation=evaluation)
    played = []
    async with living(world):
        await world.publish(0)
        replica = world.join()
        for step in (1, 2, 3, 4):
            orders = await train(world, replica, step)
            played.append([order.task.task_id for order in orders])
            await answer(world, orders, 0.0)
        names = set(world.core.evaluations.results)
    assert names == {f"step-{step}/greedy" for step in (1, 2, 3, 4)}
    assert [len(tasks) for tasks in played] == [1] * 4
    assert len({tasks[0] for tasks in played[:3]}) == 3, "no task twice while there are others"
    assert played[3] == played[0]
    found = world.core.evaluations.results
    assert found["step-4/greedy"].datasets[0].items == found["step-1/greedy"].datasets[0].items
    assert found["step-2/greedy"].datasets[0].items != found["step-1/greedy"].datasets[0].items
    assert found["step-2/greedy"].num_trajectories == found["step-2/greedy"].datasets[0].num_items == 1


async def test_it_reads_the_pass_of_a_lone_policy_of_several_that_play_apart(worlds: Make) -> None:
    world = make(
        worlds, policies=("a", "b"), rollout={"policies": "apart"}, evaluation={"policies": ["a"]},
        until={"at_least": {"a": 0.9}, "in_a_row": 1},
    )  # fmt: skip
    ((name, _, _),) = world.core.evaluations.kinds("step-1")
    world.core.evaluations.recover_result(result(name, 1.0))
    assert world.core.reached_threshold
