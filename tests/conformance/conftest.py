"""The engine of a test, by the names in its parameters. The true SGLang server is started once and set back between tests."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from services.inference.engine.base import Engine, KvPolicy
from tests.conformance.subjects import SharedSglang, Subject, start_embedded

SGLANG = pytest.param("sglang", marks=pytest.mark.sglang)
EVERY_ENGINE = ["torch-qwen3", "forced-qwen3", "scripted", SGLANG]
WITH_A_MODEL = ["torch-qwen3", "torch-qwen2", "torch-llama", "forced-qwen3", "forced-qwen2", SGLANG]


@pytest.fixture
def kv_policy() -> KvPolicy:
    """What happens to KV caches at an update; a test that wants another overrides it."""
    return KvPolicy.RECOMPUTE


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def shared_sglang(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[SharedSglang]:
    """Starts nothing before it is asked to lend."""
    shared = SharedSglang(tmp_path_factory.mktemp("sglang"))
    yield shared
    await shared.stop()


async def _started(request: pytest.FixtureRequest, kv_policy: KvPolicy, shared: SharedSglang) -> AsyncIterator[Subject]:
    if request.param == "sglang":
        request.getfixturevalue("sglang_python")
        yield await shared.lend(kv_policy)
        return
    subject = await start_embedded(request.param, kv_policy)
    yield subject
    await subject.engine.stop()


@pytest_asyncio.fixture(params=EVERY_ENGINE, loop_scope="session")
async def subject(
    request: pytest.FixtureRequest, kv_policy: KvPolicy, shared_sglang: SharedSglang
) -> AsyncIterator[Subject]:
    """Every engine in turn."""
    async for started in _started(request, kv_policy, shared_sglang):
        yield started


@pytest_asyncio.fixture(params=WITH_A_MODEL, loop_scope="session")
async def exact(
    request: pytest.FixtureRequest, kv_policy: KvPolicy, shared_sglang: SharedSglang
) -> AsyncIterator[Subject]:
    """Every engine that has a model, and every architecture of the embedded ones."""
    async for started in _started(request, kv_policy, shared_sglang):
        yield started


@pytest.fixture
def engine(subject: Subject) -> Engine:
    return subject.engine
