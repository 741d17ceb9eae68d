"""Episodes that a classic controller of AgentBench plays, and how failures are told apart. The adapter's protocol is played
against our own task server: ``test_taskserver``."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from extras.worlds.agentbench import AgentBenchEpisode, AgentBenchWorld, Reply, reward_of
from extras.worlds.settings import AgentBenchConfig
from extras.worlds.tests.agentbench_fakes import CAPACITY, FakeController, running
from services.common.errors import CapacityError, ConfigError, InfrastructureError, InvalidRequestError
from services.envgateway.envs.base import EndStatus, EpisodeLostError
from tests.waiting import until


@asynccontextmanager
async def playing(fake: Any, **settings: Any) -> AsyncIterator[AgentBenchWorld]:
    async with running(fake) as url:
        world = AgentBenchWorld(AgentBenchConfig(url=url, **settings))
        try:
            yield world
        finally:
            await world.close()


async def begin(world: AgentBenchWorld, index: int | str = 0) -> AgentBenchEpisode:
    episode = world.build()
    await episode.reset({"index": index}, 0)
    return episode


async def test_an_episode_from_its_first_turn_to_its_reward() -> None:
    fake = FakeController()
    async with playing(fake) as world:
        episode = world.build()
        first = await episode.reset({"index": 1, "messages": []}, 7)
        assert [message["role"] for message in first.messages] == ["user", "assistant", "user"]
        assert first.text == "rules\n\nOK.\n\nfirst turn"
        result = await episode.step("hello")
        assert (result.observation, result.reward, result.done) == ("you said hello", 0.0, False)
        result = await episode.step("win")
        assert (result.reward, result.done, result.status) == (1.0, True, "completed")
        await episode.close()
        assert fake.cancelled == [] and fake.taken == {}


@pytest.mark.parametrize(
    ("order", "reward", "status"),
    [("lose", 0.0, "agent invalid action"), ("limit", 0.0, "task limit reached"), ("third", 0.33, "completed")],
)
async def test_ends_of_the_agents_making_are_results(order: str, reward: float, status: str) -> None:
    async with playing(FakeController()) as world:
        result = await (await begin(world)).step(order)
        assert (result.reward, result.done, result.status) == (reward, True, status)


@pytest.mark.parametrize("order", ["error", "unknown", "raise", "drop"])
async def test_a_task_that_failed_is_never_a_reward(order: str) -> None:
    async with playing(FakeController()) as world:
        with pytest.raises(EpisodeLostError):
            await (await begin(world)).step(order)


async def test_a_completed_task_without_a_reward_is_none_of_zero() -> None:
    async with playing(FakeController()) as world:
        with pytest.raises(EpisodeLostError, match="holds no reward"):
            await (await begin(world)).step("nothing")
    assert reward_of({"log": []}, EndStatus.TURN_LIMIT) == 0.0


async def test_an_episode_that_is_closed_early_gives_its_place_back() -> None:
    fake = FakeController()
    async with playing(fake) as world:
        episodes = [await begin(world) for _ in range(CAPACITY)]
        with pytest.raises(CapacityError) as refusal:
            await begin(world)
        assert refusal.value.retry_after_s
        await episodes[0].close()
        await episodes[0].close()
        assert len(fake.cancelled) == 1
        await begin(world)


async def test_the_slot_that_a_raising_task_leaks_is_freed() -> None:
    fake = FakeController(failing_syncs=1)
    async with playing(fake) as world:
        other = await begin(world)
        with pytest.raises(EpisodeLostError, match="501"):
            await (await begin(world)).step("raise")
        with pytest.raises(CapacityError):
            await begin(world)
        await until(lambda: not fake.leaked)
        await begin(world)
        assert fake.syncs == 2
        assert not (await other.step("hello")).done


async def test_a_busy_server_is_asked_again_and_the_turn_taken_once() -> None:
    fake = FakeController()
    async with playing(fake) as world:
        result = await (await begin(world)).step("busy 2")
        assert result.observation == "you said busy 2"
        assert fake.refusals == 2 and fake.said == ["busy 2"]


async def test_a_turn_that_a_busy_server_never_took_may_be_repeated() -> None:
    fake = FakeController()
    async with playing(fake, step_timeout_s=1.0) as world:
        episode = await begin(world)
        with pytest.raises(InfrastructureError, match="busy") as failure:
            await episode.step("busy 99")
        assert not isinstance(failure.value, EpisodeLostError) and fake.said == []
        assert (await episode.step("hello")).observation == "you said hello"


async def test_a_turn_without_an_answer_loses_the_episode_for_it_may_have_been_taken() -> None:
    fake = FakeController()
    async with playing(fake, step_timeout_s=0.3) as world:
        episode = await begin(world)
        with pytest.raises(EpisodeLostError, match="no answer within"):
            await episode.step("slow")
        assert len(fake.cancelled) == 1


async def test_a_session_that_the_server_forgot_is_lost() -> None:
    fake = FakeController()
    async with playing(fake) as world:
        episode = await begin(world)
        fake.taken.clear()
        with pytest.raises(EpisodeLostError, match=r"not exist|not found"):
            await episode.step("hello")


async def test_an_index_that_is_none_is_the_tasks_mistake_and_a_dead_worker_is_not() -> None:
    async with playing(FakeController()) as world:
        for index in (7, "y"):
            with pytest.raises(InvalidRequestError, match="has no sample"):
                await begin(world, index)
        with pytest.raises(InfrastructureError, match="not responding"):
            await begin(world, "worker gone")
        await begin(world, "x")
        for task in ({}, {"index": None}, {"index": True}):
            with pytest.raises(InvalidRequestError, match="needs `index`"):
                await world.build().reset(task, 0)
    behind_a_pool = {"upstream_status": 404, "adapter_port": 5001, "upstream_detail": {"detail": "Sample 7 not found"}}
    assert str(Reply(404, json.dumps({"detail": behind_a_pool}))) == "404 Sample 7 not found"


async def test_the_task_of_a_controller_is_its_only_one_or_named() -> None:
    async with playing(FakeController(tasks=("a", "b"))) as world:
        with pytest.raises(ConfigError, match="a, b"):
            await begin(world)
    async with playing(FakeController(tasks=("a", "b")), task="b") as world:
        await begin(world)
    async with playing(FakeController(tasks=())) as world:
        with pytest.raises(InfrastructureError, match="no worker has registered"):
            await begin(world)
    async with playing(FakeController(), task="other") as world:
        with pytest.raises(InfrastructureError, match="no task 'other'"):
            await begin(world)
