"""Every bad input at each tier of this user: its verdict, a clean slot, an unaffected next program, no canary."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import pytest
import pytest_asyncio

from services.common.errors import SandboxRefusedError
from services.envgateway.sandbox.bare.confinement import landlock_version
from services.envgateway.sandbox.pool import SandboxPool
from tests import needs
from tests.integration.envgateway.cases import TABLES
from tests.integration.envgateway.cases.model import World, open_world
from tests.integration.envgateway.cases.trial import TIERS, cases_at, faults, open_pool, with_others

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    with open_world() as opened:
        yield opened


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=TIERS)
async def pools(request: pytest.FixtureRequest) -> AsyncIterator[list[SandboxPool]]:
    try:
        started = open_pool(request.param)
    except SandboxRefusedError as refusal:
        needs.unmet(f"sandbox tier {request.param}", refusal.message)
    async with with_others(started) as opened:
        yield opened
    await started.close()


@pytest.mark.slow
@pytest.mark.parametrize("table", TABLES)
async def test_bad_inputs_get_their_verdicts_and_leave_no_trace(
    pools: list[SandboxPool], world: World, table: str
) -> None:
    tier = pools[0].tier
    cases = cases_at(tier, TABLES[table])
    if table == "native":
        needs.check("C++ compiler")
    if tier == "1" and not landlock_version():  # world-readable files and world-writable directories stay open
        cases = [case for case in cases if case.number not in (14, 20, 21)]
    told, _ = await faults(pools, world, cases)
    assert told == []
