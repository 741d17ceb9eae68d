"""Programs before opaque tests, which run with the program in one process."""

from __future__ import annotations

import asyncio

import pytest

from services.envgateway.calls import RewardOutcome
from services.envgateway.judge.judge import Judge
from services.envgateway.judge.records import AssertTests, CallCase, CallTests, JudgeRequest, JudgeResult
from services.envgateway.queue import local_queue
from services.envgateway.rewards.registry import CodeReward
from services.envgateway.sandbox.bare.statuses import RunStatus
from services.envgateway.sandbox.pool import SandboxPool
from tests.integration.envgateway.conftest import shared_pool

pytestmark = pytest.mark.asyncio(loop_scope="module")
pool = shared_pool

RAISES = "def f(n): raise ValueError('a b')"
POINT = "from dataclasses import dataclass\n@dataclass\nclass P:\n    x: int\ndef f(n): return P(n)"
STACK = "class Stack:\n    def __init__(self): self.held = []\n    def push(self, x): self.held.append(x)\n    def __len__(self): return len(self.held)"
UNITTEST = "import unittest\nclass T(unittest.TestCase):\n    def test_a(self):\n        with self.assertRaises(ValueError): candidate(1)\n    def test_b(self): self.assertRaises(ValueError, candidate, 2)\nunittest.main()"
RIGHT = {
    "expected error": (RAISES, "try:\n    candidate(1)\n    assert False\nexcept ValueError as e:\n    assert 'a' in str(e)"),
    "unittest raises": (RAISES, UNITTEST),
    "any parameter of check": ("def f(n): return 7 * n", "def check(fn): assert fn(3) == 21"),
    "asserts in a helper": ("def f(n): return 7 * n", "def h(a, b): assert candidate(a) == b\nh(3, 21)"),
    "test functions": ("def f(n): return 7 * n", "def test_three():\n    assert candidate(3) == 21"),
    "run as a script": ("def f(n): return 7 * n", "if __name__ == '__main__':\n    assert candidate(3) == 21"),
    "main of its own": ("def f(n): return 7 * n", "def main(): assert candidate(3) == 21\nif __name__ == '__main__':\n    main()"),
    "main of unittest by a name": ("def f(n): return 7 * n", "from unittest import TestCase, main as run\nclass T(TestCase):\n    def test_a(self): self.assertGreater(candidate(3), 20)\nrun(verbosity=2)"),
    "deep through functions in C": ("import functools\n@functools.cache\ndef g(n): return n and 1 + g(n - 1)\ndef f(n): return g(n)", "assert candidate(50000) > 49999"),
    "raise": ("def f(n): return 7 * n", "if candidate(3) != 21: raise Exception('wrong')"),
    "a library without import": ("def f(n): return n / 7", "assert math.isclose(candidate(1), 0.142857142857, rel_tol=1e-9)"),
    "awaited": ("async def f(n): return 7 * n", "import asyncio\nasync def main():\n    assert await asyncio.gather(candidate(1), candidate(2)) == [7, 14]\nasyncio.run(main())\nassert asyncio.run(candidate(3)) == 21"),
    "threads": ("def f(n): return 7 * n", "from concurrent.futures import ThreadPoolExecutor\nwith ThreadPoolExecutor(4) as pool:\n    got = list(pool.map(candidate, range(30)))\nassert got == [7 * n for n in range(30)]"),
    "annotations that are not evaluated": ("def f(n): return 7 * n", "from __future__ import annotations\ndef h(a: Nowhere) -> Else: return candidate(a)\nassert h(3) == 21"),
    "changed in place": ("def f(x): x.sort()", "a = [3, 1]\ncandidate(a)\nassert a == [1, 3]"),
}  # fmt: skip
LISTED = [
    ("def f(g, x): return g(x)\ndef h(x): return x + 1", "assert f(h, 2) == 3", ("f", "h")),
    ("import enum\nLIMIT = 7\nclass Color(enum.Enum):\n    RED = 1\ndef f(n): return Color(n)", "assert f(1) == Color.RED and f(1).value == 1 and LIMIT == 7", ("f", "Color", "LIMIT")),
]  # fmt: skip


async def verdicts(judge: Judge, program: str = "") -> dict[str, JudgeResult]:
    """Of the right programs, or of one for all."""
    requests = [
        JudgeRequest(code=program or code, tests=AssertTests(tests=tests, entry_point="f"))
        for code, tests in RIGHT.values()
    ]
    return dict(zip(RIGHT, await asyncio.gather(*map(judge.judge, requests)), strict=True))


async def test_right_programs_pass_tests_that_run_as_code(judge: Judge) -> None:
    told = await verdicts(judge)
    assert {name: result for name, result in told.items() if result.verdict is not RunStatus.OK} == {}


async def test_wrong_programs_fail_the_same_tests(judge: Judge) -> None:
    wrong = (RunStatus.WRONG_ANSWER, RunStatus.RUNTIME_ERROR)
    told = await verdicts(judge, "def f(n): return 'other'")
    assert {name: result for name, result in told.items() if result.verdict not in wrong} == {}


