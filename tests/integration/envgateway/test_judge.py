"""The judge's own promises: per-case results, early stops, data in and out, tests that have to be run."""

from __future__ import annotations

from dataclasses import replace

import pytest

from services.envgateway.judge.judge import Judge
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
from services.envgateway.sandbox.pool import SandboxPool
from services.envgateway.sandbox.records import ExecutionLimits
from tests.integration.envgateway.conftest import shared_pool
from tests.integration.envgateway.sandbox_state import assert_clean

V = RunStatus
pytestmark = pytest.mark.asyncio(loop_scope="module")
pool = shared_pool
SQUARES = StdinTests(cases=tuple(StdinCase(stdin=f"{n}\n", expected=f"{n * n}\n") for n in range(4)))


def verdicts(result: JudgeResult) -> list[RunStatus]:
    return [case.verdict for case in result.cases]


async def test_every_case_has_its_own_verdict(judge: Judge) -> None:
    code = "n = int(input())\nif n == 1: raise ValueError\nif n == 2:\n    while True: pass\nprint(n * n)"
    result = await judge.judge(JudgeRequest(code=code, tests=SQUARES, limits=ExecutionLimits(cpu_s=0.5)))
    assert verdicts(result) == [V.OK, V.RUNTIME_ERROR, V.TIME_LIMIT, V.OK]
    assert (result.verdict, result.num_passed, result.num_cases) == (V.RUNTIME_ERROR, 2, 4)
    assert result.detail.startswith("case 1")


async def test_an_early_stop_ends_at_the_first_failure(judge: Judge) -> None:
    result = await judge.judge(JudgeRequest(code="print(0)", tests=SQUARES, stop_early=True))
    assert verdicts(result) == [V.OK, V.WRONG_ANSWER] and result.num_cases == 4


async def test_a_case_without_an_expected_output_only_has_to_end_well(judge: Judge) -> None:
    tests = StdinTests(cases=(StdinCase(), StdinCase(stdin="x")))
    result = await judge.judge(JudgeRequest(code="if input(): print('any')", tests=tests))
    assert verdicts(result) == [V.RUNTIME_ERROR, V.OK]


async def test_an_answer_longer_than_the_usual_output_is_judged(judge: Judge) -> None:
    tests = StdinTests(cases=(StdinCase(expected="x" * 300_000),))
    assert (await judge.judge(JudgeRequest(code="print('x' * 300_000)", tests=tests))).verdict is V.OK
    assert (await judge.judge(JudgeRequest(code="print('x' * 900_000)", tests=tests))).verdict is V.OUTPUT_LIMIT


async def test_calls_see_plain_data_and_give_it_back(judge: Judge) -> None:
    tests = CallTests(
        entry_point="f",
        cases=(
            CallCase(args=([1, 2], {"a": (1,)}), expected=[[1, 2], {"a": (1,)}, None]),
            CallCase(args=(2**80, b"\xff"), kwargs={"c": {1}}, expected=[2**80, b"\xff", {1}]),
            CallCase(args=(1.5, float("inf")), expected=(1.5, float("inf"), None)),
            CallCase(args=("é\n", True), expected=["é\n", 1, None]),
            CallCase(args=("a", "b"), expected=["a", "c", None]),
        ),
    )
    result = await judge.judge(JudgeRequest(code="def f(a, b, c=None): return [a, b, c]", tests=tests))
    assert verdicts(result) == [V.OK] * 4 + [V.WRONG_ANSWER]
    assert result.detail == "case 4: expected ['a', 'c', None], got ['a', 'b', None]"


async def test_a_call_that_raises_shows_its_own_lines(judge: Judge) -> None:
    tests = CallTests(entry_point="f", cases=(CallCase(args=(0,)),))
    result = await judge.judge(JudgeRequest(code="def f(n):\n    return 1 / n", tests=tests))
    error = result.cases[0].stderr
    assert (
        result.verdict is V.RUNTIME_ERROR
        and "line 2, in f" in error
        and "return 1 / n" in error
        and "bare" not in error
    )


async def test_calls_share_no_state(judge: Judge) -> None:
    tests = CallTests(entry_point="f", cases=(CallCase(args=(1,), expected=[1]), CallCase(args=(2,), expected=[2])))
    code = "seen = []\ndef f(n):\n    seen.append(n)\n    return seen"
    assert (await judge.judge(JudgeRequest(code=code, tests=tests))).verdict is V.OK


NODES = """
class Solution:
    def reverse(self, head: Optional[ListNode]) -> Optional[ListNode]:
        last = None
        while head: head.next, last, head = last, head, head.next
        return last
    def mirror(self, root: Optional[TreeNode]) -> Optional[TreeNode]:
        if root: root.left, root.right = self.mirror(root.right), self.mirror(root.left)
        return root
"""


