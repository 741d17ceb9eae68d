"""The part of ``dead_sockets.py`` about OpenEnv: a true server behind a proxy, a true gateway, and a player that halves."""

from __future__ import annotations

import importlib.util
import json
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from benchmarks._dead_servers import Server, during, proxy
from benchmarks._dead_soak import Soak
from benchmarks._dead_soak import soak as soak_players
from benchmarks._gateway import gateway
from services.common.records import Task
from services.common.system.machine import free_ports
from services.common.telemetry.accounts import TimeAccount
from services.inference.gateway import GatewayClient

MOST = 8  # the example's largest number, which four guesses find
STEP_TIMEOUT_S = 1.0


def missing() -> str | None:
    if importlib.util.find_spec("openenv") is None:
        return "openenv-core is not installed: make install-integrations"
    return None


async def soak(deaths: int) -> Soak:
    server_port, proxy_port = free_ports(2)
    server = Server(server_port, "openenv_server.py", str(server_port))
    with tempfile.TemporaryDirectory() as folder:
        mode = Path(folder) / "mode"
        await server.start()
        try:
            async with proxy(proxy_port, server_port, mode), _client(proxy_port) as client:

                async def cut() -> None:
                    await during(mode, "hold", 0.2)  # its end closes every connection

                async def lose() -> None:
                    await during(mode, "drop-down", 1.5 * STEP_TIMEOUT_S)

                return await soak_players(
                    deaths,
                    lambda seed: _play(client, seed),
                    (server.kill_and_start, cut, lose, lambda: server.stand_still(1.5 * STEP_TIMEOUT_S)),
                )
        finally:
            await server.kill()


async def _play(client: GatewayClient, seed: int) -> float:
    """One episode in which each guess halves what is left: its return is 1."""
    episode = await client.create_episode("guess", Task(task_id=str(seed), data={}), seed)
    low, high, total = 1, MOST, 0.0
    try:
        for turn in range(1, MOST + 1):
            guess = (low + high) // 2
            step = await client.step(episode.episode_id, turn, str(guess))
            total += step.reward
            if step.done:
                break
            low, high = (guess + 1, high) if step.observation == "higher" else (low, guess - 1)
    finally:
        await client.close(episode.episode_id)
    return total


@asynccontextmanager
async def _client(port: int) -> AsyncIterator[GatewayClient]:
    server = {"url": f"http://127.0.0.1:{port}", "step_timeout_s": STEP_TIMEOUT_S, "start_timeout_s": 20.0}
    async with gateway({"port": 0, "openenv": json.dumps({"guess": server})}) as (address, _):
        client = GatewayClient(TimeAccount("replica/benchmark"))
        client.connect(address)
        try:
            yield client
        finally:
            await client.stop()
