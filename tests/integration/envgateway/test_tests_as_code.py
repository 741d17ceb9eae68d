"""Programs before opaque tests, which run with the program in one process."""

from __future__ import annotations

import asyncio

import pytest

from services.envgateway.calls import RewardOutcome
from services.envgateway.judge.judge import Judge
from services.envgateway.judge.records import AssertTests, CallCase, CallTests, JudgeRequest, JudgeResult
from services.envgateway.rewards.registry import CodeReward
from services.envgateway.sandbox.bare.statuses import RunStatus
from tests.integration.envgateway.conftest import shared_pool

pytestmark = pytest.mark.asyncio(loop_scope="module")
pool = shared_pool

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
    "expected error after another": (RAISES, "import contextlib\ndef g(n):\n    with contextlib.nullcontext():\n        try: return candidate(n)\n        except ValueError: raise\ntry:\n    g(1)\n    assert False\nexcept ValueError: pass\nwith contextlib.suppress(ValueError), contextlib.nullcontext():\n    with contextlib.suppress(KeyError): g(2)"),
    "another error for it": (RAISES, "def g(n):\n    try: return candidate(n)\n    except ValueError as e: raise KeyError(n) from e\ntry:\n    g(1)\n    assert False\nexcept KeyError: pass"),
    "the expected end": ("def f(n): return iter([n])", "it = candidate(3)\nassert next(it) == 3 and next(it, 7) == 7\ntry:\n    next(it)\n    assert False\nexcept StopIteration: pass\nclass Two:\n    def __init__(self): self.it = candidate(3)\n    def __iter__(self): return self\n    def __next__(self): return next(self.it)\nassert list(Two()) == [3]"),
    "the expected end of a generator": ("def f(n): return iter([n])", "def g():\n    it = candidate(3)\n    while True:\n        try: yield next(it)\n        except StopIteration: return\nassert list(g()) == [3]"),
    "run as a script": ("def f(n): return 7 * n", "if __name__ == '__main__':\n    assert candidate(3) == 21"),
    "main of its own": ("def f(n): return 7 * n", "def main(): assert candidate(3) == 21\nif __name__ == '__main__':\n    main()"),
    "main of unittest by a name": ("def f(n): return 7 * n", "from unittest import TestCase, main as run\nclass T(TestCase):\n    def test_a(self): self.assertGreater(candidate(3), 20)\nrun(verbosity=2)"),
    "deep through functions in C": ("import functools\n@functools.cache\ndef g(n): return n and 1 + g(n - 1)\ndef f(n): return g(n)", "assert candidate(50000) > 49999"),
    "raise": ("def f(n): return 7 * n", "if candidate(3) != 21: raise Exception('wrong')"),
    "a library without import": ("def f(n): return n / 7", "assert math.isclose(candidate(1), 0.142857142857, rel_tol=1e-9)"),
    "range": ("def f(n): return range(n)", "assert candidate(3) == range(3) and list(candidate(3)) == [0, 1, 2]"),
    "array": ("import numpy as np\ndef f(n): return np.arange(n)", "assert (candidate(3) == [0, 1, 2]).all() and candidate(3).shape == (3,)"),
    "array, allclose": ("import numpy as np\ndef f(n): return np.arange(n) / 2", "import numpy as np\nassert np.allclose(candidate(3), [0, .5, 1])"),
    "array, empty": ("import numpy as np\ndef f(n): return np.empty((0, n))", "import numpy as np\nr = candidate(3)\nassert r.shape == (0, 3) and (r == np.empty((0, 3))).all() and np.allclose(r, r) and np.isclose(a=1.0, b=1.0) and np.array_equal(r, np.empty((0, 3)))"),
    "array, empty argument": ("import numpy as np\ndef f(x): return x if (x == 5).all() and (x == 5).shape == (0,) else None", "import numpy as np\nr = candidate(np.array([]))\nassert type(r).__name__ == 'ndarray' and r.size == 0 and candidate(r).size == 0"),
    "its own container": ("class L:\n    def __init__(self, n): self.n = n\n    def __len__(self): return self.n\n    def __iter__(self): return iter(range(self.n))\ndef f(n): return L(n)", "r = candidate(3)\nassert r and len(r) == 3 and list(r) == [0, 1, 2] and not candidate(0) and sorted(r) == [0, 1, 2]"),
    "deque": ("from collections import deque\ndef f(n): return deque(range(n))", "from collections import deque\nassert candidate(2) == deque([0, 1])"),
    "generator": ("def f(n):\n    for i in range(n): yield i", "assert list(candidate(3)) == [0, 1, 2]"),
    "endless generator": ("import itertools\ndef f(n): return itertools.count(n)", "from itertools import islice\nassert list(islice(candidate(3), 2)) == [3, 4]"),
    "old sequence": ("class S:\n    def __getitem__(self, i):\n        if i > 2: raise IndexError\n        return i\ndef f(n): return S()", "assert [x for x in candidate(3)] == [0, 1, 2]"),
    "views": ("def f(n): return {1: 2}.keys()", "assert set(candidate(3)) == {1} and 1 in candidate(3)"),
    "attributes": (POINT, "r = candidate(3)\nassert r.x == 3 and not hasattr(r, 'y')"),
    "named tuple": ("from collections import namedtuple\nP = namedtuple('P', 'x y')\ndef f(n): return P(n, 1)", "r = candidate(3)\nassert r.x == 3 and r == (3, 1)"),
    "numbers": ("from fractions import Fraction\nfrom decimal import Decimal\ndef f(n): return [Fraction(1, n), Decimal('0.5')]", "for n in [2]:\n    assert candidate(n) == [0.5, 0.5]"),
    "callable": ("def f(n): return lambda: n", "assert callable(candidate(3)) and candidate(3)() == 3"),
    "iterator": ("def f(n): return (i for i in [n])", "from collections.abc import Iterator\nassert isinstance(candidate(3), Iterator)"),
    "awaited": ("async def f(n): return 7 * n", "import asyncio\nasync def main():\n    assert await asyncio.gather(candidate(1), candidate(2)) == [7, 14]\nasyncio.run(main())\nassert asyncio.run(candidate(3)) == 21"),
    "arguments of an error": ("def f(n): raise OSError(2, 'x')", "try:\n    candidate(1)\n    assert False\nexcept FileNotFoundError as e:\n    assert e.errno == 2"),
    "text of an error": ("class E(ValueError):\n    def __str__(self): return 'mine'\ndef f(n): raise E(1, 2)", "try:\n    candidate(1)\n    assert False\nexcept ValueError as e:\n    assert str(e) == 'mine'"),
    "threads": ("def f(n): return 7 * n", "from concurrent.futures import ThreadPoolExecutor\nwith ThreadPoolExecutor(4) as pool:\n    got = list(pool.map(candidate, range(30)))\nassert got == [7 * n for n in range(30)]"),
    "annotations that are not evaluated": ("def f(n): return 7 * n", "from __future__ import annotations\ndef h(a: Nowhere) -> Else: return candidate(a)\nassert h(3) == 21"),
    "functions in a list": ("def f(n): return [lambda: 1, lambda: 2]", "assert [g() for g in candidate(1)] == [1, 2]"),
    "changed in place": ("def f(x): x.sort()", "a = [3, 1]\ncandidate(a)\nassert a == [1, 3]"),
    "changed in place by a helper": ("def f(x): x.sort()", "def g(h, x):\n    h(x)\n    return x\nassert g(candidate, [3, 1]) == [1, 3]"),
    "changed in place, and None": ("def f(x): x.sort()", "a = [3, 1]\nb = candidate(a)\nassert b is None and a == [1, 3]"),
    "changed in place, or returned": ("def f(x): x.sort()", "a = [3, 1]\nb = candidate(a) or a\nassert b == [1, 3]"),
    "None, and its argument is nobody's": ("def f(x): x.sort(); return None if x else 0", "a = [3, 1]\nb = candidate(a)\nassert b == None"),
    "changed inside": ("def f(x): x[0].append(2)", "inner = [1]\ncandidate([inner])\nassert inner == [1, 2]"),
    "its argument is left alone": ("def f(x): return sorted(x)", "a = [3, 1]\nb = candidate(a)\nassert b == [1, 3] and a == [3, 1]"),
    "its argument is nobody's": ("def f(x): x.sort(); return x", "a = [3, 1]\nb = candidate(a)\nassert b == [1, 3]"),
}  # fmt: skip
LISTED = [
    ("class V:\n    def __init__(self, x): self.x = x\n    def __add__(self, o): return V(self.x + o.x)\n    def __lt__(self, o): return self.x < o.x\n    def __repr__(self): return f'V({self.x})'",
     "assert (V(1) + V(2)).x == 3 and repr(V(4)) == 'V(4)'\nassert [v.x for v in sorted([V(3), V(1)])] == [1, 3]\nassert V(1) != V(2)", ("V",)),
    ("class V:\n    def __init__(self, x): self.x = x\n    def __mul__(self, n): return V(self.x * n)\n    def __add__(self, o): return V(self.x + o.x)\n    def __float__(self): return float(self.x)",
     "assert (V(2) * 3).x == 6 and (V(2) * 3 * 2 + V(1)).x == 13 and float(V(2)) == 2.0", ("V",)),
    ("class C:\n    def __enter__(self): return 5\n    def __exit__(self, *a): return True", "with C() as c:\n    assert c == 5", ("C",)),
    ("class M:\n    def __init__(self): self.d = {}\n    def __getitem__(self, k): return self.d[k]\n    def __setitem__(self, k, v): self.d[k] = v\n    def __len__(self): return len(self.d)\n    def __iter__(self): return iter(self.d)",
     "m = M()\nassert not m\nm['a'] = 1\nassert m['a'] == 1 and len(m) == 1 and list(m) == ['a'] and 'a' in m and m", ("M",)),
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
async def test_the_reward_of_an_opaque_row_is_marked(judge: Judge, body: str) -> None:
    task = {"tests": {"kind": "assert", "tests": "assert candidate(3) > 20", "entry_point": "f"}}
    result = await CodeReward(_AtOnce(judge))(task, f"def f(n): {body}")  # type: ignore[arg-type]
    assert result.opaque and (result.outcome is RewardOutcome.CORRECT) == ("return" in body)
    read = {"tests": {"kind": "assert", "tests": "assert candidate(3) == 21", "entry_point": "f"}}
    assert not (await CodeReward(_AtOnce(judge))(read, f"def f(n): {body}")).opaque  # type: ignore[arg-type]


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


class _AtOnce:
    """A queue that judges at once."""

    num_slots = 1

    def __init__(self, judge: Judge) -> None:
        self._judge = judge

    async def run(self, job: JudgeRequest, **_: object) -> JudgeResult:
        return await self._judge.judge(job)


@pytest.mark.parametrize("tests", ["assert candidate(3 == 21", "assert nowhere(candidate(3))", "x = candidate(3)"])
async def test_tests_that_cannot_judge_are_no_reward(judge: Judge, tests: str) -> None:
    task = {"tests": {"kind": "assert", "tests": tests, "entry_point": "f"}}
    result = await CodeReward(_AtOnce(judge))(task, "def f(n): return 21")  # type: ignore[arg-type]
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
