"""Our environment at the servers of the real AgentBench."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from extras.worlds.agentbench import AgentBenchWorld
from extras.worlds.made import unpack
from extras.worlds.tests.agentbench_real import (
    CONCURRENCY,
    RAISING_TASK,
    Checkout,
    adapter,
    checkout,
    controller,
    pool,
)
from services.common.config.envgateway import AgentBenchConfig
from services.common.errors import CapacityError, EpisodeNotFoundError, InfrastructureError, InvalidRequestError
from tests import needs
from tests.integration.envgateway.environments.serving import Client, served_world
from tests.waiting import accepted

pytestmark = [pytest.mark.slow, pytest.mark.needs("alfworld", "AgentBench", "made ALFWorld games")]
LOST = (InfrastructureError, EpisodeNotFoundError)


@pytest.fixture(scope="module")
def games(data_root: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str], list[dict[str, Any]]]:
    """ALFWorld's tree, its games, and the expert's recorded episodes in the same order."""
    rows = data_root / "alfworld_made"
    folder = tmp_path_factory.mktemp("games")
    names = unpack(rows / "games.jsonl", rows / "domain.json", folder)
    recorded = [json.loads(line) for line in (rows / "traces.jsonl").read_text(encoding="utf-8").splitlines()]
    by_game = {trace["game"]: trace for trace in recorded if trace["kind"] == "expert"}
    return folder, names, [by_game[name] for name in names]


@pytest.fixture
def bench(games: Any, tmp_path: Path) -> Checkout:
    folder, names, _ = games
    return checkout(tmp_path, folder, names)


async def play(client: Client, index: int, trace: dict[str, Any]) -> None:
    """The expert's actions give the recorded observations, and win."""
    episode = await client.create("bench", {"index": index})
    assert trace["intro"].split("\n\n")[-1] in episode.observation
    for turn, step in enumerate(trace["steps"], start=1):
        result = await client.step(episode.episode_id, turn, f"THOUGHT: as recorded\nACTION: {step['action']}")
        assert (result.reward, result.done) == (float(step["reward"]), step["done"])
        if not result.done:
            offered = " AVAILABLE ACTIONS: " + "\n".join(step["admissible"])
            assert result.observation.strip() == step["observation"].strip() + offered
    await client.close(episode.episode_id)


async def test_the_experts_episodes_are_won_at_the_classic_controller(bench: Checkout, games: Any) -> None:
    traces = games[2]
    async with controller(bench) as (url, _):
        world = AgentBenchWorld(AgentBenchConfig(url=url))
        async with served_world("bench", world) as client:
            for index in (1, 4, 8):  # one by one: its worker's engine is not thread-safe
                await play(client, index, traces[index])
            with pytest.raises(InvalidRequestError, match="has no sample"):
                await client.create("bench", {"index": 99})


async def test_places_at_the_classic_controller_are_counted_given_back_and_lost_with_the_worker(
    bench: Checkout,
) -> None:
    if bench.has("src.server.task_server_adapter"):
        needs.unmet(
            "AgentBench", "the task of this fork goes on when it is cancelled: its worker is then taken for dead"
        )
    async with controller(bench) as (url, worker):
        async with served_world("bench", AgentBenchWorld(AgentBenchConfig(url=url))) as client:
            held = [await client.create("bench", {"index": 4}) for _ in range(CONCURRENCY)]
            with pytest.raises(CapacityError):
                await client.create("bench", {"index": 4})
            await client.close(held[0].episode_id)
            again = await client.create("bench", {"index": 4})
            worker.kill()
            with pytest.raises(LOST):
                await client.step(again.episode_id, 1, "ACTION: look")
            with pytest.raises((InfrastructureError, CapacityError)):
                await client.create("bench", {"index": 4})


async def test_the_slot_that_a_raising_task_leaks_at_the_classic_controller_is_freed(bench: Checkout) -> None:
    async with controller(bench, RAISING_TASK) as (url, _):
        async with served_world("bench", AgentBenchWorld(AgentBenchConfig(url=url))) as client:
            for _ in range(2):
                episode = await begin_when_free(client)
                with pytest.raises(LOST, match="501"):
                    await client.step(episode.episode_id, 1, "hello")


async def begin_when_free(client: Client) -> Any:
    return await accepted(lambda: client.create("bench", {"index": 0}), CapacityError)


async def test_the_experts_episodes_are_won_at_the_adapter(bench: Checkout, games: Any) -> None:
    if not bench.has("src.server.task_server_adapter"):
        needs.unmet("AgentBench", "this checkout has no task-server adapter")
    traces = games[2]
    async with adapter(bench) as url:
        world = AgentBenchWorld(AgentBenchConfig(url=url))
        async with served_world("bench", world) as client:
            for index in (1, 4, 8):
                await play(client, index, traces[index])
            with pytest.raises(InvalidRequestError, match="not found"):
                await client.create("bench", {"index": 99})
            episode = await client.create("bench", {"index": 4})
            same = [await client.step(episode.episode_id, turn, "ACTION: look") for turn in range(1, 5)]
            assert [(result.done, result.reward) for result in same] == [(False, 0.0)] * 3 + [(True, 0.0)]
            episode = await client.create("bench", {"index": 4})
            assert await health(url) == 1
            await client.close(episode.episode_id)
            assert await health(url) == 0


async def test_episodes_at_a_pool_of_adapters_end_with_its_words(bench: Checkout, games: Any) -> None:
    if not bench.has("src.server.adapter_pool_controller"):
        needs.unmet("AgentBench", "this checkout has no pool of adapters")
    traces = games[2]
    async with pool(bench) as url:
        async with served_world("bench", AgentBenchWorld(AgentBenchConfig(url=url))) as client:
            await asyncio.gather(*(play(client, index, traces[index]) for index in (1, 4)))
            with pytest.raises(InvalidRequestError, match="not found"):
                await client.create("bench", {"index": 99})
            with pytest.raises(InvalidRequestError, match="expected integer"):
                await client.create("bench", {"index": "x"})


async def health(url: str) -> int:
    async with aiohttp.ClientSession() as session, session.get(f"{url}/health") as response:
        return int((await response.json())["active_episodes"])
