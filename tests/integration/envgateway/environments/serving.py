"""The environment service alone over real gRPC on a free port: no sandbox, no rewards."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import orjson

from services.common.pb import environment_pb2 as pb
from services.common.pb import environment_pb2_grpc as pb_grpc
from services.common.rpc.client import channel, translated_errors
from services.common.rpc.server import Server
from services.envgateway.envs.base import EnvironmentContext, EnvironmentLike, World
from services.envgateway.envs.episodes import EnvironmentRegistry, EpisodeManager
from services.envgateway.rpc import EnvironmentServicer
from services.envgateway.tools.registry import ToolBox

TIMEOUT_S = 120.0  # longer than any engine may take


class NoRewards:
    """These environments pay their own."""


class Client:
    """Plays episodes; errors arrive as the project's own."""

    def __init__(self, stub: pb_grpc.EnvironmentServiceStub) -> None:
        self.stub = stub

    async def create(
        self, environment: str, task: Mapping[str, Any], *, request_id: str = "", seed: int = 0
    ) -> pb.CreateEpisodeResponse:
        request = pb.CreateEpisodeRequest(
            environment=environment, task_json=orjson.dumps(task), request_id=request_id, seed=seed
        )
        with translated_errors("gateway"):
            return await self.stub.CreateEpisode(request, timeout=TIMEOUT_S)

    async def step(self, episode_id: str, turn: int, action: str) -> pb.StepEpisodeResponse:
        request = pb.StepEpisodeRequest(episode_id=episode_id, turn=turn, action=action)
        with translated_errors("gateway"):
            return await self.stub.StepEpisode(request, timeout=TIMEOUT_S)

    async def close(self, episode_id: str) -> None:
        with translated_errors("gateway"):
            await self.stub.CloseEpisode(pb.CloseEpisodeRequest(episode_id=episode_id), timeout=TIMEOUT_S)


@asynccontextmanager
async def serving(episodes: EpisodeManager, environments: EnvironmentRegistry) -> AsyncIterator[Client]:
    server = Server(service="envgateway", instance_id="test", host="127.0.0.1", port=0)
    servicer = EnvironmentServicer(episodes)
    server.add(pb_grpc.add_EnvironmentServiceServicer_to_server, servicer, "rollmill.v1.EnvironmentService")
    port = await server.start()
    connection = channel(f"127.0.0.1:{port}")
    try:
        yield Client(pb_grpc.EnvironmentServiceStub(connection))
    finally:
        await connection.close()
        await server.stop(grace_s=0.1)
        await episodes.close_all()
        await environments.close()


def registry(
    worlds: Mapping[str, World | str] | None = None, factories: Mapping[str, type[EnvironmentLike]] | None = None
) -> EnvironmentRegistry:
    context = EnvironmentContext(NoRewards(), ToolBox([]))  # type: ignore[arg-type]
    paths = {name: f"{factory.__module__}:{factory.__qualname__}" for name, factory in (factories or {}).items()}
    return EnvironmentRegistry(paths, context, worlds)


@asynccontextmanager
async def served_world(name: str, world: World, **settings: Any) -> AsyncIterator[Client]:
    environments = registry({name: world})
    episodes = EpisodeManager(environments, **{"max_episodes": 256, "lease_s": 60.0, **settings})
    async with serving(episodes, environments) as client:
        yield client
