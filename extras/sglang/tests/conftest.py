"""A tiny model for true servers; engines over fake servers, in this process or as child processes where a test is about these."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest
from aiohttp import web

from extras.sglang.engine import sglang_program
from extras.sglang.tests.fake_server import Fake
from services.common.aio import backoff
from services.inference.engine.base import KvPolicy
from services.inference.engine.served import engine as engine_module
from services.inference.engine.served import fleet
from services.inference.engine.served.client import ServerClient
from services.inference.engine.served.engine import ServedEngine
from services.inference.engine.served.fleet import Server, Transfer
from services.inference.engine.served.process import ServerCommand, ServerProcess
from services.inference.engine.served.stage import Stage
from tests.random_models import build_model
from tests.waiting import WAIT_S

FAKE = Path(__file__).with_name("fake_server.py")
WEIGHTS = {"model.norm.weight": np.ones(8, np.float32)}
CONTEXT = 800


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A random Qwen3 with its directory on disk as ``name_or_path``."""
    built = build_model("qwen3")
    path: Path = tmp_path_factory.mktemp("model")
    built.save_pretrained(path)
    built.name_or_path = str(path)
    return built


Launch = Callable[..., Awaitable[ServedEngine]]


class InProcess(ServerProcess):
    """A server in this process, whose death breaks its connections. Its "pid" counts its starts."""

    token_s = 0.002
    _starts = 0
    _runner: web.AppRunner | None = None

    @property
    def pid(self) -> int | None:
        return self._starts or None

    async def start(self, version: int) -> ServerClient:
        self._starts += 1
        self._dead = asyncio.Event()
        fake = Fake(str(version), self.token_s, "key", die=self.kill)
        self._runner = web.AppRunner(fake.application(), shutdown_timeout=0.01)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        host, port = self._runner.addresses[0][:2]
        return self.program.connect(f"http://{host}:{port}", "key")

    async def ended(self) -> str:
        await self._dead.wait()
        return f"{self.name} was killed by SIGKILL"

    def kill(self) -> None:
        self._dead.set()
        if self._runner is not None and self._runner.server is not None:
            for connection in self._runner.server.connections:
                if connection.transport is not None:
                    connection.transport.abort()

    async def stop(self) -> None:
        if self._runner is not None:
            runner, self._runner = self._runner, None
            await runner.cleanup()


def build(
    directory: Path,
    *arguments: str,
    number: int = 1,
    kv_policy: KvPolicy = KvPolicy.RECOMPUTE,
    ready_timeout_s: float = WAIT_S,
    kind: type[ServerProcess] = ServerProcess,
    **settings: Any,
) -> ServedEngine:
    stage = Stage(directory / "stage", WEIGHTS, 0)
    servers = []
    for index in range(number):
        command = ServerCommand(
            name=f"sglang-fake-{index}", argv=(sys.executable, str(FAKE), *arguments), program=sglang_program(["cpu"])
        )
        process = kind(command, directory / "logs" / f"{command.name}.log", ready_timeout_s)
        servers.append(Server(process, kv_policy))
    return ServedEngine(
        servers, stage, Transfer(stage), context_length=CONTEXT, vocab_size=1000, kv_policy=kv_policy, **settings
    )


@pytest.fixture
async def launch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Launch]:
    """Start an engine over fake servers, in this process unless ``real``; all are stopped at the end."""
    running: list[ServedEngine] = []
    for module in (fleet, engine_module):
        monkeypatch.setattr(module, "backoff", lambda *bounds: backoff(0.05))

    async def start(*, token_s: float = 0.002, real: bool = False, **settings: Any) -> ServedEngine:
        kind = ServerProcess if real else InProcess
        engine = build(tmp_path / str(len(running)), kind=kind, **settings)
        for server in engine.servers:
            if isinstance(server.process, InProcess):
                server.process.token_s = token_s
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
