"""Every bad input at tier 2 and at tier 1: its verdict, a clean slot, an unaffected next program, no canary."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator

import pytest
import pytest_asyncio

from services.common.errors import SandboxRefusedError
from services.envgateway.judge.judge import Judge
from services.envgateway.sandbox.bare.statuses import RunStatus
from services.envgateway.sandbox.pool import SandboxPool
from tests import needs
from tests.integration.envgateway.cases import ALL, Bad
from tests.integration.envgateway.cases.model import CONFIG, HONEST, World, open_world
from tests.integration.envgateway.sandbox_state import assert_clean

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    with open_world() as opened:
        yield opened


@pytest_asyncio.fixture(loop_scope="module", scope="module", params=["2", "1"])
async def pool(request: pytest.FixtureRequest, world: World) -> AsyncIterator[SandboxPool]:
    """One sandbox a tier, for all cases; the probe's own words skip a tier that does not work here."""
    try:
        started = SandboxPool.start_before_threads(CONFIG.model_copy(update={"tier": request.param}))
    except SandboxRefusedError as refusal:
        needs.unmet(f"sandbox tier {request.param}", refusal.message)
    yield started
    await started.close()


_FROM_EXCHANGE = 60  # judged once in test_tests_as_code, too


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=pytest.mark.slow if case.number >= _FROM_EXCHANGE else (), id=str(case)) for case in ALL],
)
async def test_a_bad_input_gets_its_verdict_and_leaves_no_trace(pool: SandboxPool, world: World, case: Bad) -> None:
    if case.request.language == "cpp":
        needs.check("C++ compiler")
    if case.number in (14, 20, 21) and pool.tier == "1":
        needs.check("Landlock")  # without it world-readable files and world-writable directories stay open at tier 1
    neighbour = asyncio.create_task(Judge(pool).judge(HONEST))
    result = await Judge(pool).judge(case.request_in(world))
    assert case.wrong(result) == ""
    assert result.tier == pool.tier
    assert (await neighbour).verdict is RunStatus.OK
    assert pool.counts["restarts"] == 0
    await assert_clean(pool)
