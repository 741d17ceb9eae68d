"""Right programs before tests that run as code: what crosses between the processes is judged as in one interpreter."""

from __future__ import annotations

import asyncio

import pytest

from services.envgateway.judge.judge import Judge
from services.envgateway.judge.records import AssertTests, CallCase, CallTests, JudgeRequest, Verdict
from services.envgateway.rewards.code import CodeReward
from services.envgateway.rewards.result import RewardOutcome
from services.envgateway.sandbox.pool import SandboxPool

from .cases import exchange

RAISES = "def f(n): raise ValueError('a b')"
POINT = "from dataclasses import dataclass\n@dataclass\nclass P:\n    x: int\ndef f(n): return P(n)"
STACK = "class Stack:\n    def __init__(self): self.held = []\n    def push(self, x): self.held.append(x)\n    def __len__(self): return len(self.held)"
UNITTEST = "import unittest\nclass T(unittest.TestCase):\n    def test_a(self):\n        with self.assertRaises(ValueError): candidate(1)\n    def test_b(self): self.assertRaises(ValueError, candidate, 2)\nunittest.main()"
RIGHT = {
    "expected error": (RAISES, "try:\n    candidate(1)\n    assert False\nexcept ValueError as e:\n    assert 'a' in str(e)"),
    "expected error, any": (RAISES, "import contextlib\nraised = []\ndef fails(g, *a):\n    try: g(*a)\n    except Exception: return True\n    return False\nassert fails(candidate, 1)"),
    "suppressed error": (RAISES, "import contextlib\nwith contextlib.suppress(ValueError):\n    candidate(1)\n    assert False"),
    "unittest raises": (RAISES, UNITTEST),
    "any parameter of check": ("def f(n): return 7 * n", "def check(fn): assert fn(3) == 21"),
    "asserts in a helper": ("def f(n): return 7 * n", "def h(a, b): assert candidate(a) == b\nh(3, 21)"),
    "test functions": ("def f(n): return 7 * n", "def test_three():\n    assert candidate(3) == 21"),
    "run as a script": ("def f(n): return 7 * n", "if __name__ == '__main__':\n    assert candidate(3) == 21"),
    "raise": ("def f(n): return 7 * n", "if candidate(3) != 21: raise Exception('wrong')"),
    "a library without import": ("def f(n): return n / 7", "assert math.isclose(candidate(1), 0.142857142857, rel_tol=1e-9)"),
    "range": ("def f(n): return range(n)", "assert candidate(3) == range(3) and list(candidate(3)) == [0, 1, 2]"),
    "array": ("import numpy as np\ndef f(n): return np.arange(n)", "assert (candidate(3) == [0, 1, 2]).all() and candidate(3).shape == (3,)"),
    "array, allclose": ("import numpy as np\ndef f(n): return np.arange(n) / 2", "import numpy as np\nassert np.allclose(candidate(3), [0, .5, 1])"),
    "deque": ("from collections import deque\ndef f(n): return deque(range(n))", "from collections import deque\nassert candidate(2) == deque([0, 1])"),
    "generator": ("def f(n):\n    for i in range(n): yield i", "assert list(candidate(3)) == [0, 1, 2]"),
    "endless generator": ("import itertools\ndef f(n): return itertools.count(n)", "from itertools import islice\nassert list(islice(candidate(3), 2)) == [3, 4]"),
    "old sequence": ("class S:\n    def __getitem__(self, i):\n        if i > 2: raise IndexError\n        return i\ndef f(n): return S()", "assert [x for x in candidate(3)] == [0, 1, 2]"),
    "views": ("def f(n): return {1: 2}.keys()", "assert set(candidate(3)) == {1} and 1 in candidate(3)"),
    "attributes": (POINT, "r = candidate(3)\nassert r.x == 3 and not hasattr(r, 'y')"),
    "named tuple": ("from collections import namedtuple\nP = namedtuple('P', 'x y')\ndef f(n): return P(n, 1)", "r = candidate(3)\nassert r.x == 3 and r == (3, 1)"),
    "numbers": ("from fractions import Fraction\nfrom decimal import Decimal\ndef f(n): return [Fraction(1, n), Decimal('0.5')]", "for n in [2]:\n    assert candidate(n) == [0.5, 0.5]"),
    "changed in place": ("def f(x): x.sort()", "a = [3, 1]\ncandidate(a)\nassert a == [1, 3]"),
    "changed inside": ("def f(x): x[0].append(2)", "inner = [1]\ncandidate([inner])\nassert inner == [1, 2]"),
    "its argument is left alone": ("def f(x): return sorted(x)", "a = [3, 1]\nb = candidate(a)\nassert b == [1, 3] and a == [3, 1]"),
    "its argument is nobody's": ("def f(x): x.sort(); return x", "a = [3, 1]\nb = candidate(a)\nassert b == [1, 3]"),
}  # fmt: skip


