"""ALFWorld's real engine over real gRPC: recorded episodes, and engines that die or stall in mid-episode."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from extras.worlds import alfworld
from extras.worlds.alfworld import AlfworldWorld
from extras.worlds.engines import pool as engine_pool
from extras.worlds.made import write_games
from extras.worlds.messages import offer
from extras.worlds.settings import AlfworldConfig, EnginePoolConfig
from tests import needs
from tests.integration.envgateway.environments.serving import TIMEOUT_S, Client, served_world

pytestmark = pytest.mark.needs("alfworld")

# A client asks again by itself after the first, and then hears the second. Rollouts start anew after either.


@pytest.fixture(scope="module")
def rows(data_root: Path) -> Path:
    """The folder of made games and of the real engine's answers."""
    needs.check("made ALFWorld games")
    return data_root / "alfworld_made"


@pytest.fixture(scope="module")
def data(rows: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """ALFWorld's tree of folders, made of the rows."""
    folder = tmp_path_factory.mktemp("alfworld")
    unpack(rows, folder)
    return folder


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Games wait for their turn at an engine as long as the test takes on a busy machine."""
    monkeypatch.setattr(engine_pool, "_QUEUE_TIMEOUT_S", TIMEOUT_S)


def world_of(data: Path, **engine: Any) -> AlfworldWorld:
    config = EnginePoolConfig(**{"step_timeout_s": TIMEOUT_S, "start_timeout_s": TIMEOUT_S, **engine})
    return AlfworldWorld(AlfworldConfig(data=data, engine=config), data)


def traces(rows: Path, kind: str) -> list[dict[str, Any]]:
    lines = (rows / "traces.jsonl").read_text(encoding="utf-8").splitlines()
    return [trace for trace in map(json.loads, lines) if trace["kind"] == kind]


def is_possible(trace: dict[str, Any]) -> bool:
    """Whether every action was listed: one that is not would be replaced."""
    listed = [trace["admissible"], *(step["admissible"] for step in trace["steps"])]
    return all(step["action"] in actions for step, actions in zip(trace["steps"], listed, strict=False))


async def replay(client: Client, trace: dict[str, Any]) -> None:
    episode = await client.create("alfworld", {"game": trace["game"]})
    room = "\n".join(trace["intro"].split("\n\n")[1:])
    assert episode.observation.endswith(alfworld.TASK_LEAD + room + offer(trace["admissible"]))
    assert list(episode.admissible_actions) == trace["admissible"]
    roles = [message.role for message in episode.messages]
    assert roles == ["user", "assistant"] * (len(roles) // 2) + ["user"] and len(roles) >= 5
    assert episode.messages[-1].content == alfworld.TASK_LEAD + room + offer(trace["admissible"])
    for turn, step in enumerate(trace["steps"], start=1):
        result = await client.step(episode.episode_id, turn, f"THOUGHT: as recorded\nACTION: {step['action']}")
        assert result.observation == step["observation"].strip() + offer(step["admissible"])
        assert list(result.admissible_actions) == step["admissible"]
        assert (result.reward, result.done) == (step["reward"], step["done"])
    await client.close(episode.episode_id)


@pytest.mark.slow
async def test_recorded_expert_episodes_reproduce(rows: Path, data: Path) -> None:
    recorded = traces(rows, "expert")
    assert len(recorded) == 18
    async with served_world("alfworld", world_of(data)) as client:
        playing = asyncio.Semaphore(6)  # games wait for their engine at most 30 s, also on a busy machine

        async def play(trace: dict[str, Any]) -> None:
            async with playing:
                await replay(client, trace)

        await asyncio.gather(*map(play, recorded))


async def test_recorded_random_episodes_reproduce(rows: Path, data: Path) -> None:
    async with served_world("alfworld", world_of(data)) as client:
        await asyncio.gather(*(replay(client, trace) for trace in traces(rows, "random") if is_possible(trace)))


async def test_the_same_game_may_be_played_often_at_once_in_one_process(rows: Path, data: Path) -> None:
    async with served_world("alfworld", world_of(data, num_workers=1)) as client:
        trace = traces(rows, "expert")[4]
        await asyncio.gather(*(replay(client, trace) for _ in range(4)))
        await replay(client, trace)  # on an engine that was used before


def unpack(rows: Path, folder: Path) -> list[str]:
    """The games written below ``folder``, in the order of the rows."""
    domain = json.loads((rows / "domain.json").read_text(encoding="utf-8"))["pddl_domain"]
    lines = (rows / "games.jsonl").read_text(encoding="utf-8").splitlines()
    return write_games(map(json.loads, lines), domain, folder)
