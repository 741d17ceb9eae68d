"""A gateway over real gRPC, and what one says to it."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc

from services.common.config.envgateway import EnvGatewayConfig
from services.common.pb import environment_pb2 as pb
from services.common.pb import environment_pb2_grpc as pb_grpc
from services.common.rpc.channel import channel
from services.common.rpc.status import translated_errors
from services.envgateway.app import Gateway
from services.envgateway.sandbox.pool import SandboxPool

from ..conftest import CONFIG


class Player:
    """Plays episodes; errors arrive as ours."""

    def __init__(self, connection: grpc.aio.Channel, gateway: Gateway) -> None:
        self._stub = pb_grpc.EnvironmentServiceStub(connection)
        self.gateway = gateway

    async def begin(self, environment: str, task: dict[str, Any], seed: int = 0) -> pb.CreateEpisodeResponse:
        request = pb.CreateEpisodeRequest(environment=environment, task_json=json.dumps(task).encode(), seed=seed)
        with translated_errors("envgateway"):
            return await self._stub.CreateEpisode(request, timeout=90)

    async def step(self, episode: pb.CreateEpisodeResponse, turn: int, action: str) -> pb.StepEpisodeResponse:
        request = pb.StepEpisodeRequest(episode_id=episode.episode_id, turn=turn, action=action)
        with translated_errors("envgateway"):
            return await self._stub.StepEpisode(request, timeout=90)

    async def close(self, episode: pb.CreateEpisodeResponse) -> None:
        await self._stub.CloseEpisode(pb.CloseEpisodeRequest(episode_id=episode.episode_id), timeout=10)

    async def names(self) -> list[str]:
        return list((await self._stub.ListEnvironments(pb.ListEnvironmentsRequest(), timeout=10)).environments)


@asynccontextmanager
async def serving(**settings: Any) -> AsyncIterator[Player]:
    """A gateway with these settings, on a free port."""
    config = EnvGatewayConfig(port=0, sandbox=CONFIG, **settings)
    gateway = Gateway(config, SandboxPool.start_before_threads(CONFIG))
    port = await gateway.start()
    connection = channel(f"127.0.0.1:{port}")
    try:
        yield Player(connection, gateway)
    finally:
        await connection.close()
        await gateway.stop()