@pytest.mark.parametrize(
    ("test", "verdict"),
    [
        ("assert is_same_list(Solution().reverse(list_node([1, 2, 3])), list_node([3, 2, 1]))", V.OK),
        ("assert is_same_list(Solution().reverse(list_node([1, 2, 3])), list_node([1, 2, 3]))", V.WRONG_ANSWER),
        ("assert is_same_tree(Solution().mirror(tree_node([1, 2, None, 3])), tree_node([1, None, 2, None, 3]))", V.OK),
        ("x = Solution()\nassert is_same_list(x.reverse(list_node([1, 2])), list_node([2, 1]))", V.OK),
    ],
)
async def test_lists_and_trees_of_nodes_are_data(judge: Judge, test: str, verdict: RunStatus) -> None:
    assert (await judge.judge(JudgeRequest(code=NODES, tests=AssertTests(tests=test)))).verdict is verdict


@pytest.mark.parametrize(("wanted", "verdict"), [(20, V.OK), (22, V.WRONG_ANSWER)])
async def test_opaque_tests_run_with_the_program_and_mark_the_verdict(
    judge: Judge, wanted: int, verdict: RunStatus
) -> None:
    tests = AssertTests(tests=f"for n in [3]:\n    assert candidate(n) > {wanted}", entry_point="f")
    result = await judge.judge(JudgeRequest(code="def f(n): return 7 * n", tests=tests))
    assert (result.verdict, result.opaque, len(result.cases)) == (verdict, True, 1), result


async def test_tests_that_are_read_leave_no_mark(judge: Judge) -> None:
    result = await judge.judge(JudgeRequest(code="def f(n): return n", tests=AssertTests(tests="assert f(1) == 1")))
    assert (result.verdict, result.opaque) == (V.OK, False)


LOOP_TESTS = (
    "def check(candidate):\n    for n in [1, 2]:\n        assert candidate(n) == n * n\n    assert candidate(5) == 25\n"
)


@pytest.mark.parametrize(
    ("body", "wanted"),
    [
        ("return n * n", [V.OK, V.OK, V.OK]),
        ("return n * n if n != 2 else 0", [V.OK, V.WRONG_ANSWER, V.OK]),
        ("return n * n if n != 2 else 1 / 0", [V.OK, V.RUNTIME_ERROR, V.OK]),
        ("\n    while n == 1: pass\n    return n * n", [V.TIME_LIMIT, V.OK, V.OK]),
        ("\n    import os\n    if n == 2: os._exit(0)\n    return n * n", [V.OK, V.WRONG_ANSWER, V.OK]),
        ("\n    import os\n    if n == 2: os.kill(os.getpid(), 9)\n    return n * n", [V.OK, V.RUNTIME_ERROR, V.OK]),
        ("\n    if n == 2: x = bytearray(b'1' * (300 << 20))\n    return n * n", [V.OK, V.MEMORY_LIMIT, V.OK]),
    ],
)
async def test_a_program_that_dies_in_a_test_is_started_again_for_the_next(
    judge: Judge, pool: SandboxPool, body: str, wanted: list[RunStatus]
) -> None:
    tests = AssertTests(tests=LOOP_TESTS, entry_point="f")
    limits = ExecutionLimits(cpu_s=1.0)
    result = await judge.judge(JudgeRequest(code=f"def f(n): {body}", tests=tests, limits=limits))
    assert verdicts(result) == wanted, result
    await assert_clean(pool)


async def test_helpers_come_from_the_preamble_and_not_from_the_program(judge: Judge) -> None:
    """A program that redefines the helper of a round trip has no advantage."""
    preamble = "def encode(text): return text[::-1]\ndef decode(text):\n    pass\n"
    tests = "def check(candidate):\n    for text in ['abc', 'xyz']:\n        assert candidate(encode(text)) == text\n"
    cheat = "def encode(text): return text\ndef decode(text): return text"
    honest = "def decode(text): return text[::-1]"
    request = AssertTests(tests=tests, entry_point="decode", preamble=preamble)
    assert (await judge.judge(JudgeRequest(code=cheat, tests=request))).verdict is V.WRONG_ANSWER
    assert (await judge.judge(JudgeRequest(code=honest, tests=request))).verdict is V.OK


@pytest.mark.parametrize(
    "tests",
    [
        AssertTests(
            tests="def check(candidate):\n    for n in undefined_name:\n        assert candidate(n)", entry_point="f"
        ),
        AssertTests(tests="assert candidate(1) == 1"),
        AssertTests(tests="import nowhere\nfor n in [1]:\n    assert f(n) == 1"),
        AssertTests(tests="x = 1", entry_point="f"),
        AssertTests(tests="", entry_point="f"),
        CallTests(entry_point="f(", cases=(CallCase(),)),
    ],
)
async def test_tests_without_a_check_are_never_passed(judge: Judge, tests: AssertTests | CallTests) -> None:
    result = await judge.judge(JudgeRequest(code="def f(*args): return 1", tests=tests))
    assert result.verdict is V.INVALID_TESTS, result


