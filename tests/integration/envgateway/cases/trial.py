"""Judges bad inputs at one tier: the verdict, a clean slot, an unaffected neighbour and next program, no trace outside."""

from __future__ import annotations

import asyncio
import os
import resource
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

from services.envgateway.judge.judge import Judge
from services.envgateway.sandbox.bare.statuses import RunStatus
from services.envgateway.sandbox.lease import profile_of
from services.envgateway.sandbox.pool import SandboxPool
from tests.integration.envgateway.cases.model import CONFIG, HONEST, Bad, World
from tests.integration.envgateway.sandbox_state import assert_clean

# U and 0 are for other users than root, who has 2 and 1 (and at 0 would run strangers' code as root)
TIERS = ("2", "1") if os.getuid() == 0 else ("U", "0")
# Expected at tiers 2 and 1 only, and why; that they leave nothing behind is tested at all the same
OTHERWISE = {
    "links-to-host-files": "U and 0 tell a program that a change of mode has worked, and do nothing",
    "renames-its-work-dir": "at U and 0 a slot's directory is the program's to change, and is made anew",
    "fork-bomb": "at 0 the kernel counts the gateway's own processes, too, so the supervisor ends it",
}
SIDE_BY_SIDE = 6  # sandboxes that go through the bad inputs together: most of their time is waiting


def open_pool(tier: str, **changes: Any) -> SandboxPool:
    return SandboxPool.start_before_threads(CONFIG.model_copy(update={"tier": tier, "allow_tier_0": True, **changes}))


def cases_at(tier: str, cases: Sequence[Bad]) -> list[Bad]:
    return [case for case in cases if tier in ("2", "1") or case.name not in OTHERWISE]


@asynccontextmanager
async def with_others(pool: SandboxPool) -> AsyncIterator[list[SandboxPool]]:
    """The sandbox, and further ones of its tier."""
    others = [open_pool(pool.tier) for _ in range(SIDE_BY_SIDE - 1)]
    try:
        yield [pool, *others]
    finally:
        await asyncio.gather(*(other.close() for other in others))


async def fault(pool: SandboxPool, world: World, case: Bad) -> str:
    """Whatever is wrong; empty when the bad input got its verdict and changed nothing."""
    limits = [resource.prlimit(os.getpid(), resource.RLIMIT_NOFILE), os.sched_getaffinity(0)]
    restarts = pool.counts["restarts"]
    neighbour = asyncio.create_task(Judge(pool).judge(HONEST))
    result = await Judge(pool).judge(case.request_in(world))
    honest = await neighbour
    if wrong := case.wrong(result):
        return wrong
    if result.tier != pool.tier or honest.verdict is not RunStatus.OK:
        return f"{case}: at tier {result.tier}, and its neighbour was {honest.verdict}"
    if [resource.prlimit(os.getpid(), resource.RLIMIT_NOFILE), os.sched_getaffinity(0)] != limits:
        return f"{case}: the limits of this process have changed"
    if pool.counts["restarts"] != restarts:
        return f"{case}: the supervisor has ended"
    return await dirt(pool, str(case))


async def dirt(pool: SandboxPool, name: str) -> str:
    """What is left behind: a process, a file, or a sandbox in which a program finds something."""
    try:
        await assert_clean(pool)
    except AssertionError as error:
        return f"{name}: left something behind: {error}"
    return ""


async def faults(pools: Sequence[SandboxPool], world: World, cases: Sequence[Bad]) -> tuple[list[str], int]:
    """The faults of bad inputs, each alone in a sandbox, and how many were judged twice. The sandboxes work side by side; a
    failed input is judged again alone, which decides, because some limits are of time. Only the first one imports numpy."""
    doubtful: list[Bad] = []
    todo = list(reversed(cases))
    warm = [case for case in todo if profile_of(case.request.code.encode(errors="replace")) == "scientific"]
    cold = [case for case in todo if case not in warm]

    async def work(own: SandboxPool, lists: Sequence[list[Bad]]) -> None:
        for todo in lists:
            while todo:
                case = todo.pop()
                if await fault(own, world, case):
                    doubtful.append(case)

    await asyncio.gather(work(pools[0], (warm, cold)), *(work(other, (cold,)) for other in pools[1:]))
    return [told for case in doubtful if (told := await fault(pools[0], world, case))], len(doubtful)
