"""Fakes that are stopped at the end of a test."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from services.inference.endpoint.server import EndpointServer
from tests.integration.inference.endpoint_peers import serving
from tests.integration.inference.peers import FakeGatewayServer, FakeOrchestrator


@pytest.fixture
async def orchestrator() -> AsyncIterator[FakeOrchestrator]:
    fake = FakeOrchestrator()
    await fake.start()
    yield fake
    await fake.stop()


@pytest.fixture
async def gateway_server() -> AsyncIterator[FakeGatewayServer]:
    fake = FakeGatewayServer()
    await fake.start()
    yield fake
    await fake.stop()


@pytest.fixture
async def server() -> AsyncIterator[EndpointServer]:
    """An endpoint in a run without keys."""
    async with serving() as server:
        yield server