@pytest.mark.parametrize("name", ["add", "reduce", "gcd", "Counter", "heappush", "mean"])
async def test_a_name_that_the_tests_do_not_import_is_the_programs(judge: Judge, name: str) -> None:
    """Also a name that a library has, if the only one: otherwise the tests would test the library."""
    tests = AssertTests(tests=f"for n in [1, 2]:\n    assert {name}(n, 1) == n + 1")
    right, wrong = (f"def {name}(a, b): return {body}" for body in ("a + b", "a - b"))
    assert (await judge.judge(JudgeRequest(code=right, tests=tests))).verdict is V.OK
    assert (await judge.judge(JudgeRequest(code=wrong, tests=tests))).verdict is V.WRONG_ANSWER


async def test_a_failure_in_the_middle_is_reported_as_alone(judge: Judge) -> None:
    code = "a, b = map(int, input().split())\nprint(a, end=' ')\nif a == 2: raise KeyError(a)\nprint(a + b)"
    tests = StdinTests(cases=tuple(StdinCase(stdin=f"{n} {n}", expected=f"{n} {2 * n}") for n in range(5)))
    together = await judge.judge(JudgeRequest(code=code, tests=tests))
    alone = await judge.judge(JudgeRequest(code=code, tests=StdinTests(cases=tests.cases[2:3])))
    assert verdicts(together) == [V.OK, V.OK, V.RUNTIME_ERROR, V.OK, V.OK]
    assert [case.index for case in together.cases] == list(range(5))
    for name in ("verdict", "detail", "stdout", "stderr", "exit_code", "signal", "truncated"):
        assert getattr(together.cases[2], name) == getattr(alone.cases[0], name)


@pytest.mark.parametrize(
    "code", ["def f(", "def f(x):\n    return '\\ud800' is 1\nreturn", "x = " + "(" * 300], ids=str
)
async def test_a_source_that_is_no_program_is_said_of_every_case(judge: Judge, code: str) -> None:
    tests = CallTests(entry_point="f", cases=tuple(CallCase(args=(n,), expected=n) for n in range(3)))
    result = await judge.judge(JudgeRequest(code=code, tests=tests))
    assert verdicts(result) == [V.COMPILE_ERROR] * 3


@pytest.mark.slow
async def test_a_limit_is_each_cases_own(judge: Judge) -> None:
    code = "import time\nn = int(input())\ntime.sleep(.9)\nprint(2 * n)"
    tests = StdinTests(cases=tuple(StdinCase(stdin=f"{n}", expected=f"{2 * n}") for n in range(3)))
    result = await judge.judge(JudgeRequest(code=code, tests=tests, limits=ExecutionLimits(wall_s=2.5)))
    assert verdicts(result) == [V.OK] * 3


async def test_the_number_of_a_file_without_a_name_counts_no_case_before(judge: Judge) -> None:
    """At tier 2 the numbers count the files of the disk; elsewhere they are the machine's."""
    code = (
        "import os, sys\nfor _ in range(5): fd = os.open('.', os.O_TMPFILE | os.O_WRONLY)\n"
        "sys.stderr.write(str(os.fstat(fd).st_ino))\nprint(0)"
    )
    tests = StdinTests(cases=(StdinCase(expected="0"),) * 3)
    result = await judge.judge(JudgeRequest(code=code, tests=tests))
    assert verdicts(result) == [V.OK] * 3
    assert result.tier != "2" or len({case.stderr for case in result.cases}) == 1


async def test_all_cases_together_have_a_time(pool: SandboxPool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "config", pool.config.model_copy(update={"judging_time_s": 1.5}))
    cases = StdinTests(cases=tuple(StdinCase(stdin="", expected="1") for _ in range(130)))
    slow = JudgeRequest(code="import time\ntime.sleep(60)", tests=cases, limits=ExecutionLimits(wall_s=0.25))
    honest = replace(slow, code="import time\ntime.sleep(.4)\nprint(1)", limits=ExecutionLimits())
    for request in (slow, honest):
        result = await Judge(pool).judge(request)
        assert result.verdict is V.TIME_LIMIT and len(result.cases) == result.num_cases == 130
        assert "judging_time_s" in result.cases[-1].detail
    assert 1 <= sum(case.verdict is V.OK for case in result.cases) <= 4
    early = await Judge(pool).judge(replace(honest, stop_early=True))
    assert early.verdict is V.TIME_LIMIT and len(early.cases) <= 6
