"""Can the judge be broken? Every bad input at each tier, then a hostile mix at full load beside honest jobs.

Root has tiers 2 and 1, any other user U and 0. First each bad input of tests/integration/envgateway/cases (rows 1 to 48 of the
table of bad inputs, 54 to 59, what a program may not gain by its bytes, memory and files, and 60 to 65, what crosses
between test code and a program; most in several forms), a judgement that is cancelled (49) and a supervisor that is killed
in mid-run (50): the verdict must be the expected one, the slot empty, the next program unaffected, the planted secret unseen. Rows 51 to 53 are about queues, workers and
formulas: for these their tests are run, with real processes and a real Redis.

Then, at each tier, half of the load is drawn from the bad inputs by seed and half are honest programs with a known verdict,
more than there are slots, without a pause. At the end nothing may be left of it: no process of a slot user, no file, no
busy slot; and no honest verdict may differ.

``ours`` is the share of bad inputs with the expected verdict, over all tiers; ``passed`` and ``cases`` count table rows.

    python benchmarks/judge_hostile.py [--quick] [--seconds 300] [--seed 1]
"""

from __future__ import annotations

import argparse
import asyncio
import random
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from _hostile_isolation import OTHERWISE, TIERS, slowed
from _needs import why_not
from _report import report

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from services.common.errors import SandboxRefusedError
from services.envgateway.judge.judge import Judge
from services.envgateway.judge.records import JudgeRequest, StdinCase, StdinTests, Verdict
from services.envgateway.sandbox.pool import SandboxPool
from services.envgateway.sandbox.records import ExecutionLimits
from tests.integration.envgateway.cases import ALL, Bad
from tests.integration.envgateway.cases.containment import CASES
from tests.integration.envgateway.cases.model import CONFIG, HONEST, World, open_world
from tests.integration.envgateway.sandbox_state import assert_clean, processes_of_slots, slot_dirs

_ROOT = Path(__file__).resolve().parent.parent
_SUMS = StdinTests(cases=tuple(StdinCase(stdin=f"{n} {n}", expected=f"{2 * n}") for n in range(3)))
_PATIENT = ExecutionLimits(wall_s=8.0)  # an honest job is judged under load, and must not be slow because others are
HONEST_JOBS = [
    (JudgeRequest(code="print(sum(map(int, input().split())))", tests=_SUMS, limits=_PATIENT), Verdict.OK),
    (JudgeRequest(code="a, b = map(int, input().split())\nprint(a - b)", tests=_SUMS, limits=_PATIENT), Verdict.WRONG_ANSWER),
    (JudgeRequest(code="print(1 / int(input().split()[0]))", tests=_SUMS, limits=_PATIENT), Verdict.RUNTIME_ERROR),
    (JudgeRequest(code="open('x', 'w').write('y')\nprint(2 * int(input().split()[0]))", tests=_SUMS, limits=_PATIENT), Verdict.OK),
    (JudgeRequest(code="def x(", tests=_SUMS, limits=_PATIENT), Verdict.COMPILE_ERROR),
]  # fmt: skip


TESTED_ROWS = {  # rows that are about more than one slot, by their tests
    51: ("tests/unit/envgateway/test_embedded_queue.py", "flood or full"),
    52: ("tests/integration/envgateway/queue/test_streams.py", "kills_its_workers"),
    53: ("tests/integration/envgateway/test_math_reward.py", "bomb or rows_fault"),
}


def by_tests(rows: dict[int, tuple[str, str]]) -> dict[int, str]:
    """What is wrong with each of these rows; empty when its tests ran and passed."""
    told = {}
    for row, (path, chosen) in rows.items():
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", path, "-k", chosen]
        done = subprocess.run(command, cwd=_ROOT, capture_output=True, text=True, timeout=300, check=False)
        last = done.stdout.strip().splitlines()[-1:] or [done.stderr[-200:]]
        told[row] = "" if done.returncode == 0 and "skipped" not in last[0] else f"{row}: {last[0]}"
    return told


async def cancelled(pool: SandboxPool) -> str:
    """Row 49."""
    running = asyncio.create_task(Judge(pool).judge(_sleeper()))
    await asyncio.sleep(0.3)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    try:
        async with asyncio.timeout(5):
            while pool.gauges["sandbox_busy_slots"]:  # noqa: ASYNC110 - a number to watch, nothing that tells
                await asyncio.sleep(0.01)
    except TimeoutError:
        return "49: a cancelled judgement kept its slot"
    return ""


async def supervisor_killed(pool: SandboxPool) -> str:
    """Row 50."""
    running = asyncio.create_task(Judge(pool).judge(_sleeper(0.6)))
    await asyncio.sleep(0.3)
    assert pool._supervisor is not None
    pool._supervisor.process.kill()
    result = await running
    return "" if result.verdict in (Verdict.OK, Verdict.INFRA_ERROR) else f"50: {result.verdict.value}"


def _sleeper(seconds: float = 8.0) -> JudgeRequest:
    code = f"import os, time\nos.fork()\ntime.sleep({seconds})"
    return JudgeRequest(code=code, tests=StdinTests(cases=(StdinCase(),)))


