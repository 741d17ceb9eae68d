"""A sandbox with small limits, at the strongest tier that works here; the probe's report skips impossible tests."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
import pytest_asyncio

from services.common.config.envgateway import SandboxConfig
from services.envgateway.judge.judge import Judge
from services.envgateway.sandbox.pool import SandboxPool
from services.envgateway.sandbox.records import ExecutionLimits, ExecutionRequest, ExecutionResult
from tests import needs

Execute = Callable[..., Awaitable[ExecutionResult]]

CONFIG = SandboxConfig(
    allow_tier_0=True,
    num_slots=2,
    wall_time_s=10.0,
    cpu_time_s=10.0,
    memory_bytes=192 << 20,
    num_processes=8,
    output_bytes=20_000,
    file_bytes=1 << 20,
    num_live=3,
    prewarm_scientific=False,
)

LONG_S = 600.0
LONG = CONFIG.model_copy(update={"wall_time_s": LONG_S})
SLEEP_LONG = "import time; time.sleep(500)"
# A program that sleeps does not end by itself, or at its limit, before every wait of a test is over.
long_programs = pytest.mark.parametrize("pool", [LONG], indirect=True, ids=["long"])


@pytest.fixture
async def pool(request: pytest.FixtureRequest) -> AsyncIterator[SandboxPool]:
    started = SandboxPool.start_before_threads(getattr(request, "param", CONFIG))
    yield started
    await started.close()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared_pool(request: pytest.FixtureRequest) -> AsyncIterator[SandboxPool]:
    """One sandbox for a file whose tests leave it as it was: ``pool = shared_pool`` there, and a loop for the file."""
    started = SandboxPool.start_before_threads(getattr(request, "param", CONFIG))
    yield started
    await started.close()


@pytest.fixture
def judge(pool: SandboxPool) -> Judge:
    return Judge(pool)


@pytest.fixture
def isolated_pool(pool: SandboxPool) -> SandboxPool:
    """For tests that need isolation."""
    if pool.tier == "0":
        needs.unmet("isolating sandbox", "the sandbox runs at tier 0")
    return pool


@pytest.fixture
def execute(pool: SandboxPool) -> Execute:
    async def run(code: str, *, stdin: bytes = b"", echo: bool = False, **limits: Any) -> ExecutionResult:
        limits = {"wall_s": CONFIG.wall_time_s, **limits}
        return await pool.run(ExecutionRequest(code=code, stdin=stdin, echo=echo, limits=ExecutionLimits(**limits)))

    return run
