"""Two runs with one ``run.seed`` issue the same tasks, episodes and sampling seeds, for any names and any pace."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable

from benchmarks._peers import ScriptedReplica, ScriptedTrainer
from services.common.errors import slot_seed
from services.common.records import Purpose, TaskGroupOrder
from services.common.wire import read
from tests.integration.orchestrator.conftest import Orchestrator

Make = Callable[..., Orchestrator]
Peers = list[ScriptedReplica | ScriptedTrainer]

STEPS = 8
EVALUATION = {"every": 2, "samples_per_task": 3, "samplings": {"greedy": {"temperature": 0.0}, "drawn": {}}}


async def issued(
    orchestrator: Orchestrator,
    peers: Peers,
    *,
    latency_s: float,
    train_s: float,
    kill_at: int | None = None,
) -> list[TaskGroupOrder]:
    """The orders of a whole run in the order of their issue, each once."""
    replica, trainer = await orchestrator.start_with(peers, latency_s=latency_s, train_s=train_s)
    async with asyncio.timeout(90):
        training = asyncio.ensure_future(trainer.run(STEPS))
        if kill_at is not None:
            await orchestrator.until(lambda now: now.policies[0].version >= kill_at)
            await orchestrator.restart()
        await training
        await trainer.stopped.wait()
        assert await orchestrator.wait() == 0
    first = {order.task_group_id: read(TaskGroupOrder, order) for order in reversed(replica.orders)}
    return [first[name] for name in sorted(first, key=lambda name: int(name.rpartition("-")[2]))]


def draws(order: TaskGroupOrder) -> tuple[object, ...]:
    """The fields of an order that decide the draws, without its name and versions."""
    slots = [slot_seed(order.seed, index) for index in order.indices]
    return (order.task.task_id, repr(order.task.data), order.seed, tuple(slots), order.sampling, order.policies)


async def test_two_runs_with_one_seed_issue_equal_tasks_episodes_and_sampling_seeds_throughout(
    orchestrators: Make, peers: Peers
) -> None:
    """The second run has another name, is slower, is killed once, and has another order of arrivals."""
    steps = {"run__steps": STEPS, "evaluation": EVALUATION, "run__seed": 7}
    one, other = orchestrators(**steps, run__id="one"), orchestrators(**steps, run__id="other")
    orders = await issued(one, peers, latency_s=0.002, train_s=0.02)
    again = await issued(other, peers, latency_s=0.01, train_s=0.05, kill_at=3)
    marks = {order.task_group_id.rpartition("-")[0] for order in orders + again}
    assert len(marks) == 2, "the groups of the two runs have names of their own"

    training, retraining = ([draws(o) for o in found if o.purpose is Purpose.TRAIN] for found in (orders, again))
    common = min(len(training), len(retraining))  # how many more are begun before the end is a matter of time
    assert common >= STEPS * 16 // 4
    assert training[:common] == retraining[:common]
    assert len({order[2] for order in training}) == len(training), "each pass over the tasks has seeds of its own"

    evaluations = [Counter(draws(o) for o in found if o.purpose is Purpose.EVALUATION) for found in (orders, again)]
    assert evaluations[0] == evaluations[1]
    passes = 2 + STEPS // 2 - 1  # start, steps 2, 4 and 6, end
    assert set(evaluations[0].values()) == {passes}, "every evaluation draws common random numbers"
    assert len(evaluations[0]) == 2 * 5, "two ways of sampling, five rows"
    seeds = {(task, seed) for task, _, seed, *_ in evaluations[0]}
    assert len(seeds) == 5, "a row's episode is the same under both ways of sampling"