async def one_by_one(pool: SandboxPool, world: World, cases: Sequence[Bad]) -> dict[str, Any]:
    """Each bad input alone; a row passes when all of its forms do."""
    wrong: dict[int, list[str]] = {}
    for case in cases:
        wrong.setdefault(case.number, [])
        told = case.wrong(await Judge(pool).judge(case.request_in(world))) or await _dirt(pool, str(case))
        if told:
            wrong[case.number].append(told)
    for number, special in ((49, cancelled), (50, supervisor_killed)):
        told = await special(pool) or await _dirt(pool, str(number))
        wrong[number] = [told] if told else []
    failures = [told for row in wrong.values() for told in row]
    for told in failures:
        print("  ", told)
    return {
        "cases": len(wrong),
        "passed": sum(not row for row in wrong.values()),
        "inputs": len(cases) + 2,
        "inputs_passed": len(cases) + 2 - len(failures),
    }


async def _dirt(pool: SandboxPool, name: str) -> str:
    try:
        await assert_clean(pool)
    except AssertionError as error:
        return f"{name}: left something behind: {error}"
    return ""


async def mixed(pool: SandboxPool, world: World, cases: Sequence[Bad], seconds: float, seed: int) -> dict[str, Any]:
    """Honest and hostile jobs, twice as many as slots, until the time is up."""
    rng = random.Random(seed)
    end = time.monotonic() + seconds
    count: Counter[str] = Counter()
    judge = Judge(pool)

    async def feed(hostile: bool) -> None:
        while time.monotonic() < end:
            if hostile:
                await _hostile(judge, rng.choice(cases), world, count)
            else:
                request, verdict = rng.choice(HONEST_JOBS)
                result = await judge.judge(request)
                count["honest"] += 1
                if result.verdict is not verdict:
                    count["honest_changed"] += 1
                    print("  ", f"an honest {verdict.value} became {result.verdict.value}: {result.detail}")

    await asyncio.gather(*(feed(hostile=index % 2 == 0) for index in range(2 * pool.config.num_slots)))
    leaked = processes_of_slots(pool)
    files = [path for slot in slot_dirs(pool) for path in slot.rglob("*") if path != slot / "work"]
    clean = await _dirt(pool, "the mix")
    return {
        "seconds": seconds,
        "honest": count["honest"],
        "honest_changed": count["honest_changed"],
        "hostile": count["hostile"],
        "hostile_unexpected": count["hostile_unexpected"],
        "leaked_processes": len(leaked),
        "leaked_files": len(files),
        "leaked_slots": int(pool.gauges["sandbox_busy_slots"]),
        "restarts": pool.counts["restarts"],
        "next_program_unaffected": not clean,
    }


async def _hostile(judge: Judge, case: Bad, world: World, count: Counter[str]) -> None:
    """Under load a verdict may turn into the time limit; into nothing that is better for the program."""
    result = await judge.judge(case.request_in(world))
    count["hostile"] += 1
    if result.verdict not in case.verdicts | {Verdict.TIME_LIMIT}:
        count["hostile_unexpected"] += 1
        print("  ", f"{case} under load: {result.verdict.value} {result.detail}")


async def measure(seconds: float, seed: int) -> None:
    tiers: dict[str, Any] = {}
    left_out: dict[str, str] = {}
    with open_world() as world:
        for tier in TIERS:
            try:
                pool = SandboxPool.start_before_threads(
                    CONFIG.model_copy(update={"tier": tier, "allow_tier_0": True, "prewarm_scientific": True})
                )
            except SandboxRefusedError as refusal:
                left_out[f"tier {tier}"] = refusal.message
                continue
            try:
                every = [case for case in (*ALL, *CASES) if tier in ("2", "1") or case.name not in OTHERWISE]
                if tier in ("U", "0"):
                    left_out |= OTHERWISE
                cases = [case for case in every if pool.has_cpp or case.request.language != "cpp"]
                if len(cases) < len(every):
                    left_out[f"{len(every) - len(cases)} programs in C++"] = (
                        why_not("C++ compiler") or "the sandbox does not see it"
                    )
                print(f"tier {tier}: {len(cases)} bad inputs one by one")
                alone = {**await one_by_one(pool, world, cases), **await slowed(pool)}
            finally:
                await pool.close()
            pool = SandboxPool.start_before_threads(
                CONFIG.model_copy(update={"tier": tier, "allow_tier_0": True, "num_slots": 4})
            )
            try:
                print(f"tier {tier}: {seconds / len(TIERS):g} s of everything at once")
                together = await mixed(pool, world, cases, seconds / len(TIERS), seed)
                assert (await Judge(pool).judge(HONEST)).verdict is Verdict.OK
            finally:
                await pool.close()
            tiers[tier] = {**alone, "mix": together}
    if reason := why_not("redis-server"):
        left_out["row 52"] = reason
    told = by_tests({row: tests for row, tests in TESTED_ROWS.items() if reason is None or row != 52})
    for line in filter(None, told.values()):
        print("  ", line)
    inputs, passed = (sum(tier[name] for tier in tiers.values()) for name in ("inputs", "inputs_passed"))
    share = passed / inputs if inputs else None
    report(
        "judge_hostile",
        share,
        1.0,
        share,
        0.0,
        cases=max((tier["cases"] for tier in tiers.values()), default=0) + len(told),
        passed=min((tier["passed"] for tier in tiers.values()), default=0) + sum(not line for line in told.values()),
        seed=seed,
        tiers=tiers,
        left_out=left_out,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a mix of 20 seconds: about a minute in all")
    parser.add_argument("--seconds", type=float, default=300.0, help="of the mix, over all tiers")
    parser.add_argument("--seed", type=int, default=1, help="of the order of the mix")
    arguments = parser.parse_args()
    asyncio.run(measure(20.0 if arguments.quick else arguments.seconds, arguments.seed))


if __name__ == "__main__":
    main()
