"""Every bad input at each tier of this user: its verdict, a clean slot, an unaffected next program, no canary."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Iterator

import pytest

from services.common.errors import SandboxRefusedError
from services.envgateway.sandbox.bare.confinement import landlock_version
from services.envgateway.sandbox.bare.statuses import RunStatus
from services.envgateway.sandbox.pool import SandboxPool
from services.envgateway.sandbox.records import ExecutionLimits, ExecutionRequest
from tests import needs
from tests.integration.envgateway.cases import ALL, TABLES
from tests.integration.envgateway.cases.model import World, open_world
from tests.integration.envgateway.cases.trial import TIERS, cases_at, fault, faults, open_pool


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    with open_world() as opened:
        yield opened


@pytest.fixture(params=TIERS)
async def pool(request: pytest.FixtureRequest, world: World) -> AsyncIterator[SandboxPool]:
    try:
        started = open_pool(request.param)
    except SandboxRefusedError as refusal:
        needs.unmet(f"sandbox tier {request.param}", refusal.message)
    yield started
    await started.close()


@pytest.mark.slow
@pytest.mark.parametrize("table", TABLES)
async def test_bad_inputs_get_their_verdicts_and_leave_no_trace(pool: SandboxPool, world: World, table: str) -> None:
    cases = cases_at(pool.tier, TABLES[table])
    if table == "native":
        needs.check("C++ compiler")
    if pool.tier == "1" and not landlock_version():  # world-readable files and world-writable directories stay open
        cases = [case for case in cases if case.number not in (14, 20, 21)]
    told, _ = await faults(pool, world, cases)
    assert told == []


_UNCOUNTED = ("shared", "many-small", "zeros", "memfd", "huge-pages-in-pipes", "first-thread-ends")


async def test_without_a_cgroup_unaccounted_memory_is_refused(world: World) -> None:
    watched = open_pool("auto", memory_cgroup=False, allow_tier_0=os.getuid() != 0)
    try:
        assert watched.gauges["sandbox_memory_cgroup"] == 0
        cases = [case for case in ALL if case.number == 56 and case.name in _UNCOUNTED]
        assert [told for case in cases if (told := await fault(watched, world, case))] == []
    finally:
        await watched.close()


async def test_memory_that_is_in_no_resident_set_is_reported(pool: SandboxPool) -> None:
    if not pool.gauges["sandbox_memory_cgroup"]:
        needs.unmet("memory cgroup", "programs are watched here, and shared mappings refused")
    code = "import mmap, time\nm = mmap.mmap(-1, 90 << 20)\ntime.sleep(.1)\nfor i in range(90):\n    m[i << 20:(i + 1) << 20] = b'x' * (1 << 20)\n    m.madvise(mmap.MADV_DONTNEED, i << 20, 1 << 20)\ntime.sleep(.1)"
    result = await pool.run(ExecutionRequest(code=code, limits=ExecutionLimits(wall_s=5.0)))
    assert result.status is RunStatus.OK and 80 << 20 < result.peak_memory_bytes < 150 << 20
