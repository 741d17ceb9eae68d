"""A real server on a free port, with a channel."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass

import grpc
import pytest

from services.common.rpc.client import channel
from services.common.rpc.server import Server
from tests.contract.run_servicer import RunServicer, make_server


@dataclass
class Served:
    server: Server
    servicer: RunServicer
    connection: grpc.aio.Channel


@pytest.fixture
async def served() -> AsyncIterator[Served]:
    servicer = RunServicer()
    server = make_server(servicer, run_id="r1")
    await server.start()
    async with channel(server.address) as connection:
        yield Served(server, servicer, connection)
    await server.stop(grace_s=1.0)
