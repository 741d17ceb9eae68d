"""The command that containers are checked with."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from services.common.aio import deadline
from services.common.rpc.client import main
from services.common.rpc.server import Server
from services.common.security import identity
from services.common.security.keys import VARIABLE, Role
from tests.keys import as_role, make_keys


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    server = Server(service="orchestrator", instance_id="o", host="127.0.0.1", port=0)
    await server.start()
    yield server
    await server.stop(0.0)


async def ask(*addresses: str) -> int:
    async with deadline(30.0, "the health command"):
        with identity.used(None):
            return await asyncio.to_thread(main, list(addresses))


async def test_it_succeeds_once_the_service_is_ready(server: Server) -> None:
    assert await ask(server.address) == 1
    server.set_ready()
    assert await ask(server.address) == 0
    command = [sys.executable, "-m", "services.common.rpc.client", server.address]
    assert (await asyncio.to_thread(subprocess.run, command, check=False)).returncode == 0


async def test_a_container_is_checked_with_the_keys_of_its_own_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = make_keys(tmp_path / "keys")
    with identity.used(as_role(keys, Role.ENVGATEWAY)):
        server = Server(service="envgateway", instance_id="e", host="127.0.0.1", port=0)
    await server.start()
    server.set_ready()
    try:
        assert await ask(server.address) == 1  # without keys it cannot know
        for where in (keys.folder, keys.folder / "envgateway", keys.folder / "viewer"):
            monkeypatch.setenv(VARIABLE, str(where))
            assert await ask(server.address) == 0
        monkeypatch.setenv(VARIABLE, str(tmp_path))
        assert await ask(server.address) == 2
    finally:
        await server.stop(0.0)


def test_it_fails_where_nobody_listens(unused_tcp_port: int, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([f"127.0.0.1:{unused_tcp_port}"]) == 1
    assert "does not say SERVING" in capsys.readouterr().err


def test_without_an_address_it_says_how_it_is_used(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2 and "usage" in capsys.readouterr().err
