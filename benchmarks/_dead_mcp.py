"""The part of ``dead_sockets.py`` about MCP: a process per episode, a server of the package behind a proxy, a true gateway.

The player calls a tool twice and answers with its result, so an episode whose failures were told apart from results is
worth 1.
"""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

from benchmarks._dead_servers import Server, during, proxy
from benchmarks._dead_soak import Soak
from benchmarks._dead_soak import soak as soak_players
from benchmarks._gateway import gateway
from benchmarks._processes import ROOT
from services.common.records import Task
from services.common.system.machine import free_ports
from services.common.telemetry.accounts import TimeAccount
from services.inference.gateway import GatewayClient

TIMEOUT_S = 1.0  # of a call; the machine must answer an add within it
RAW = str(ROOT / "tests" / "integration" / "envgateway" / "mcp" / "raw_server.py")
CALLS = {"mcp:local": ("echo", '{"text": "%d"}'), "mcp:remote": ("add", '{"a": %d, "b": 0}')}


def missing() -> str | None:
    return "mcp is not installed: make install-integrations" if importlib.util.find_spec("mcp") is None else None


async def soak(deaths: int) -> Soak:
    server_port, proxy_port = free_ports(2)
    server = Server(server_port, "mcp_server.py", "--http", str(server_port))
    with tempfile.TemporaryDirectory() as folder:
        mode = Path(folder) / "mode"
        await server.start()
        try:
            async with proxy(proxy_port, server_port, mode), _client(proxy_port) as (client, gateway_pid):

                async def kill_processes() -> None:
                    for pid in _servers_of(gateway_pid):
                        with suppress(ProcessLookupError):
                            os.kill(pid, signal.SIGKILL)

                async def cut() -> None:
                    await during(mode, "hold", 0.2)  # its end closes every connection

                async def lose() -> None:
                    await during(mode, "drop-down", 1.5 * TIMEOUT_S)

                kills = (kill_processes, cut, server.kill_and_start, lose, lambda: server.stand_still(1.5 * TIMEOUT_S))
                counted = await soak_players(deaths, lambda seed: _play(client, seed), kills)
            assert not _servers_of(gateway_pid), "the gateway's servers end with it"
            return counted
        finally:
            await server.kill()


async def _play(client: GatewayClient, seed: int) -> float:
    """Two calls and an answer at one of the servers."""
    tools = list(CALLS)[seed % len(CALLS)]
    name, arguments = CALLS[tools]
    settings = {"tools": [f"{tools}/{name}"], "reward": "boxed", "max_turns": 5}
    row = {"question": f"number {seed}", "answer": str(seed), "environment": settings}
    call = f'<tool_call>{{"name": "{name}", "arguments": {arguments % seed}}}</tool_call>'
    episode = await client.create_episode("tool", Task(task_id=str(seed), data=row), seed)
    try:
        for turn in (1, 2):
            said = (await client.step(episode.episode_id, turn, call)).observation
        return (await client.step(episode.episode_id, 3, f"\\boxed{{{said}}}")).reward
    finally:
        await client.close(episode.episode_id)


@asynccontextmanager
async def _client(port: int) -> AsyncIterator[tuple[GatewayClient, int]]:
    servers = {
        "local": {"command": ["python", "-S", RAW], "timeout_s": 5 * TIMEOUT_S},
        "remote": {"url": f"http://127.0.0.1:{port}/mcp", "timeout_s": TIMEOUT_S, "start_timeout_s": 5.0},
    }
    async with gateway({"port": 0, "mcp": json.dumps(servers)}) as (address, pid):
        client = GatewayClient(TimeAccount("replica/benchmark"))
        client.connect(address)
        try:
            yield client, pid
        finally:
            await client.stop()


def _servers_of(gateway_pid: int) -> list[int]:
    """Processes of the local server."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with suppress(OSError):
                parent = entry.joinpath("stat").read_text().rpartition(")")[2].split()[1]
                if int(parent) == gateway_pid and RAW in entry.joinpath("cmdline").read_text():
                    found.append(int(entry.name))
    return found
