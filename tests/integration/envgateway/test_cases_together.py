"""The cases of one program in one run: the number of runs, and each case is judged as in a run of its own."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

import pytest

from services.envgateway.judge.judge import MOST_CASES, Judge
from services.envgateway.judge.records import (
    AssertTests,
    CallCase,
    CallTests,
    JudgeRequest,
    JudgeResult,
    StdinCase,
    StdinTests,
)
from services.envgateway.sandbox.bare.statuses import RunStatus
from services.envgateway.sandbox.lease import RunMessage
from services.envgateway.sandbox.pool import SandboxPool
from services.envgateway.sandbox.records import ExecutionLimits
from tests.integration.envgateway.conftest import SLEEP_LONG, long_programs
from tests.integration.envgateway.sandbox_state import assert_clean, kill_supervisor, until_programs_run
from tests.waiting import until

V = RunStatus
_SUM = "print(sum(map(int, input().split())))"
_APART = "import os\n" + _SUM  # it could do anything: a process for each case


def sums(num_cases: int) -> StdinTests:
    return StdinTests(cases=tuple(StdinCase(stdin=f"{n} {n}", expected=str(2 * n)) for n in range(num_cases)))


async def counts(pool: SandboxPool) -> dict[str, int]:
    """How many runs ended how, when the last has been counted."""
    await asyncio.sleep(0)
    return dict(pool.counts)


def verdicts(result: JudgeResult) -> list[RunStatus]:
    return [case.verdict for case in result.cases]


@pytest.mark.parametrize("code", [_SUM, _APART], ids=["stateless", "apart"])
async def test_all_cases_of_a_program_are_one_run(pool: SandboxPool, code: str) -> None:
    result = await Judge(pool).judge(JudgeRequest(code=code, tests=sums(10)))
    assert verdicts(result) == [V.OK] * 10
    assert [case.stdout for case in result.cases] == [f"{2 * n}\n" for n in range(10)]
    assert await counts(pool) == {"OK": 1}


@pytest.mark.slow
@pytest.mark.parametrize("code", [_SUM, _APART], ids=["stateless", "apart"])
async def test_more_cases_than_one_host_takes_are_judged_in_order(pool: SandboxPool, code: str) -> None:
    num_cases = MOST_CASES + 3 if code is _APART else 2 * MOST_CASES + 3
    result = await Judge(pool).judge(JudgeRequest(code=code, tests=sums(num_cases)))
    assert verdicts(result) == [V.OK] * num_cases
    assert [case.index for case in result.cases] == list(range(num_cases))


async def test_a_case_that_leaves_a_file_is_run_by_itself_and_so_are_those_behind_it(pool: SandboxPool) -> None:
    code = "import os\nassert os.listdir() == []\na, b = input().split()\nif a == '1': open('x', 'w')\nprint(int(a) + int(b))"
    result = await Judge(pool).judge(JudgeRequest(code=code, tests=sums(4)))
    assert verdicts(result) == [V.OK] * 4
    assert await counts(pool) == {"OK": 4}  # one host for the first, then three runs
    await assert_clean(pool)


@pytest.mark.parametrize("imported", ["math", "os"], ids=["stateless", "apart"])
async def test_a_failure_in_the_middle_is_reported_as_in_a_run_of_its_own(pool: SandboxPool, imported: str) -> None:
    code = f"import {imported}\na, b = map(int, input().split())\nprint(a, end=' ')\nif a == 2: raise KeyError(a)\nprint(a + b)"
    tests = StdinTests(cases=tuple(StdinCase(stdin=f"{n} {n}", expected=f"{n} {2 * n}") for n in range(5)))
    together = await Judge(pool).judge(JudgeRequest(code=code, tests=tests))
    alone = await Judge(pool).judge(JudgeRequest(code=code, tests=StdinTests(cases=tests.cases[2:3])))
    assert verdicts(together) == [V.OK, V.OK, V.RUNTIME_ERROR, V.OK, V.OK]
    for name in ("verdict", "detail", "stdout", "stderr", "exit_code", "signal", "truncated"):
        assert getattr(together.cases[2], name) == getattr(alone.cases[0], name)


async def test_warnings_of_the_compiler_are_said_by_each_case(pool: SandboxPool) -> None:
    code = "import os\nx = input()\nprint(x is '1')"
    tests = StdinTests(cases=tuple(StdinCase(stdin=f"{n}", expected="False") for n in range(2)))
    together = await Judge(pool).judge(JudgeRequest(code=code, tests=tests))
    alone = await Judge(pool).judge(JudgeRequest(code=code, tests=StdinTests(cases=tests.cases[:1])))
    assert "SyntaxWarning" in alone.cases[0].stderr
    assert {case.stderr for case in together.cases} == {alone.cases[0].stderr}


@pytest.mark.parametrize(
    "code", ["def f(", "def f(x):\n    return '\\ud800' is 1\nreturn", "x = " + "(" * 300], ids=str
)
async def test_a_source_that_is_no_program_is_said_of_every_case(pool: SandboxPool, code: str) -> None:
    tests = CallTests(entry_point="f", cases=tuple(CallCase(args=(n,), expected=n) for n in range(3)))
    result = await Judge(pool).judge(JudgeRequest(code=code, tests=tests))
    assert verdicts(result) == [V.COMPILE_ERROR] * 3


@pytest.mark.slow
@pytest.mark.parametrize("imported", ["math", "os"], ids=["stateless", "apart"])
async def test_the_stack_is_as_deep_in_every_way_of_running(pool: SandboxPool, imported: str) -> None:
    code = f"import {imported}, sys\nsys.setrecursionlimit(1000)\ndef deep(n): return deep(n + 1) if n < N else n\nprint(deep(0) and input())"
    tests = StdinTests(cases=tuple(StdinCase(stdin="1", expected="1") for _ in range(2)))

    async def judged(depth: int, num_cases: int) -> RunStatus:
        source = code.replace("N", str(depth))
        return (
            await Judge(pool).judge(JudgeRequest(code=source, tests=StdinTests(cases=tests.cases[:num_cases])))
        ).verdict

    least, most = 900, 1000  # the first passes alone, the second does not
    while most - least > 1:
        middle = (least + most) // 2
        least, most = (middle, most) if await judged(middle, 1) is V.OK else (least, middle)
    assert await judged(least, 2) is V.OK
    assert await judged(most, 2) is V.RUNTIME_ERROR


@pytest.mark.parametrize("imported", ["math", "os"], ids=["stateless", "apart"])
async def test_answers_of_all_cases_together_wait_within_a_bound(
    pool: SandboxPool, imported: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    received: Counter[int] = Counter()  # by run
    put = asyncio.Queue.put_nowait

    def count(queue: asyncio.Queue[Any], message: Any) -> None:
        received[id(queue)] += len(message.data) if isinstance(message, RunMessage) else 0
        put(queue, message)

    monkeypatch.setattr(asyncio.Queue, "put_nowait", count)
    code = f"import {imported}\ndef f(n): return 'x' * 1_200_000"
    tests = CallTests(entry_point="f", cases=(CallCase(args=(1,), expected="x" * 1_200_000),) * 40)
    assert verdicts(await Judge(pool).judge(JudgeRequest(code=code, tests=tests))) == [V.OK] * 40
    assert 1_200_000 < max(received.values()) <= 32 << 20


@pytest.mark.slow
async def test_fast_input_sees_a_file_in_every_case(pool: SandboxPool) -> None:
    code = "import io, os\nread = io.BytesIO(os.read(0, os.fstat(0).st_size)).readline\nprint(sum(map(int, read().split())))"
    assert verdicts(await Judge(pool).judge(JudgeRequest(code=code, tests=sums(3)))) == [V.OK] * 3


@pytest.mark.slow
async def test_a_program_without_input_has_an_empty_one_in_every_case(pool: SandboxPool) -> None:
    tests = StdinTests(cases=(StdinCase(expected="''"), StdinCase(stdin="a", expected="'a'"), StdinCase(expected="''")))
    for imported in ("math", "os"):
        code = f"import sys, {imported}\nprint(repr(sys.stdin.read()))"
        assert verdicts(await Judge(pool).judge(JudgeRequest(code=code, tests=tests))) == [V.OK] * 3


@pytest.mark.slow
@long_programs
async def test_a_cancelled_judgement_ends_its_host(pool: SandboxPool) -> None:
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


async def test_asserts_that_call_several_functions_are_judged_by_one_host(pool: SandboxPool) -> None:
    code = "import os\ndef f(n): return n + 1\ndef g(n): return n * 2"
    tests = AssertTests(tests="assert f(1) == 2\nassert g(4) == 8\nassert f(2) == 4\n", entry_point="f", names=("g",))
    result = await Judge(pool).judge(JudgeRequest(code=code, tests=tests))
    assert verdicts(result) == [V.OK, V.OK, V.WRONG_ANSWER] and await counts(pool) == {"OK": 1}


@pytest.mark.slow
async def test_a_limit_is_each_cases_own(pool: SandboxPool) -> None:
    code = "import time\nn = int(input().split()[0])\ntime.sleep(.9)\nprint(2 * n)"
    result = await Judge(pool).judge(JudgeRequest(code=code, tests=sums(3), limits=ExecutionLimits(wall_s=2.5)))
    assert verdicts(result) == [V.OK] * 3 and await counts(pool) == {"OK": 1}


_SEEN_AGAIN = {
    "by the text's encoding": "# coding: utf-7\n#+AAoAJwAnACc-\nimport builtins\nprint(int(hasattr(builtins, 'n')))\n"
    "builtins.n = 1\n#+AAoAJwAnACc-\n",
    "by a format": "import re\nfrom collections import namedtuple\n"
    "seen = '{0.__globals__[_sys].modules[re]._cache}'.format(namedtuple)\nre.compile('kept')\nprint(seen.count('kept'))",
    "by a class": "from typing import Iterable\ndef register(): pass\nprint(int(isinstance(3, Iterable)))\n"
    "Iterable.register(int)",
    "by a default of the library": "from copy import deepcopy\nclass Memo:\n    def get(self, key, nothing):\n"
    "        print(len(nothing))\n        nothing.append(1)\n        return 1\ndeepcopy([1], Memo())",
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


@pytest.mark.parametrize(
    "kept",
    [
        "names = attrgetter('__globals__')(namedtuple)['__builtins__']\n        n = names.get('kept', 0)\n        names['kept'] = 1",
        "n = len(get_overloads(g))\n        overload(g)",
    ],
    ids=["attrgetter", "overload"],
)
async def test_names_of_a_prelude_keep_no_state(pool: SandboxPool, kept: str) -> None:
    code = f"class Solution:\n    def f(self, n):\n        {kept}\n        return n\ndef g(): pass"
    tests = CallTests(entry_point="Solution().f", cases=tuple(CallCase(args=(n,), expected=0) for n in range(3)))
    assert verdicts(await Judge(pool).judge(JudgeRequest(code=code, tests=tests))) == [V.OK] * 3


async def test_each_case_hears_the_warnings_of_its_patterns(pool: SandboxPool) -> None:
    tests = StdinTests(cases=(StdinCase(expected="0"),) * 2)
    result = await Judge(pool).judge(JudgeRequest(code="import re\nre.compile('[[a]')\nprint(0)", tests=tests))
    assert all("FutureWarning" in case.stderr for case in result.cases)
