"""The cases of one program: each is judged in a run of its own."""

from __future__ import annotations

import asyncio

import pytest

from services.envgateway.judge.judge import Judge
from services.envgateway.judge.records import CallCase, CallTests, JudgeRequest, JudgeResult, StdinCase, StdinTests
from services.envgateway.sandbox.bare.statuses import RunStatus
from services.envgateway.sandbox.pool import SandboxPool
from services.envgateway.sandbox.records import ExecutionLimits
from tests.integration.envgateway.conftest import SLEEP_LONG, long_programs
from tests.integration.envgateway.sandbox_state import assert_clean, kill_supervisor, until_programs_run
from tests.waiting import until

V = RunStatus


def verdicts(result: JudgeResult) -> list[RunStatus]:
    return [case.verdict for case in result.cases]


async def test_a_failure_in_the_middle_is_reported_as_alone(pool: SandboxPool) -> None:
    code = "a, b = map(int, input().split())\nprint(a, end=' ')\nif a == 2: raise KeyError(a)\nprint(a + b)"
    tests = StdinTests(cases=tuple(StdinCase(stdin=f"{n} {n}", expected=f"{n} {2 * n}") for n in range(5)))
    together = await Judge(pool).judge(JudgeRequest(code=code, tests=tests))
    alone = await Judge(pool).judge(JudgeRequest(code=code, tests=StdinTests(cases=tests.cases[2:3])))
    assert verdicts(together) == [V.OK, V.OK, V.RUNTIME_ERROR, V.OK, V.OK]
    assert [case.index for case in together.cases] == list(range(5))
    for name in ("verdict", "detail", "stdout", "stderr", "exit_code", "signal", "truncated"):
        assert getattr(together.cases[2], name) == getattr(alone.cases[0], name)


@pytest.mark.parametrize(
    "code", ["def f(", "def f(x):\n    return '\\ud800' is 1\nreturn", "x = " + "(" * 300], ids=str
)
async def test_a_source_that_is_no_program_is_said_of_every_case(pool: SandboxPool, code: str) -> None:
    tests = CallTests(entry_point="f", cases=tuple(CallCase(args=(n,), expected=n) for n in range(3)))
    result = await Judge(pool).judge(JudgeRequest(code=code, tests=tests))
    assert verdicts(result) == [V.COMPILE_ERROR] * 3


@pytest.mark.slow
@long_programs
async def test_a_cancelled_judgement_ends_its_program(pool: SandboxPool) -> None:
    tests = StdinTests(cases=(StdinCase(), StdinCase()))
    running = asyncio.create_task(Judge(pool).judge(JudgeRequest(code=SLEEP_LONG, tests=tests)))
    await until_programs_run(pool)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    await until(lambda: not pool.gauges["sandbox_busy_slots"])
    await assert_clean(pool)


@pytest.mark.slow
async def test_a_dead_supervisor_is_no_verdict_about_the_cases_that_it_ran(pool: SandboxPool) -> None:
    tests = StdinTests(cases=tuple(StdinCase(expected="") for _ in range(2)))
    running = asyncio.create_task(Judge(pool).judge(JudgeRequest(code="import time\ntime.sleep(.6)", tests=tests)))
    await until_programs_run(pool)
    kill_supervisor(pool)
    assert (await running).verdict in (V.OK, V.INFRA_ERROR)


@pytest.mark.slow
async def test_a_limit_is_each_cases_own(pool: SandboxPool) -> None:
    code = "import time\nn = int(input())\ntime.sleep(.9)\nprint(2 * n)"
    tests = StdinTests(cases=tuple(StdinCase(stdin=f"{n}", expected=f"{2 * n}") for n in range(3)))
    result = await Judge(pool).judge(JudgeRequest(code=code, tests=tests, limits=ExecutionLimits(wall_s=2.5)))
    assert verdicts(result) == [V.OK] * 3


_SEEN_AGAIN = {
    "by a format": "import re\nfrom collections import namedtuple\n"
    "seen = '{0.__globals__[_sys].modules[re]._cache}'.format(namedtuple)\nre.compile('kept')\nprint(seen.count('kept'))",
    "by a class": "from typing import Iterable\ndef register(): pass\nprint(int(isinstance(3, Iterable)))\n"
    "Iterable.register(int)",
    "by a type with parameters": "from typing import List\nn = int(input())\nif n == 0: List[7.0]\n"
    "print(int(n > 0 and '7.0' in str(List[7])))",
    "by memory": "a = []\na.append(a)\ntry: a.append(bytes(9 * 10**8))\nexcept Exception: print(1)\nprint(0)",
}


@pytest.mark.parametrize("code", _SEEN_AGAIN.values(), ids=_SEEN_AGAIN.keys())
async def test_a_case_sees_no_trace_of_the_case_before(pool: SandboxPool, code: str) -> None:
    tests = StdinTests(cases=tuple(StdinCase(stdin=f"{n}", expected="0") for n in range(3)))
    assert verdicts(await Judge(pool).judge(JudgeRequest(code=code, tests=tests))) == [V.OK] * 3


async def test_the_number_of_a_file_without_a_name_counts_no_case_before(pool: SandboxPool) -> None:
    """At tier 2 the numbers count the files of the disk; elsewhere they are the machine's."""
    code = (
        "import os, sys\nfor _ in range(5): fd = os.open('.', os.O_TMPFILE | os.O_WRONLY)\n"
        "sys.stderr.write(str(os.fstat(fd).st_ino))\nprint(0)"
    )
    tests = StdinTests(cases=(StdinCase(expected="0"),) * 3)
    result = await Judge(pool).judge(JudgeRequest(code=code, tests=tests))
    assert verdicts(result) == [V.OK] * 3
    assert pool.tier != "2" or len({case.stderr for case in result.cases}) == 1
