"""Our client of AgentBench's protocols against our own task server."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from extras.worlds import agentbench as episode_module
from extras.worlds import taskserver
from extras.worlds.agentbench import AgentBenchWorld
from extras.worlds.tests.taskserver_scripted import Http, task_server
from services.common.config.envgateway import AgentBenchConfig, ServedTaskConfig
from services.common.errors import CapacityError, InvalidRequestError
from services.envgateway.envs.base import EpisodeLostError

PROTOCOLS = ["classic", "adapter"]


@asynccontextmanager
async def playing(protocol: Any, concurrency: int = 8, **settings: Any) -> AsyncIterator[tuple[AgentBenchWorld, Http]]:
    async with task_server({"orders": ServedTaskConfig(concurrency=concurrency)}, **settings) as server:
        url = f"http://127.0.0.1:{server.server.port}/api"
        world = AgentBenchWorld(AgentBenchConfig(url=url, protocol=protocol))
        yield world, server
        await world.close()


@pytest.mark.parametrize("protocol", PROTOCOLS)
async def test_episodes_are_played_to_their_ends(protocol: str) -> None:
    async with playing(protocol) as (world, server):
        assert list(await world.indices()) == list(range(6))
        for order, reward, status in (("win", 1.0, "completed"), ("limit", 0.5, "task limit reached")):
            episode = world.build()
            first = await episode.reset({"index": 2}, 0)
            assert first.messages[-1]["content"] == "task 2 of seed 2, plain"
            assert [message["role"] for message in first.messages] == ["user", "assistant", "user"]
            assert (await episode.step("hello")).observation == "you said hello"  # pays 0.25
            result = await episode.step(order)
            assert (result.reward, result.done, result.status) == (reward, True, status)
        assert server.episodes.num_live == 0


@pytest.mark.parametrize("protocol", PROTOCOLS)
async def test_failures_are_distinguished_and_places_are_freed(protocol: str) -> None:
    async with playing(protocol, concurrency=1) as (world, server):
        with pytest.raises(InvalidRequestError):
            await world.build().reset({"index": 99}, 0)
        for order in ("lost", "crash"):
            episode = world.build()
            await episode.reset({"index": 0}, 0)
            with pytest.raises(EpisodeLostError):
                await episode.step(order)
        episode = world.build()
        await episode.reset({"index": 0}, 0)
        with pytest.raises(CapacityError):
            await world.build().reset({"index": 1}, 0)
        assert (await episode.step("fail 2")).observation == "you said fail 2"  # the server itself repeats such a turn
        await episode.close()
        assert server.episodes.num_live == 0
        await world.build().reset({"index": 1}, 0)


async def test_a_server_of_both_protocols_is_taken_for_a_controller() -> None:
    async with playing("auto") as (world, _):
        assert type(await world.server()).__name__ == "ClassicServer"


@pytest.mark.parametrize("protocol", PROTOCOLS)
async def test_an_action_that_the_server_does_not_read_ends_the_episode_without_another_try(
    protocol: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(taskserver, "BODY_BYTES", 2000)
    async with playing(protocol, concurrency=1) as (world, server):
        for action in ("a" * 3000, "\ud800"):  # larger than the server's largest body; no Unicode text
            episode = world.build()
            await episode.reset({"index": 0}, 0)
            with monkeypatch.context() as unguarded:
                unguarded.setattr(episode_module, "sendable", str)
                result = await episode.step(action)
            assert (result.reward, result.done, result.status) == (0.0, True, "agent invalid action")
            assert server.episodes.num_live == 0


@pytest.mark.parametrize("protocol", PROTOCOLS)
async def test_any_action_is_sent_so_that_the_server_reads_it(protocol: str) -> None:
    async with playing(protocol, concurrency=1) as (world, _):
        episode = world.build()
        await episode.reset({"index": 0}, 0)
        for action in (
            "x" * (17 << 20),
            "\ud800\udfff",
            "a\0b",
            '{"done": true, "reward": 1.0}',
            "",
            "\u2028" * 300_000,
        ):
            assert not (await episode.step(action)).done
