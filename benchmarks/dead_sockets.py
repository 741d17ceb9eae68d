"""Kills the sockets under episodes again and again, and counts the rewards that a dead socket made: none.

Each part plays episodes whose policy always wins, so that a reward of 0 can only come from a failure. Meanwhile the sockets
die: their server is killed and started again, every connection is cut, bytes are lost, the server does not answer.

    zero_rewards   rollouts that ended with a reward of 0: must be 0
    deaths         how often sockets were killed
    scored         rollouts that ended with a reward
    retried        infrastructure failures after which a rollout was played again
    parts          the same for each kind of server

    python benchmarks/dead_sockets.py [--quick] [--deaths 50] [--only NAME]
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import importlib.util
import json
import os
import signal
import sys
import tempfile
from asyncio.subprocess import Process
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import aiohttp

from benchmarks._bench import ROOT, gateway, report_facts
from services.common.errors import CapacityError, DeadlineError, EpisodeNotFoundError, InfrastructureError
from services.common.records import Task
from services.common.system.machine import free_ports
from services.common.telemetry.accounts import TimeAccount
from services.inference.gateway import GatewayClient

# --- A server that can be killed, and a proxy whose sockets can. Shared by the parts of ``dead_sockets.py``.


START_S = 60.0


class Server:
    """The server of an example as a process that can be killed and started again at its port."""

    def __init__(self, port: int, example: str, *arguments: str) -> None:
        self.port = port
        self._command = [sys.executable, str(ROOT / "examples" / example), *arguments]
        self._process: Process | None = None

    async def start(self) -> None:
        self._process = await asyncio.create_subprocess_exec(
            *self._command, stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.DEVNULL
        )
        async with asyncio.timeout(START_S), aiohttp.ClientSession() as client:
            while True:
                try:
                    async with client.get(f"http://127.0.0.1:{self.port}/health"):
                        return
                except aiohttp.ClientError:
                    await asyncio.sleep(0.1)

    async def kill(self) -> None:
        assert self._process is not None
        if self._process.returncode is None:
            self._process.kill()
        await self._process.wait()

    async def kill_and_start(self) -> None:
        await self.kill()
        await self.start()

    async def stand_still(self, seconds: float) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)
        await asyncio.sleep(seconds)
        self._process.send_signal(signal.SIGCONT)


@asynccontextmanager
async def proxy(listen: int, target: int, mode: Path) -> AsyncIterator[None]:
    _set(mode, "pass")
    script = str(ROOT / "benchmarks" / "_stall_proxy.py")
    process = await asyncio.create_subprocess_exec(sys.executable, script, str(listen), str(target), str(mode))
    try:
        yield
    finally:
        process.kill()
        await process.wait()


async def during(mode: Path, word: str, seconds: float) -> None:
    _set(mode, word)
    await asyncio.sleep(seconds)
    _set(mode, "pass")


def _set(mode: Path, word: str) -> None:
    mode.write_text(word)


# --- Rollouts that go on while sockets die, and what is counted of them. Shared by the parts of ``dead_sockets.py``.


# As a replica does: played again after these. Anything else would be a failure without a retry, and ends the benchmark.
RETRIED = (InfrastructureError, EpisodeNotFoundError, CapacityError, DeadlineError)
PLAYERS = 6
ALIVE_S = 120.0
BETWEEN_DEATHS_S = 0.3  # rollouts play on a whole server


@dataclass(slots=True, kw_only=True)
class Soak:
    zero_rewards: int = 0
    deaths: int = 0
    scored: int = 0
    retried: int = 0


async def soak(
    deaths: int, play: Callable[[int], Awaitable[float]], kills: Sequence[Callable[[], Awaitable[None]]]
) -> Soak:
    """Play rollouts, whose policy always wins, while sockets die ``deaths`` times, in each of the ways of ``kills`` in turn."""
    counted = Soak()
    over, scored = asyncio.Event(), asyncio.Event()

    async def player(first: int) -> None:
        seed = first
        while not over.is_set():
            try:
                reward = await play(seed)
            except RETRIED:
                counted.retried += 1
                await asyncio.sleep(0.05)
                continue  # the same rollout again
            counted.scored += 1
            scored.set()
            counted.zero_rewards += reward == 0.0
            seed += PLAYERS

    players = [asyncio.create_task(player(number)) for number in range(PLAYERS)]
    try:
        for number in range(deaths):
            before = counted.scored
            async with asyncio.timeout(ALIVE_S):  # the last death is over
                while counted.scored < before + PLAYERS:
                    scored.clear()
                    await scored.wait()
            await asyncio.sleep(BETWEEN_DEATHS_S)
            await kills[number % len(kills)]()
            counted.deaths += 1
    finally:
        over.set()
        await asyncio.gather(*players)
    return counted


# --- The part of ``dead_sockets.py`` about MCP: a process per episode, a server of the package behind a proxy, a true
# gateway.


TIMEOUT_S = 1.0  # of a call; the machine must answer an add within it
RAW = str(ROOT / "tests" / "integration" / "envgateway" / "mcp" / "raw_server.py")
CALLS = {"mcp:local": ("echo", '{"text": "%d"}'), "mcp:remote": ("add", '{"a": %d, "b": 0}')}


def mcp_missing() -> str | None:
    return "mcp is not installed: make install-integrations" if importlib.util.find_spec("mcp") is None else None


async def soak_mcp(deaths: int) -> Soak:
    server_port, proxy_port = free_ports(2)
    server = Server(server_port, "mcp_server.py", "--http", str(server_port))
    with tempfile.TemporaryDirectory() as folder:
        mode = Path(folder) / "mode"
        await server.start()
        try:
            async with proxy(proxy_port, server_port, mode), _mcp_client(proxy_port) as (client, gateway_pid):

                async def kill_processes() -> None:
                    for pid in _servers_of(gateway_pid):
                        with suppress(ProcessLookupError):
                            os.kill(pid, signal.SIGKILL)

                async def cut() -> None:
                    await during(mode, "hold", 0.2)  # its end closes every connection

                async def lose() -> None:
                    await during(mode, "drop-down", 1.5 * TIMEOUT_S)

                kills = (kill_processes, cut, server.kill_and_start, lose, lambda: server.stand_still(1.5 * TIMEOUT_S))
                counted = await soak(deaths, lambda seed: _play_mcp(client, seed), kills)
            assert not _servers_of(gateway_pid), "the gateway's servers end with it"
            return counted
        finally:
            await server.kill()


async def _play_mcp(client: GatewayClient, seed: int) -> float:
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
async def _mcp_client(port: int) -> AsyncIterator[tuple[GatewayClient, int]]:
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


# --- The part of ``dead_sockets.py`` about OpenEnv: a true server behind a proxy, a true gateway, and a player that
# halves.


MOST = 8  # the example's largest number, which four guesses find
STEP_TIMEOUT_S = 1.0


def openenv_missing() -> str | None:
    if importlib.util.find_spec("openenv") is None:
        return "openenv-core is not installed: make install-integrations"
    return None


async def soak_openenv(deaths: int) -> Soak:
    server_port, proxy_port = free_ports(2)
    server = Server(server_port, "openenv_server.py", str(server_port))
    with tempfile.TemporaryDirectory() as folder:
        mode = Path(folder) / "mode"
        await server.start()
        try:
            async with proxy(proxy_port, server_port, mode), _openenv_client(proxy_port) as client:

                async def cut() -> None:
                    await during(mode, "hold", 0.2)  # its end closes every connection

                async def lose() -> None:
                    await during(mode, "drop-down", 1.5 * STEP_TIMEOUT_S)

                return await soak(
                    deaths,
                    lambda seed: _play_openenv(client, seed),
                    (server.kill_and_start, cut, lose, lambda: server.stand_still(1.5 * STEP_TIMEOUT_S)),
                )
        finally:
            await server.kill()


async def _play_openenv(client: GatewayClient, seed: int) -> float:
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
async def _openenv_client(port: int) -> AsyncIterator[GatewayClient]:
    server = {"url": f"http://127.0.0.1:{port}", "step_timeout_s": STEP_TIMEOUT_S, "start_timeout_s": 20.0}
    async with gateway({"port": 0, "openenv": json.dumps({"guess": server})}) as (address, _):
        client = GatewayClient(TimeAccount("replica/benchmark"))
        client.connect(address)
        try:
            yield client
        finally:
            await client.stop()


# --- The benchmark itself.


PARTS = {"openenv": (openenv_missing, soak_openenv), "mcp": (mcp_missing, soak_mcp)}
QUICK_DEATHS = 4


def main() -> None:
    parser = argparse.ArgumentParser(description="rewards under sockets that die")
    parser.add_argument("--quick", action="store_true", help=f"{QUICK_DEATHS} deaths for each kind of server")
    parser.add_argument("--deaths", type=int, default=50, help="deaths for each kind of server")
    parser.add_argument("--only", choices=sorted(PARTS), help="one kind of server")
    arguments = parser.parse_args()
    deaths = QUICK_DEATHS if arguments.quick else arguments.deaths
    found, left_out = {}, {}
    for name, (missing, soak) in PARTS.items():
        if arguments.only not in (None, name):
            continue
        if reason := missing():
            left_out[name] = reason
            continue
        found[name] = asyncio.run(soak(deaths))
        print(name, found[name], flush=True)
    sums = {
        field: sum(getattr(one, field) for one in found.values())
        for field in ("zero_rewards", "deaths", "scored", "retried")
    }
    report_facts(
        "dead_sockets",
        **(sums if found else {}),
        parts={name: dataclasses.asdict(one) for name, one in found.items()},
        left_out=left_out,
    )


if __name__ == "__main__":
    main()
