"""Pause, evaluation, stop and failures of a run."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace

import pytest

from services.common.errors import ConfigError
from services.common.records import RunCount, WeightVersion
from services.common.telemetry.accounts import PeerState
from services.orchestrator.groups import RunState
from services.orchestrator.members import LeavePool, TrainerRequest
from tests.unit.orchestrator.builders import failure, sequence, trajectory
from tests.unit.orchestrator.world import World, living
from tests.waiting import WAIT_S, until


async def test_pause_issues_nothing_and_starts_no_step_and_resume_goes_on(worlds: Callable[..., World]) -> None:
    world = worlds()
    trainer = world.trainer_api.join("model0", "t", 1, 0)
    await world.publish(0)
    replica = world.join()
    world.core.pause()
    world.core.pause()
    world.train()
    assert await world.orders(replica) == []
    await world.crash()
    assert world.core.control.state is RunState.PAUSED
    trainer = world.trainer_api.join("model0", "t", 1, 0)
    assert trainer.mailbox is not None
    assert await trainer.mailbox.get() is TrainerRequest.PAUSE
    replica = world.join()
    world.train()
    assert await world.orders(replica) == []
    world.core.resume()
    assert await trainer.mailbox.get() is TrainerRequest.RESUME
    assert len(await world.orders(replica)) == 4


async def test_little_free_disk_holds_back_new_work_and_says_so(
    worlds: Callable[..., World], monkeypatch: pytest.MonkeyPatch
) -> None:
    world = worlds()
    await world.publish(0)
    replica = world.join()
    monkeypatch.setattr(world.journal, "free_bytes", lambda: 4_000_000)
    await world.watch().tick()
    world.train()
    assert await world.orders(replica) == []
    assert "free disk is below orchestrator.min_free_bytes" in world.core.dispatcher.waits_for
    monkeypatch.undo()
    await world.watch().tick()
    assert len(await world.orders(replica)) == 4


async def test_evaluation_comes_before_training_and_its_denominator_never_shrinks(worlds: Callable[..., World]) -> None:
    world = worlds()
    async with living(world):
        replica = world.join()
        await world.publish(0)
        await until(lambda: world.core.control.state is RunState.EVALUATING_START)
        orders = await world.orders(replica)
        assert [dict(o.required_versions) for o in orders] == [{"model0": 0}] * 3
        await world.send(trajectory(orders[0].task_group_id, 0, reward=1.0), failure(orders[1].task_group_id, 0))
    await world.crash()
    async with living(world):
        replica = world.join()
        (left,) = await world.orders(replica)
        assert left.task_group_id == orders[2].task_group_id
        wrong = trajectory(left.task_group_id, 0, sequence(1.0, version=0), reward=1.0)
        await world.send(wrong)
        await until(lambda: world.core.control.state is RunState.TRAINING)
        result = world.core.evaluations.results["start/greedy"]
        assert (result.mean_reward, result.num_trajectories, result.num_failed) == (2 / 3, 3, 1)
        assert len(await world.orders(replica)) == 4


async def test_an_evaluation_on_a_version_that_nobody_holds_any_more_ends(worlds: Callable[..., World]) -> None:
    world = worlds()
    await world.publish(0)
    await world.core.begin_evaluation("asked")
    world.join(number=0)
    await world.settle()  # decided: the pass runs on version 0
    world.core.apply_version(WeightVersion(policy="model0", number=1, digest="d1"), {})
    watch = world.watch()
    for _ in range(8):
        world.join(number=1)
        await watch.tick()
        world.clock.now += 5.0
    await world.settle()
    result = world.core.evaluations.results["asked/greedy"]
    assert (result.mean_reward, result.num_trajectories, result.num_failed) == (None, 3, 3)
    assert world.core.counters["failures_version_unavailable"] == 3
    assert world.core.ingest.failures_in_a_row == 0, "a lost version tells nothing about rollouts"


async def test_stop_ends_the_run_before_its_last_step(worlds: Callable[..., World]) -> None:
    world = worlds()
    async with living(world) as life:
        await world.publish(0)
        replica = world.join()
        await world.orders(replica)
        world.core.control.stop("enough")
        await asyncio.wait_for(life, WAIT_S)
        commands = await world.commands(replica)
        assert isinstance(commands[-1], LeavePool)
        assert world.core.control.state is RunState.STOPPED
        assert (world.run_dir / "summary.json").is_file()
        late = world.join("late")
        assert [type(c) for c in await world.commands(late)] == [LeavePool]
    await world.crash()
    assert world.core.control.state is RunState.STARTING  # after a restart the run continues


async def test_a_run_in_which_no_rollout_ever_succeeded_ends_with_the_reason_and_goes_on_when_resumed(
    worlds: Callable[..., World],
) -> None:
    world = worlds(size=64, max_staleness=8)
    watch, replica = world.watch(), world.join()
    await world.publish(0)
    world.train()
    num_failed = 0

    async def play() -> None:
        nonlocal num_failed
        while num_failed < 1000:
            for order in await world.orders(replica):
                for index in order.indices:
                    failed = failure(order.task_group_id, index, "KeyError")
                    await world.send(replace(failed, detail="/mine/reward.py:7: 'answer'"))
                num_failed += len(order.indices)
            world.clock.now += 2
            await watch.tick()

    with pytest.raises(ConfigError, match="no rollout of this run has succeeded") as ended:
        await play()
    assert 256 <= num_failed < 1000
    told = ended.value.message
    assert "the newest with KeyError: /mine/reward.py:7: 'answer'" in told
    assert "`rollmill run --resume RUN`" in told and "`rollmill fate RUN`" in told
    assert not (world.run_dir / "summary.json").exists()
    await world.crash()
    assert world.core.control.state is RunState.STARTING
    replica = world.join()
    world.train()
    assert await world.orders(replica)


@pytest.mark.parametrize("reason", ["INVALID_CONFIG", "UNKNOWN_POLICY", "MODEL_MISMATCH"])
async def test_a_wrong_recipe_ends_also_a_run_that_had_succeeded(worlds: Callable[..., World], reason: str) -> None:
    world = worlds()
    parts, watch = world.core, world.watch()
    parts.counters[RunCount.TOKENS_RECORDED.value] = 1
    parts.ingest.failures_in_a_row = 256
    parts.ingest.last_failure = f"{reason}: no such setting"
    world.clock.now += 2
    with pytest.raises(ConfigError, match="no such setting"):
        await watch.tick()
    assert not parts.control.paused


MACHINERY = ["INFRASTRUCTURE", "REPLICAS_LOST"]


@pytest.mark.parametrize("reason", MACHINERY)
@pytest.mark.parametrize("num_tokens", [0, 1])
async def test_failing_machinery_pauses_a_run_that_tries_again_by_itself_and_not_for_ever(
    worlds: Callable[..., World], reason: str, num_tokens: int
) -> None:
    world = worlds()
    parts, watch, began = world.core, world.watch(), world.clock.now
    parts.counters[RunCount.TOKENS_RECORDED.value] = num_tokens

    async def passes(seconds: float) -> None:
        for _ in range(round(seconds / 2)):
            world.clock.now += 2
            await watch.tick()

    async def fail() -> None:
        parts.ingest.failures_in_a_row = 256
        parts.ingest.last_failure = f"{reason}: judge at http://10.0.0.5:8000: connection refused"
        await passes(2)

    def told() -> int:
        return parts.counters[RunCount.PAUSES_FOR_FAILURES.value]

    await fail()
    assert parts.control.paused and "by itself after 60 s" in parts.dispatcher.held_back
    await passes(50)
    assert parts.control.paused
    await passes(12)
    assert not parts.control.paused and parts.ingest.failures_in_a_row == 0 and not parts.dispatcher.held_back
    while world.clock.now < began + 590:
        await fail()
        assert parts.control.paused and told() == 0
        await passes(60)
        assert not parts.control.paused
    world.clock.now = max(world.clock.now, began + 610)
    if not num_tokens:
        with pytest.raises(ConfigError, match="no rollout of this run has succeeded"):
            await fail()
        return
    await fail()
    await passes(100)
    assert parts.control.paused and told() == 1 and "by itself" not in parts.dispatcher.held_back
    world.core.resume()
    await passes(2)
    parts.counters[RunCount.TOKENS_RECORDED.value] += 1  # a rollout succeeds
    await fail()
    assert parts.control.paused and told() == 1 and "by itself after 60 s" in parts.dispatcher.held_back


async def test_a_run_pauses_when_every_rollout_fails_until_a_person_or_another_process_tries_again(
    worlds: Callable[..., World],
) -> None:
    world = worlds()
    parts, watch = world.core, world.watch()
    parts.counters[RunCount.TOKENS_RECORDED.value] = 1

    async def failed(number: int) -> bool:
        parts.ingest.failures_in_a_row = number
        parts.ingest.last_failure = "TypeError: the reward is broken"
        world.clock.now += 2
        await watch.tick()
        return parts.control.paused

    assert not await failed(255) and await failed(256)
    assert "the reward is broken" in parts.dispatcher.held_back and "rollmill resume" in parts.dispatcher.held_back
    world.core.resume()
    assert not await failed(256), "it has begun anew"
    assert parts.ingest.failures_in_a_row == 0 and not parts.dispatcher.held_back
    assert await failed(256)
    await world.crash()
    assert not world.core.control.paused
    world.core.pause()
    await world.crash()
    assert world.core.control.paused


async def test_a_run_paused_because_replicas_could_not_reach_a_peer_goes_on_when_they_hear_of_it(
    worlds: Callable[..., World],
) -> None:
    world = worlds()
    parts, watch = world.core, world.watch()
    parts.counters[RunCount.TOKENS_RECORDED.value] = 1
    replica = world.join()
    await watch.tick()

    async def heard(silent_s: float) -> None:
        gateway = PeerState(component="envgateway", silent_s=silent_s)
        world.replica_api.report("a", "1", held=replica.held, num_tokens=0, emission=[], peers=(gateway,))
        world.clock.now += 2
        await watch.tick()

    parts.ingest.failures_in_a_row = 256
    await heard(silent_s=40.0)
    assert parts.control.paused
    assert "by itself once replicas hear of envgateway again" in parts.dispatcher.held_back
    await heard(silent_s=42.0)
    assert parts.control.paused and parts.counters[RunCount.PAUSES_FOR_FAILURES.value] == 0
    world.clock.now += 600.0
    await heard(silent_s=640.0)
    assert not parts.control.paused, "it tries once more"
    parts.ingest.failures_in_a_row = 256
    await heard(silent_s=642.0)
    assert parts.control.paused
    assert parts.counters[RunCount.PAUSES_FOR_FAILURES.value] == 1, "now a person ends it, or the gateway"
    await heard(silent_s=0.0)
    assert not parts.control.paused and "failures" not in parts.dispatcher.holds
    assert parts.ingest.failures_in_a_row == 0

    parts.ingest.failures_in_a_row = 256
    await heard(silent_s=0.0)  # now the gateway is not the cause
    assert parts.control.paused
    await heard(silent_s=0.0)
    assert parts.control.paused
