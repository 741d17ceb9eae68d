"""Can the judge be broken? Every bad input at each tier, then a hostile mix at full load beside honest jobs.

Root has tiers 2 and 1, any other user U and 0. First each bad input of tests/integration/envgateway/cases (rows 1 to 48
of the table of bad inputs, 54 to 59, bytes, memory and files that a program may not gain, and 60 to 65, test code
that is read and opaque test code; most in several forms), a judgement that is cancelled (49) and a supervisor
that is killed in mid-run (50): the verdict must be the expected one, the slot empty, the next program unaffected, the
planted secret unseen. Several sandboxes go through them side by side, each with one input at a time; a failed input is
judged again alone, which decides. Rows 51 to 53 are about queues, workers and formulas: for these their tests are run,
with real processes and a real Redis.

Then, at each tier, half of the load is drawn from the bad inputs by seed and half are honest programs with a known
verdict, more than there are slots, without a pause. At the end no trace may remain: no process of a slot user, no
file, no busy slot; and no honest verdict may differ.

``ours`` is the share of bad inputs with the expected verdict, over all tiers; ``passed`` and ``cases`` count table
rows.

    python benchmarks/judge_hostile.py [--quick] [--seconds 300] [--seed 1]
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks._bench import report, why_not
from services.common.errors import SandboxRefusedError
from services.envgateway.judge.judge import Judge
from services.envgateway.judge.records import JudgeRequest, StdinCase, StdinTests
from services.envgateway.sandbox.bare.statuses import RunStatus
from services.envgateway.sandbox.pool import SandboxPool
from services.envgateway.sandbox.records import ExecutionLimits, ExecutionRequest
from tests.integration.envgateway.cases import ALL
from tests.integration.envgateway.cases.model import HONEST, Bad, World, open_world
from tests.integration.envgateway.cases.trial import OTHERWISE, TIERS, cases_at, dirt, faults, open_pool, with_others
from tests.integration.envgateway.sandbox_state import processes_of_slots, slot_dirs

# --- For ``judge_hostile``: the effect of one program on the others' time, and the tiers available to this user.


sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

_RUNS = 15
_MAPPINGS = """
import ctypes, mmap, os, time
libc = ctypes.CDLL(None)
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
for number in range(60_000):
    place = libc.mmap(None, 4096, 1 + 2 * (number % 2), 0x22, -1, 0)
    if place in (None, ctypes.c_void_p(-1).value):
        break
    if number % 4 == 1:  # shared later, so the resident sets together are more than the limit, and the shares less
        ctypes.memset(place, 1, 1)
for _ in range(6):
    if os.fork() == 0:
        break
time.sleep(2.5)
"""


async def slowed(pool: SandboxPool) -> dict[str, Any]:
    """Milliseconds of a neighbour's small program, alone and beside seven processes with 60,000 mappings."""
    alone = await _median_ms(pool)
    limits = ExecutionLimits(wall_s=4.0)
    busy = asyncio.create_task(pool.run(ExecutionRequest(code=_MAPPINGS, limits=limits)))
    await asyncio.sleep(1.2)
    beside = await _median_ms(pool)
    ended = await busy
    return {"alone_ms": alone, "beside_60000_mappings_ms": beside, "mappings_ended": ended.status.value}


async def _median_ms(pool: SandboxPool) -> float:
    times = []
    for _ in range(_RUNS):
        began = time.monotonic()
        await pool.run(ExecutionRequest(code="print(1)", limits=ExecutionLimits(wall_s=5.0)))
        times.append(1000 * (time.monotonic() - began))
    return round(statistics.median(times), 2)


# --- The benchmark itself.


sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
_ROOT = Path(__file__).resolve().parent.parent
_SUMS = StdinTests(cases=tuple(StdinCase(stdin=f"{n} {n}", expected=f"{2 * n}") for n in range(3)))
_PATIENT = ExecutionLimits(wall_s=8.0)  # an honest job is judged under load, and must not be slow because others are
HONEST_JOBS = [
    (JudgeRequest(code="print(sum(map(int, input().split())))", tests=_SUMS, limits=_PATIENT), RunStatus.OK),
    (JudgeRequest(code="a, b = map(int, input().split())\nprint(a - b)", tests=_SUMS, limits=_PATIENT), RunStatus.WRONG_ANSWER),
    (JudgeRequest(code="print(1 / int(input().split()[0]))", tests=_SUMS, limits=_PATIENT), RunStatus.RUNTIME_ERROR),
    (JudgeRequest(code="open('x', 'w').write('y')\nprint(2 * int(input().split()[0]))", tests=_SUMS, limits=_PATIENT), RunStatus.OK),
    (JudgeRequest(code="def x(", tests=_SUMS, limits=_PATIENT), RunStatus.COMPILE_ERROR),
]  # fmt: skip


TESTED_ROWS = {  # rows that are about more than one slot, by their tests
    51: ("tests/unit/envgateway/test_embedded_queue.py", "flood or full"),
    52: ("extras/farm/tests/test_redis.py", "kills_its_workers"),
    53: ("tests/integration/envgateway/test_math_reward.py", "bomb or rows_fault"),
}


