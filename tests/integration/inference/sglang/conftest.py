"""Engines over fake servers, which are real child processes."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest

from services.inference.engine.base import KvPolicy
from services.inference.engine.served.engine import ServedEngine
from services.inference.engine.served.fleet import DiskTransfer, Server
from services.inference.engine.served.process import ServerCommand, ServerProcess
from services.inference.engine.served.stage import Stage
from services.inference.engine.sglang import sglang_program
from tests.waiting import WAIT_S

FAKE = Path(__file__).with_name("fake_server.py")
WEIGHTS = {"model.norm.weight": np.ones(8, np.float32)}
CONTEXT = 800

Launch = Callable[..., Awaitable[ServedEngine]]


def build(
    directory: Path,
    *arguments: str,
    number: int = 1,
    kv_policy: KvPolicy = KvPolicy.RECOMPUTE,
    ready_timeout_s: float = WAIT_S,
    **settings: Any,
) -> ServedEngine:
    stage = Stage(directory / "stage", WEIGHTS, 0)
    servers = []
    for index in range(number):
        command = ServerCommand(
            name=f"sglang-fake-{index}", argv=(sys.executable, str(FAKE), *arguments), program=sglang_program(["cpu"])
        )
        process = ServerProcess(command, directory / "logs" / f"{command.name}.log", ready_timeout_s)
        servers.append(Server(process, kv_policy))
    return ServedEngine(
        servers, stage, DiskTransfer(stage), context_length=CONTEXT, vocab_size=1000, kv_policy=kv_policy, **settings
    )


@pytest.fixture
async def launch(tmp_path: Path) -> AsyncIterator[Launch]:
    """Start an engine over fake servers; all are stopped at the end."""
    running: list[ServedEngine] = []

    async def start(*arguments: str, **settings: Any) -> ServedEngine:
        engine = build(tmp_path / str(len(running)), *arguments, **settings)
        running.append(engine)
        await engine.start()
        return engine

    yield start
    for engine in running:
        await engine.stop()


async def misbehave(engine: ServedEngine, route: str, server: int = 0, **how: Any) -> None:
    """The next call of a route goes wrong at one server."""
    address = engine.servers[server].client.address
    async with aiohttp.ClientSession() as session:
        async with session.post(f"{address}/misbehave", json={"route": route, **how}) as answer:
            assert answer.status == 200


async def seen(engine: ServedEngine, server: int = 0) -> list[tuple[str, Any]]:
    """The requests of a server, in order."""
    address = engine.servers[server].client.address
    async with aiohttp.ClientSession() as session:
        async with session.get(f"{address}/seen") as answer:
            return [(route, body) for route, body in await answer.json()]