@pytest.mark.parametrize("body", ["return 7 * n", "raise KeyError", "\n    import os\n    os._exit(0)"])
async def test_the_reward_of_an_opaque_row_is_marked(judge: Judge, pool: SandboxPool, body: str) -> None:
    task = {"tests": {"kind": "assert", "tests": "assert candidate(3) > 20", "entry_point": "f"}}
    result = await CodeReward(local_queue(pool, judge))(task, f"def f(n): {body}")
    assert result.opaque and (result.outcome is RewardOutcome.CORRECT) == ("return" in body)
    read = {"tests": {"kind": "assert", "tests": "assert candidate(3) == 21", "entry_point": "f"}}
    assert not (await CodeReward(local_queue(pool, judge))(read, f"def f(n): {body}")).opaque


async def test_tests_do_not_change_the_names_that_the_program_uses(judge: Judge) -> None:
    code = "n = 7\ndef helper(x): return n * x\ndef f(x): return helper(x)"
    tests = AssertTests(
        tests="n = 0\ndef helper(x): return 21\nassert candidate(3) > 20 and helper(3) == 21", entry_point="f"
    )
    assert (await judge.judge(JudgeRequest(code=code, tests=tests))).verdict is RunStatus.OK


async def test_names_that_a_row_lists_are_the_programs(judge: Judge) -> None:
    tests = AssertTests(
        tests="assert candidate(3) == P(3)\nassert candidate(3) != P(4) and isinstance(candidate(3), P)",
        entry_point="f",
        names=("P",),
    )
    assert (await judge.judge(JudgeRequest(code=POINT, tests=tests))).verdict is RunStatus.OK
    for code, test, names in LISTED:
        tests = AssertTests(tests=test, entry_point=names[0], names=names)
        result = await judge.judge(JudgeRequest(code=code, tests=tests))
        assert result.verdict is RunStatus.OK, (test, result)
    stack = AssertTests(tests="s = Stack()\ns.push(3)\nassert len(s) == 1 and s.held == [3]")
    assert (await judge.judge(JudgeRequest(code=STACK, tests=stack))).verdict is RunStatus.OK


@pytest.mark.parametrize("tests", ["assert candidate(3 == 21", "assert nowhere(candidate(3))", "x = candidate(3)"])
async def test_tests_that_cannot_judge_are_no_reward(judge: Judge, pool: SandboxPool, tests: str) -> None:
    task = {"tests": {"kind": "assert", "tests": tests, "entry_point": "f"}}
    result = await CodeReward(local_queue(pool, judge))(task, "def f(n): return 21")
    assert result.outcome is RewardOutcome.GRADER_FAILED


async def test_a_returned_value_never_drops_its_sample(judge: Judge) -> None:
    """A failure of the tests is the program's fault: otherwise a program could avoid a 0."""
    tests = AssertTests(tests="for n in [1]:\n    assert sum(candidate(n)) / len(candidate(n)) == 2", entry_point="f")
    for value in (
        "None",
        "[]",
        "'x'",
        "{1: object()}",
        "[[]]",
        "float",
        "iter(())",
        "10**5000",
        "[1] * 10**6",
        "(yield)",
    ):
        result = await judge.judge(JudgeRequest(code=f"def f(n): return {value}", tests=tests))
        assert result.verdict.is_about_the_program and result.verdict is not RunStatus.OK, (value, result)


@pytest.mark.parametrize(("entry_point", "code"), [
    ("f", "class Solution:\n    def f(self, n: int) -> List[int]: return [n]"),
    ("Solution().f", "def f(n): return [n]"),
])  # fmt: skip
async def test_a_function_and_a_method_of_solution_stand_for_each_other_in_calls(
    judge: Judge, entry_point: str, code: str
) -> None:
    tests = CallTests(entry_point=entry_point, cases=(CallCase(args=(3,), expected=[3]),))
    assert (await judge.judge(JudgeRequest(code=code, tests=tests))).verdict is RunStatus.OK
    wrong = code.replace("[n]", "[n, n]")
    assert (await judge.judge(JudgeRequest(code=wrong, tests=tests))).verdict is RunStatus.WRONG_ANSWER


async def test_keys_of_a_dict_compare_as_json_wrote_them(judge: Judge) -> None:
    tests = CallTests(entry_point="f", cases=(CallCase(args=(3,), expected={"1": [2], "true": None}),))
    for value, verdict in (("{1: [2], True: None}", RunStatus.WRONG_ANSWER), ("{'1': [2], True: None}", RunStatus.OK),
                           ("{1: [2], 'true': None}", RunStatus.OK), ("{2: [2], 'true': None}", RunStatus.WRONG_ANSWER)):  # fmt: skip
        result = await judge.judge(JudgeRequest(code=f"def f(n): return {value}", tests=tests))
        assert result.verdict is verdict, value
