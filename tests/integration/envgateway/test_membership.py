"""A gateway of a run leaves when its orchestrator says that the run has ended, and for no other reason."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from services.common.config.envgateway import EnvGatewayConfig
from services.common.errors import ConfigError, DeadlineError, InvalidRequestError
from services.common.pb import pool_pb2, pool_pb2_grpc
from services.common.rpc.server import Server
from services.envgateway.app import serve
from services.envgateway.rpc import stay
from services.envgateway.sandbox.pool import SandboxPool
from tests.integration.envgateway.conftest import CONFIG
from tests.ports import free_port
from tests.waiting import WAIT_S

ADDRESS = "127.0.0.1:50080"


class Pool(pool_pb2_grpc.PoolServiceServicer):
    """Welcomes gateways; ``end`` ends their streams, with the word to leave once ``over``."""

    def __init__(self, refusal: Exception | None = None) -> None:
        self.addresses: list[str] = []
        self.over = False
        self.end = asyncio.Event()
        self.joined = asyncio.Event()
        self._refusal = refusal

    async def JoinGateway(
        self, request: pool_pb2.JoinGatewayRequest, context: Any
    ) -> AsyncIterator[pool_pb2.JoinGatewayResponse]:
        self.addresses.append(request.address)
        if self._refusal is not None:
            raise self._refusal
        yield pool_pb2.JoinGatewayResponse(welcome=pool_pb2.GatewayWelcome(run_id="mine"))
        self.joined.set()
        await self.end.wait()
        if self.over:
            yield pool_pb2.JoinGatewayResponse(leave=pool_pb2.Drain(reason="the run has finished"))


@asynccontextmanager
async def orchestrator(pool: Pool, port: int = 0) -> AsyncIterator[str]:
    server = Server(service="orchestrator", instance_id="orchestrator", host="127.0.0.1", port=port)
    server.add(pool_pb2_grpc.add_PoolServiceServicer_to_server, pool, "rollmill.v1.PoolService")
    server.on_stop(pool.end.set)
    await server.start()
    try:
        yield server.address
    finally:
        await server.stop(grace_s=1.0)


async def test_it_stays_while_the_orchestrator_is_started_again() -> None:
    port, first, second = free_port(), Pool(), Pool()
    async with asyncio.timeout(WAIT_S):
        staying = asyncio.create_task(stay(f"127.0.0.1:{port}", ADDRESS))  # before there is one
        async with orchestrator(first, port):
            await first.joined.wait()
        assert not staying.done(), "it stopped, and the run had not ended"
        async with orchestrator(second, port):
            await second.joined.wait()
            second.over = True
        await staying


async def test_an_orchestrator_that_does_not_come_or_come_back_is_named() -> None:
    nowhere = f"127.0.0.1:{free_port()}"
    async with asyncio.timeout(WAIT_S):
        with pytest.raises(
            DeadlineError, match=rf"waiting for the orchestrator at {nowhere}: no answer .*limit 0\.2 s"
        ):
            await stay(nowhere, ADDRESS, first_s=0.2)
        pool = Pool()
        async with orchestrator(pool) as place:
            staying = asyncio.create_task(stay(place, ADDRESS, away_s=0.3))
            await pool.joined.wait()
        with pytest.raises(DeadlineError, match=r"limit 0\.3 s"):
            await staying


async def test_the_orchestrator_of_another_run_and_a_refusal_end_it_at_once() -> None:
    async with asyncio.timeout(WAIT_S):
        async with orchestrator(Pool()) as place:
            with pytest.raises(ConfigError, match="of run 'other', but the orchestrator belongs to run 'mine'"):
                await stay(place, ADDRESS, "other")
        async with orchestrator(Pool(InvalidRequestError("this run has no environment gateway"))) as place:
            with pytest.raises(InvalidRequestError, match="has no environment gateway"):
                await stay(place, ADDRESS)


async def test_the_whole_gateway_ends_with_its_run_and_says_where_it_answers() -> None:
    pool, config = Pool(), EnvGatewayConfig(port=0, sandbox=CONFIG)
    async with asyncio.timeout(WAIT_S), orchestrator(pool) as place:
        sandbox = SandboxPool.start_before_threads(config.sandbox)
        serving = asyncio.create_task(serve(config, sandbox, orchestrator=place))
        await pool.joined.wait()
        assert pool.addresses[0].startswith("127.0.0.1:") and not pool.addresses[0].endswith(":0")
        pool.over = True
        pool.end.set()
        await serving
