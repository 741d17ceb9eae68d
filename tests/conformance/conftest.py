"""The engine of a test, by the names in its parameters. The true SGLang server is started once and set back between tests."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from services.inference.engine.base import Engine, KvPolicy
from tests.conformance.subjects import Subject, start_embedded

SGLANG = pytest.param("sglang", marks=pytest.mark.sglang)
EVERY_ENGINE = ["torch-qwen3", "forced-qwen3", "scripted", SGLANG]
WITH_A_MODEL = ["torch-qwen3", "torch-qwen2", "torch-llama", "forced-qwen3", "forced-qwen2", SGLANG]


@pytest.fixture
def kv_policy() -> KvPolicy:
    """What happens to KV caches at an update; a test that wants another overrides it."""
    return KvPolicy.RECOMPUTE


async def _started(kind: str, kv_policy: KvPolicy) -> AsyncIterator[Subject]:
    if kind != "scripted":
        pytest.importorskip("torch")
    subject = await start_embedded(kind, kv_policy)
    yield subject
    await subject.engine.stop()


@pytest_asyncio.fixture(params=EVERY_ENGINE, loop_scope="session")
async def subject(request: pytest.FixtureRequest, kv_policy: KvPolicy) -> AsyncIterator[Subject]:
    """Every engine in turn."""
    async for started in _started(request.param, kv_policy):
        yield started


@pytest_asyncio.fixture(params=WITH_A_MODEL, loop_scope="session")
async def exact(request: pytest.FixtureRequest, kv_policy: KvPolicy) -> AsyncIterator[Subject]:
    """Every engine that has a model, and every architecture of the embedded ones."""
    async for started in _started(request.param, kv_policy):
        yield started


@pytest.fixture
def engine(subject: Subject) -> Engine:
    return subject.engine
