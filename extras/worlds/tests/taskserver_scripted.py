"""Environments with orders as actions, and a task server over them on a free port."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import aiohttp

from extras.worlds.settings import ServedTaskConfig, TaskServerConfig
from extras.worlds.taskserver import TaskServer
from services.common.errors import InfrastructureError, InvalidRequestError
from services.envgateway.envs.base import EndStatus, EpisodeLostError, Observation, StepResult
from services.envgateway.envs.episodes import EpisodeManager
from tests.integration.envgateway.environments.serving import registry

ACTIONS: list[str] = []
"""Actions that episodes of ``Orders`` have got, for tests that wait until one is being taken."""


class Orders:
    """``win``, ``lose`` and ``limit`` end the episode; ``fail N`` fails N times; ``crash`` and ``lost`` do."""

    is_indexed = True

    def build(self) -> Orders:
        return Orders()

    async def reset(self, task: Mapping[str, Any], seed: int) -> Observation:
        self.failed = 0
        if task["index"] == 3:
            raise InvalidRequestError("nobody can play 3")
        if task["index"] == 4:
            raise InfrastructureError("the disk is gone")
        messages = ({"role": "user", "content": "rules"}, {"role": "assistant", "content": "Ok."})
        last = {"role": "user", "content": f"task {task['index']} of seed {seed}, {task.get('extra', 'plain')}"}
        return Observation(text="all", messages=(*messages, last))

    async def step(self, action: str) -> StepResult:
        ACTIONS.append(action)
        match action.split():
            case ["win"]:
                return StepResult(reward=0.75, done=True, metrics={"wins": 1.0})
            case ["lose"]:
                return StepResult(done=True, status=EndStatus.VALIDATION_FAILED)
            case ["limit"]:
                return StepResult(reward=0.25, done=True, status=EndStatus.TURN_LIMIT)
            case ["fail", times] if self.failed < int(times):
                self.failed += 1
                raise InfrastructureError("a peer is gone")
            case ["crash"]:
                raise RuntimeError("a bug")
            case ["lost"]:
                raise EpisodeLostError("the game's process died")
            case ["slow"]:
                await asyncio.sleep(1.0)
        return StepResult(observation=f"you said {action}", reward=0.25)

    async def close(self) -> None:
        pass


class Http:
    def __init__(self, session: aiohttp.ClientSession, server: TaskServer, episodes: EpisodeManager) -> None:
        self._session = session
        self.server = server
        self.episodes = episodes

    async def get(self, path: str, status: int = 200) -> Any:
        async with self._session.get(path) as response:
            assert response.status == status, (response.status, await response.text())
            return await response.json()

    async def post(self, path: str, body: object = None, status: int = 200) -> Any:
        async with self._session.post(path, json=body) as response:
            assert response.status == status, (response.status, await response.text())
            return await response.json()


@asynccontextmanager
async def task_server(
    environments: Mapping[str, ServedTaskConfig] | None = None, **settings: Any
) -> AsyncIterator[Http]:
    known = registry({"orders": Orders(), "more": Orders()})
    episodes = EpisodeManager(known, **{"max_episodes": 64, "lease_s": 60.0, "step_timeout_s": 4.0, **settings})
    server = TaskServer(TaskServerConfig(port=0, environments=dict(environments or {})), "127.0.0.1", episodes, known)
    port = await server.start()
    async with aiohttp.ClientSession(f"http://127.0.0.1:{port}") as session:
        yield Http(session, server, episodes)
    await server.stop()
    await episodes.close_all()
    await known.close()