@pytest.fixture
def judge(pool: SandboxPool) -> Judge:
    return Judge(pool)


async def test_right_programs_pass_tests_that_run_as_code(judge: Judge) -> None:
    wrong = []
    for name, (code, tests) in RIGHT.items():
        result = await judge.judge(JudgeRequest(code=code, tests=AssertTests(tests=tests, entry_point="f")))
        if result.verdict is not Verdict.OK:
            wrong.append((name, result.verdict.value, result.detail))
    assert wrong == []


async def test_wrong_programs_fail_the_same_tests(judge: Judge) -> None:
    passed = []
    for name, (_, tests) in RIGHT.items():
        result = await judge.judge(JudgeRequest(code="def f(n): return 'other'", tests=AssertTests(tests=tests, entry_point="f")))  # fmt: skip
        if result.verdict not in (Verdict.WRONG_ANSWER, Verdict.RUNTIME_ERROR):
            passed.append((name, result.verdict.value))
    assert passed == []


async def test_no_trick_of_the_exchange_makes_a_wrong_program_right(judge: Judge) -> None:
    results = await asyncio.gather(*(judge.judge(case.request) for case in exchange.CASES))
    told = [case.wrong(result) for case, result in zip(exchange.CASES, results, strict=True)]
    assert [line for line in told if line] == []


async def test_what_a_row_lists_is_the_programs(judge: Judge) -> None:
    tests = AssertTests(
        tests="assert candidate(3) == P(3)\nassert candidate(3) != P(4) and isinstance(candidate(3), P)",
        entry_point="f",
        names=("P",),
    )
    assert (await judge.judge(JudgeRequest(code=POINT, tests=tests))).verdict is Verdict.OK
    stack = AssertTests(tests="s = Stack()\ns.push(3)\nassert len(s) == 1 and s.held == [3]")
    assert (await judge.judge(JudgeRequest(code=STACK, tests=stack))).verdict is Verdict.OK


@pytest.mark.parametrize(
    "tests", ["assert candidate(3 == 21", "assert nowhere(candidate(3))", "assert 1 / 0 == candidate(3)"]
)
async def test_tests_that_cannot_judge_are_no_reward(judge: Judge, tests: str) -> None:
    class Queue:
        async def run(self, job: JudgeRequest, **_: object) -> object:
            return await judge.judge(job)

    task = {"tests": {"kind": "assert", "tests": tests, "entry_point": "f"}}
    result = await CodeReward(Queue())(task, "def f(n): return 21")  # type: ignore[arg-type]
    assert result.outcome is RewardOutcome.GRADER_FAILED


async def test_what_a_program_returns_never_makes_its_sample_drop_out(judge: Judge) -> None:
    """Whatever fails after the first call is the program's: else it could get rid of a 0."""
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
        assert result.verdict.is_about_the_program and result.verdict is not Verdict.OK, (value, result)


@pytest.mark.parametrize(("entry_point", "code"), [
    ("f", "class Solution:\n    def f(self, n: int) -> List[int]: return [n]"),
    ("Solution().f", "def f(n): return [n]"),
])  # fmt: skip
async def test_a_function_and_a_method_of_solution_stand_for_each_other_in_calls(
    judge: Judge, entry_point: str, code: str
) -> None:
    tests = CallTests(entry_point=entry_point, cases=(CallCase(args=(3,), expected=[3]),))
    assert (await judge.judge(JudgeRequest(code=code, tests=tests))).verdict is Verdict.OK
    wrong = code.replace("[n]", "[n, n]")
    assert (await judge.judge(JudgeRequest(code=wrong, tests=tests))).verdict is Verdict.WRONG_ANSWER


async def test_keys_of_a_dict_compare_as_json_wrote_them(judge: Judge) -> None:
    tests = CallTests(entry_point="f", cases=(CallCase(args=(3,), expected={"1": [2], "true": None}),))
    for value, verdict in (("{1: [2], True: None}", Verdict.WRONG_ANSWER), ("{'1': [2], True: None}", Verdict.OK),
                           ("{1: [2], 'true': None}", Verdict.OK), ("{2: [2], 'true': None}", Verdict.WRONG_ANSWER)):  # fmt: skip
        result = await judge.judge(JudgeRequest(code=f"def f(n): return {value}", tests=tests))
        assert result.verdict is verdict, value
