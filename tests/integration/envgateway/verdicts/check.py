"""Judges rows and counts the verdicts; used by the slow test and by the benchmark."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from services.envgateway.judge.judge import Judge
from services.envgateway.judge.records import JudgeRequest, JudgeResult
from services.envgateway.sandbox.bare.statuses import RunStatus
from services.envgateway.sandbox.pool import SandboxPool
from services.envgateway.sandbox.records import ExecutionLimits
from tests.integration.envgateway.verdicts.mutants import counts, mutants

_LIMITS = ExecutionLimits(wall_s=1.0)  # many mutants never end


@dataclass(slots=True)
class Tally:
    """``right`` of ``asked``; ``wrong`` names the others."""

    asked: int = 0
    right: int = 0
    wrong: list[str] = field(default_factory=list)

    def add(self, name: str, is_right: bool) -> None:
        self.asked += 1
        self.right += is_right
        if not is_right:
            self.wrong.append(name)

    @property
    def share(self) -> float:
        return self.right / self.asked if self.asked else 0.0


async def _judged(pool: SandboxPool, requests: Iterable[JudgeRequest]) -> list[JudgeResult]:
    judge = Judge(pool)
    gate = asyncio.Semaphore(pool.config.num_slots)

    async def one(request: JudgeRequest) -> JudgeResult:
        async with gate:
            return await judge.judge(request)

    return await asyncio.gather(*map(one, requests))


async def references(pool: SandboxPool, requests: dict[str, JudgeRequest]) -> Tally:
    """Reference solutions are OK."""
    tally = Tally()
    for name, result in zip(requests, await _judged(pool, requests.values()), strict=True):
        tally.add(f"{name}: {result.verdict.value} {result.detail}", result.verdict is RunStatus.OK)
    return tally


async def rejected_mutants(pool: SandboxPool, requests: dict[str, JudgeRequest], count: int, seed: int) -> Tally:
    """Mutants that answer differently somewhere are not OK; at most ``count`` of them."""
    rng = random.Random(seed)
    names = sorted(requests)
    rng.shuffle(names)
    tally = Tally()
    gate = asyncio.Semaphore(pool.config.num_slots)
    judge = Judge(pool)

    async def one(name: str, mutant: JudgeRequest) -> tuple[str, bool] | None:
        async with gate:
            if tally.asked >= count or not await counts(pool, requests[name], mutant):
                return None
            result = await judge.judge(replace(mutant, limits=_LIMITS, stop_early=True))
            return f"{name}: {result.verdict.value}\n{mutant.code}", result.verdict is not RunStatus.OK

    pairs = [(name, mutant) for name in names for mutant in mutants(requests[name], rng, 3)]
    for start in range(0, len(pairs), 64):
        for outcome in await asyncio.gather(*(one(*pair) for pair in pairs[start : start + 64])):
            if outcome is not None and tally.asked < count:
                tally.add(*outcome)
        if tally.asked >= count:
            break
    return tally


async def contest_solutions(
    pool: SandboxPool, pairs: dict[str, tuple[JudgeRequest, JudgeRequest]]
) -> tuple[Tally, Tally, int]:
    """Right ones pass all their cases, wrong ones fail; and how many wrong ones failed and later passed a case."""
    right, wrong, not_prefixes = Tally(), Tally(), 0
    results = await _judged(pool, [request for pair in pairs.values() for request in pair])
    for index, name in enumerate(pairs):
        passed, failed = results[2 * index : 2 * index + 2]
        complete = all(len(result.cases) == result.num_cases for result in (passed, failed))
        right.add(f"{name}: {passed.detail}", complete and passed.verdict is RunStatus.OK)
        wrong.add(f"{name}: {failed.verdict.value}", complete and failed.verdict is RunStatus.WRONG_ANSWER)
        oks = [case.verdict is RunStatus.OK for case in failed.cases]
        not_prefixes += any(after and not before for before, after in itertools.pairwise(oks))
    return right, wrong, not_prefixes
