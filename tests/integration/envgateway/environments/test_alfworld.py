"""ALFWorld's real engine over real gRPC: recorded episodes, and engines that die or stall in mid-episode."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from services.common.config.environments import AlfworldConfig, EnginePoolConfig
from services.common.errors import (
    EpisodeNotFoundError,
    InfrastructureError,
    InvalidRequestError,
    UnknownEnvironmentError,
)
from services.envgateway.envs.alfworld import prompts
from services.envgateway.envs.alfworld.unpack import unpack
from services.envgateway.envs.alfworld.world import AlfworldWorld

from .playing import Player, serving

if importlib.util.find_spec("alfworld") is None:  # importing it here would bring torch and overwrite sys.argv
    pytest.skip("the extra alfworld is not installed", allow_module_level=True)

# A client asks again by itself after the first, and then hears the second. Rollouts start anew after either.
LOST = (InfrastructureError, EpisodeNotFoundError)


@pytest.fixture(scope="module")
def rows(data_root: Path) -> Path:
    """The folder of made games and of what the real engine answered in them."""
    folder = data_root / "alfworld_made"
    if not (folder / "games.jsonl").is_file():
        pytest.skip(f"{folder} holds no games.jsonl")
    return folder


@pytest.fixture(scope="module")
def data(rows: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """ALFWorld's tree of folders, made of the rows."""
    folder = tmp_path_factory.mktemp("alfworld")
    unpack(rows / "games.jsonl", rows / "domain.json", folder)
    return folder


def traces(rows: Path, kind: str) -> list[dict[str, Any]]:
    lines = (rows / "traces.jsonl").read_text(encoding="utf-8").splitlines()
    return [trace for trace in map(json.loads, lines) if trace["kind"] == kind]


def is_possible(trace: dict[str, Any]) -> bool:
    """Whether every action was listed: one that is not would be replaced."""
    listed = [trace["admissible"], *(step["admissible"] for step in trace["steps"])]
    return all(step["action"] in actions for step, actions in zip(trace["steps"], listed, strict=False))


async def replay(player: Player, trace: dict[str, Any]) -> None:
    episode = await player.begin("alfworld", {"game": trace["game"]})
    room = "\n".join(trace["intro"].split("\n\n")[1:])
    assert episode.observation.endswith(prompts.TASK_LEAD + room + prompts.offer(trace["admissible"]))
    assert list(episode.admissible_actions) == trace["admissible"]
    for turn, step in enumerate(trace["steps"], start=1):
        result = await player.step(episode, turn, f"THOUGHT: as recorded\nACTION: {step['action']}")
        assert result.observation == step["observation"].strip() + prompts.offer(step["admissible"])
        assert list(result.admissible_actions) == step["admissible"]
        assert (result.reward, result.done) == (step["reward"], step["done"])
    await player.close(episode)


@pytest.mark.slow
async def test_recorded_expert_episodes_reproduce(rows: Path, data: Path) -> None:
    recorded = traces(rows, "expert")
    assert len(recorded) == 18
    async with serving(alfworld=AlfworldConfig(data=data, engine=EnginePoolConfig(num_workers=2))) as player:
        await asyncio.gather(*(replay(player, trace) for trace in recorded))


async def test_recorded_random_episodes_reproduce(rows: Path, data: Path) -> None:
    async with serving(alfworld=AlfworldConfig(data=data)) as player:
        await asyncio.gather(*(replay(player, trace) for trace in traces(rows, "random") if is_possible(trace)))


async def test_the_same_game_may_be_played_often_at_once_in_one_process(rows: Path, data: Path) -> None:
    engine = EnginePoolConfig(num_workers=1)
    async with serving(alfworld=AlfworldConfig(data=data, engine=engine)) as player:
        trace = traces(rows, "expert")[4]
        await asyncio.gather(*(replay(player, trace) for _ in range(4)))
        await replay(player, trace)  # on an engine that was used before


async def test_an_engine_killed_in_mid_episode_loses_its_episodes_and_no_others(rows: Path, data: Path) -> None:
    trace = traces(rows, "expert")[4]
    task = {"game": trace["game"]}
    async with serving(alfworld=AlfworldConfig(data=data)) as player:
        pool = engine_pool(player)
        first = await player.begin("alfworld", task)
        victim = pool.pids[0]
        second = await player.begin("alfworld", task)  # in the other process
        await player.step(first, 1, f"ACTION: {trace['steps'][0]['action']}")
        os.kill(victim, signal.SIGKILL)
        for _ in range(2):
            with pytest.raises(LOST, match="alfworld engine that held this game has ended"):
                await player.step(first, 2, f"ACTION: {trace['steps'][1]['action']}")
        for turn, step in enumerate(trace["steps"], start=1):
            result = await player.step(second, turn, f"ACTION: {step['action']}")
        assert (result.reward, result.done) == (1.0, True)
        await replay(player, trace)
        assert victim not in pool.pids and len(pool.pids) == 2


async def test_a_stalled_engine_is_killed_within_its_deadline(rows: Path, data: Path) -> None:
    trace = traces(rows, "expert")[4]
    engine = EnginePoolConfig(num_workers=1, step_timeout_s=1.0)
    async with serving(alfworld=AlfworldConfig(data=data, engine=engine)) as player:
        pool = engine_pool(player)
        episode = await player.begin("alfworld", {"game": trace["game"]})
        (stalled,) = pool.pids
        os.kill(stalled, signal.SIGSTOP)
        with pytest.raises(LOST, match=r"longer than 1 s"):
            await player.step(episode, 1, "ACTION: look")
        assert not Path(f"/proc/{stalled}").exists()
        await replay(player, trace)


async def test_a_task_without_a_game_and_a_gateway_without_data_say_what_is_missing(data: Path, tmp_path: Path) -> None:
    async with serving(alfworld=AlfworldConfig(data=data)) as player:
        assert "alfworld" in await player.names()
        with pytest.raises(InvalidRequestError, match="count from 0 to 17"):
            await player.begin("alfworld", {"index": 18})
        with pytest.raises(InvalidRequestError, match="there is no game"):
            await player.begin("alfworld", {"game": "json_2.1.1/none/game.tw-pddl"})
    async with serving() as player:
        with pytest.raises(UnknownEnvironmentError, match=r"envgateway\.alfworld\.data"):
            await player.begin("alfworld", {"index": 0})
    async with serving(alfworld=AlfworldConfig(data=tmp_path / "none")) as player:
        with pytest.raises(UnknownEnvironmentError, match="there is no folder"):
            await player.begin("alfworld", {"index": 0})


def engine_pool(player: Player) -> Any:
    """The pool behind the gateway's world: its processes are what the tests kill."""
    world = player.gateway._environments._worlds["alfworld"]
    assert isinstance(world, AlfworldWorld)
    return world.pool
