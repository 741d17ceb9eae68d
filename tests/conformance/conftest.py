"""The engine of a test, by the names in its parameters. The true servers are started once and set back between tests."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from services.inference.engine.base import Engine, KvPolicy
from tests.conformance.subjects import SharedServer, Subject, start_embedded

SERVERS = [pytest.param(engine, marks=getattr(pytest.mark, engine)) for engine in ("sglang", "vllm")]
EVERY_ENGINE = ["torch-qwen3", "forced-qwen3", "scripted", *SERVERS]
WITH_A_MODEL = ["torch-qwen3", "torch-qwen2", "torch-llama", "forced-qwen3", "forced-qwen2", *SERVERS]


@pytest.fixture
def kv_policy() -> KvPolicy:
    """Treatment of KV caches at an update; a test that needs another one overrides this fixture."""
    return KvPolicy.RECOMPUTE


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def shared_servers(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[dict[str, SharedServer]]:
    """One for each server program; starts a server at the first request for one."""
    shared = {engine: SharedServer(engine, tmp_path_factory.mktemp(engine)) for engine in ("sglang", "vllm")}
    yield shared
    for server in shared.values():
        await server.stop()


async def _started(
    request: pytest.FixtureRequest, kv_policy: KvPolicy, shared: dict[str, SharedServer]
) -> AsyncIterator[Subject]:
    if request.param in shared:
        request.getfixturevalue(f"{request.param}_python")
        yield await shared[request.param].lend(kv_policy)
        return
    subject = await start_embedded(request.param, kv_policy)
    yield subject
    await subject.engine.stop()


@pytest_asyncio.fixture(params=EVERY_ENGINE, loop_scope="session")
async def subject(
    request: pytest.FixtureRequest, kv_policy: KvPolicy, shared_servers: dict[str, SharedServer]
) -> AsyncIterator[Subject]:
    """Every engine in turn."""
    async for started in _started(request, kv_policy, shared_servers):
        yield started


@pytest_asyncio.fixture(params=WITH_A_MODEL, loop_scope="session")
async def exact(
    request: pytest.FixtureRequest, kv_policy: KvPolicy, shared_servers: dict[str, SharedServer]
) -> AsyncIterator[Subject]:
    """Every engine that has a model, and every architecture of the embedded ones."""
    async for started in _started(request, kv_policy, shared_servers):
        yield started


@pytest.fixture
def engine(subject: Subject) -> Engine:
    return subject.engine
