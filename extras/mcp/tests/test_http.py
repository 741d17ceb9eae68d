"""A server of the package over streamable HTTP: sessions, tools, and a server that goes and comes back."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from extras.mcp.servers import McpServers
from extras.mcp.settings import McpServerConfig
from services.common.errors import InfrastructureError
from services.common.text.tools import ToolStatus
from services.envgateway.tools.registry import GatewayToolSession, ToolBox
from services.envgateway.tools.tools import StateLostError
from tests.ports import free_port
from tests.waiting import WAIT_S

pytestmark = [pytest.mark.needs("mcp"), pytest.mark.slow]

EXAMPLE = str(Path(__file__).parents[3] / "examples" / "mcp_server.py")


class Remote:
    """The example's server at a port, started and killed."""

    def __init__(self) -> None:
        self.port = free_port()
        self._process: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        self._process = await asyncio.create_subprocess_exec(
            *(sys.executable, EXAMPLE, "--http", str(self.port)),
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.DEVNULL,
        )
        async with asyncio.timeout(WAIT_S), aiohttp.ClientSession() as client:
            while True:
                try:
                    async with client.get(f"http://127.0.0.1:{self.port}/"):
                        return
                except aiohttp.ClientError:
                    await asyncio.sleep(0.02)

    async def kill(self) -> None:
        if self._process is not None and self._process.returncode is None:
            self._process.kill()
            await self._process.wait()


@pytest.fixture
async def remote() -> AsyncIterator[Remote]:
    made = Remote()
    await made.start()
    yield made
    await made.kill()


def call(name: str, **arguments: Any) -> str:
    return json.dumps({"name": name, "arguments": arguments})


async def test_calls_go_on_with_the_server_that_takes_the_place_of_a_killed_one(remote: Remote) -> None:
    url = f"http://127.0.0.1:{remote.port}/mcp"
    servers = {
        "shared": McpServerConfig(url=url, sessions="shared", timeout_s=10.0),
        "own": McpServerConfig(url=url, start_timeout_s=2.5),
    }
    box = ToolBox([], servers=McpServers(servers))
    shared, own = [await GatewayToolSession.open(box, [f"mcp:{name}"]) for name in servers]
    for session in (shared, own):
        assert (await session.answer(call("add", a=1, b=2))).text == "3"
    told = await shared.answer(call("minutes", hours=-1))
    assert told.status == ToolStatus.TOOL_ERROR
    assert "hours cannot be negative" in told.text
    assert (await shared.answer(call("add", a="one"))).status == ToolStatus.INVALID_ARGUMENTS

    await remote.kill()
    with pytest.raises(InfrastructureError, match=r"envgateway\.mcp\.shared"):
        await shared.answer(call("add", a=1, b=2))
    with pytest.raises(StateLostError):
        await own.answer(call("add", a=1, b=2))
    with pytest.raises(InfrastructureError):
        await GatewayToolSession.open(box, ["mcp:own"])

    await remote.start()
    assert (await shared.answer(call("add", a=2, b=2))).text == "4"
    fresh = await GatewayToolSession.open(box, ["mcp:own"])
    assert (await fresh.answer(call("add", a=2, b=3))).text == "5"
    for session in (shared, own, fresh):
        await session.close()
    await box.close()
    assert box.gauges["mcp_shared_sessions"] == box.gauges["mcp_own_sessions"] == 0
