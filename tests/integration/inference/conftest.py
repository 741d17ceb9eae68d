"""Fakes that are stopped at the end of a test."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

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
