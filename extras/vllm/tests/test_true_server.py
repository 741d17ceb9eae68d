"""The engine over true vLLM servers: its interface, a server that is killed, weights that tie embeddings or do not."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from extras.vllm.engine import LAUNCHER
from services.common.errors import InfrastructureError
from tests.conformance.served_engines import Build, check_long_generation, engines_of, start_long_generation
from tests.random_models import build_model, perturbed
from tests.waiting import until

pytestmark = [pytest.mark.vllm, pytest.mark.usefixtures("vllm_python")]


@pytest.fixture(scope="module")
def untied(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A random Qwen3 with a head of its own, with its directory on disk as ``name_or_path``."""
    built = build_model("qwen3", tied=False, head_dim=32)
    path: Path = tmp_path_factory.mktemp("model")
    built.save_pretrained(path)
    built.name_or_path = str(path)
    return built


@pytest.fixture
async def build(untied: Any, tmp_path: Path) -> AsyncIterator[Build]:
    async with engines_of("vllm", untied, tmp_path) as make:
        yield make


def group_of(pid: int) -> list[int]:
    """Processes of a server's group."""
    found = subprocess.run(["ps", "-eo", "pid=,pgid="], capture_output=True, text=True, check=True).stdout
    return [int(line.split()[0]) for line in found.splitlines() if int(line.split()[1]) == pid]


def test_this_vllm_has_the_interface_that_the_engine_relies_on(vllm_python: str) -> None:
    """A newer vLLM that differs fails here first."""
    program = "import interface, sys; sys.exit('; '.join(interface.missing()) or 0)"
    done = subprocess.run(
        [vllm_python, "-c", program], cwd=LAUNCHER.parent, capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 0, done.stderr[-2000:]


async def test_a_killed_server_takes_its_workers_along_and_is_started_again_with_the_version_held(
    build: Build, untied: Any
) -> None:
    """The model has a head of its own, so the update reaches a matrix that is not the embedding's."""
    new = perturbed(untied)
    engine = await build()
    pending = await start_long_generation(engine, new)
    (server,) = engine.servers
    first = server.process.pid
    assert first is not None and len(group_of(first)) > 1
    async with aiohttp.ClientSession() as stranger:
        for route, status in (("/pause", 401), ("/collective_rpc", 401), ("/weight_info", 401), ("/health", 200)):
            method = "GET" if route in ("/weight_info", "/health") else "POST"
            async with stranger.request(method, server.client.address + route) as answer:
                assert answer.status == status, route
    os.kill(first, signal.SIGKILL)
    await until(lambda: not group_of(first))
    await check_long_generation(pending, new)
    assert server.process.pid != first


async def test_a_server_that_cannot_start_is_explained(build: Build) -> None:
    engine = await build(vllm={"extra_arguments": {"no_such_thing": 1}})
    with pytest.raises(InfrastructureError, match=r"vLLM does not know an argument: correct vllm\.extra_arguments"):
        await engine.start()