def by_test(row: int) -> str:
    """The fault of this row; empty when its tests ran and passed."""
    path, chosen = TESTED_ROWS[row]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", path, "-k", chosen]
    done = subprocess.run(command, cwd=_ROOT, capture_output=True, text=True, timeout=300, check=False)
    last = done.stdout.strip().splitlines()[-1:] or [done.stderr[-200:]]
    return "" if done.returncode == 0 and "skipped" not in last[0] else f"{row}: {last[0]}"


async def by_tests(rows: Sequence[int]) -> list[str]:
    """The faults of these rows, one after the other."""
    return [await asyncio.to_thread(by_test, row) for row in rows]


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
    return "" if result.verdict in (RunStatus.OK, RunStatus.INFRA_ERROR) else f"50: {result.verdict.value}"


def _sleeper(seconds: float = 8.0) -> JudgeRequest:
    code = f"import os, time\nos.fork()\ntime.sleep({seconds})"
    return JudgeRequest(code=code, tests=StdinTests(cases=(StdinCase(),)))


async def one_by_one(pool: SandboxPool, world: World, cases: Sequence[Bad]) -> dict[str, Any]:
    """Each bad input alone in a sandbox; a row passes when all of its forms do."""
    wrong: dict[int, list[str]] = {case.number: [] for case in cases}
    async with with_others(pool) as pools:
        failures, doubtful = await faults(pools, world, cases)
    for told in failures:
        wrong[int(told.partition("-")[0])].append(told)
    for number, special in ((49, cancelled), (50, supervisor_killed)):
        told = await special(pool) or await dirt(pool, str(number))
        wrong[number] = [told] if told else []
    failures = [told for row in wrong.values() for told in row]
    for told in failures:
        print("  ", told)
    return {
        "cases": len(wrong),
        "passed": sum(not row for row in wrong.values()),
        "inputs": len(cases) + 2,
        "inputs_passed": len(cases) + 2 - len(failures),
        "judged_twice": doubtful,
    }


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
    clean = await dirt(pool, "the mix")
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
    """Under load a verdict may turn into the time limit, never into a better one for the program."""
    result = await judge.judge(case.request_in(world))
    count["hostile"] += 1
    if result.verdict not in case.verdicts | {RunStatus.TIME_LIMIT}:
        count["hostile_unexpected"] += 1
        print("  ", f"{case} under load: {result.verdict.value} {result.detail}")


async def measure(seconds: float, seed: int) -> None:
    tiers: dict[str, Any] = {}
    left_out: dict[str, str] = {}
    if reason := why_not("redis-server"):
        left_out["row 52"] = reason
    tested = [row for row in TESTED_ROWS if reason is None or row != 52]
    beside = asyncio.create_task(by_tests(tested), name="rows by their tests")  # mostly waiting
    with open_world() as world:
        for tier in TIERS:
            try:
                pool = open_pool(tier, prewarm_scientific=True)
            except SandboxRefusedError as refusal:
                left_out[f"tier {tier}"] = refusal.message
                continue
            try:
                every = cases_at(tier, ALL)
                left_out |= OTHERWISE if tier in ("U", "0") else {}
                cases = [case for case in every if pool.has_cpp or case.request.language != "cpp"]
                if len(cases) < len(every):
                    left_out[f"{len(every) - len(cases)} programs in C++"] = (
                        why_not("C++ compiler") or "the sandbox does not see it"
                    )
                print(f"tier {tier}: {len(cases)} bad inputs one by one")
                alone = {**await one_by_one(pool, world, cases), **await slowed(pool)}
            finally:
                await pool.close()
            pool = open_pool(tier, num_slots=4)
            try:
                print(f"tier {tier}: {seconds / len(TIERS):g} s of everything at once")
                together = await mixed(pool, world, cases, seconds / len(TIERS), seed)
                assert (await Judge(pool).judge(HONEST)).verdict is RunStatus.OK
            finally:
                await pool.close()
            tiers[tier] = {**alone, "mix": together}
    # a test that fails beside all this is run again beside nothing, which decides
    again = [row for row, line in zip(tested, await beside, strict=True) if line]
    failures = [line for line in await by_tests(again) if line]
    for line in failures:
        print("  ", line)
    inputs, passed = (sum(tier[name] for tier in tiers.values()) for name in ("inputs", "inputs_passed"))
    share = passed / inputs if inputs else None
    report(
        "judge_hostile",
        share,
        1.0,
        share,
        0.0,
        cases=max((tier["cases"] for tier in tiers.values()), default=0) + len(tested),
        passed=min((tier["passed"] for tier in tiers.values()), default=0) + len(tested) - len(failures),
        seed=seed,
        tiers=tiers,
        left_out=left_out,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a mix of 6 seconds: under a minute in all")
    parser.add_argument("--seconds", type=float, default=300.0, help="of the mix, over all tiers")
    parser.add_argument("--seed", type=int, default=1, help="of the order of the mix")
    arguments = parser.parse_args()
    asyncio.run(measure(6.0 if arguments.quick else arguments.seconds, arguments.seed))


if __name__ == "__main__":
    main()
