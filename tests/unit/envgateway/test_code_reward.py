"""The code reward: choice of the program and the tests, and the value of a verdict."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from services.common.config.envgateway import SandboxConfig
from services.common.errors import CapacityError, DeadlineError, InvalidRequestError
from services.common.telemetry.metrics import Lane
from services.common.text.programs import program_of, with_preamble
from services.envgateway.calls import RewardOutcome
from services.envgateway.judge.records import AssertTests, CallCase, CallTests, CaseResult, JudgeRequest, JudgeResult
from services.envgateway.rewards.registry import CodeReward, read_tests
from services.envgateway.sandbox.bare.statuses import RunStatus
from tests.unit.envgateway.test_embedded_queue import queue_over

STDIN = {"tests": {"kind": "stdin", "cases": [{"stdin": "1", "expected": "1"}]}}


class Queue:
    """Records requests; answers with a verdict, or fails."""

    num_slots = 4

    def __init__(self, verdict: RunStatus = RunStatus.OK, error: Exception | None = None) -> None:
        self.requests: list[JudgeRequest] = []
        self.lanes: list[Lane] = []
        self.verdict = verdict
        self.error = error

    async def run(self, job: JudgeRequest, lane: Lane = Lane.BATCH, **_: Any) -> JudgeResult:
        self.requests.append(job)
        self.lanes.append(lane)
        if self.error is not None:
            raise self.error
        return JudgeResult(verdict=self.verdict, cases=(CaseResult(index=0, verdict=self.verdict),), num_cases=1)


@pytest.mark.parametrize(
    ("completion", "program"),
    [
        ("print(1)", "print(1)"),
        ("```python\nprint(1)\n```", "print(1)\n"),
        ("```\na\n```\nbetter:\n```py\nb\n```\nthat is it", "b\n"),
        ("```cpp title=x\nint main(){}\n```", "int main(){}\n"),
        ("```python\nunclosed", "unclosed"),
        ("```python\nprint(3)\n```\nOutput:\n```\n3\n```", "print(3)\n"),
        ("```python\nprint(3)\n```\n```text\na long example of an output\n```", "print(3)\n"),
        ("```\nfor n in range(3): print(n)\n```\n```\n0\n1\n2\n```", "for n in range(3): print(n)\n"),
        (
            "```python\nfirst_of_two = 1 + 1 + 1\n```\n```py\nsecond_of_two = 1 + 1 + 1\n```\n```python\nf(3)\n```",
            "second_of_two = 1 + 1 + 1\n",
        ),
        (
            "```python\na_closed_program = 1 + 2\n```\nno:\n```python\na_program_that_is_cut = 1 +",
            "a_closed_program = 1 + 2\n",
        ),
        ("```\n1 2 3\n```\n```python\na_program_that_is_cut = 1 +", "a_program_that_is_cut = 1 +"),
        ("```python import sys\nprint(1)\n```", "import sys\nprint(1)\n"),
        ("```python n = 1```", "n = 1"),
        ("```python main.py\nn = 1\n```", "n = 1\n"),
        ("```Python3.8\nn = 1\n```", "n = 1\n"),
        ("``` python\r\nn = 1\r\n```", "n = 1\r\n"),
        ("```print(1)\nprint(2)```", "print(1)\nprint(2)"),
        ("``` ``` ```", " "),
        # fences as in CommonMark
        ("~~~python\nn = 1\n~~~\nDone.", "n = 1\n"),
        ("````python\nn = '''\n```\n'''\n````", "n = '''\n```\n'''\n"),
        ("````markdown\nHere:\n```python\nn = 1\n```\n````\nor\n```\na = 2\n```", "n = 1\n"),
        ("```python\nn = '```'\nm = 2\n```", "n = '```'\nm = 2\n"),
        (
            "```python\ndef f():\n    '''\n    ```\n    f()\n    ```\n    '''\n```",
            "def f():\n    '''\n    ```\n    f()\n    ```\n    '''\n",
        ),
        ("1. So:\n   ```python\n   if n:\n       f()\n   ```", "if n:\n    f()\n"),
        ("- ```python\n  if n:\n      f()\n  ```", "if n:\n    f()\n"),
        ("- So:\n\t```python\n\tf()\n\t```", "f()\n"),
        # a fence that prose names
        ("I put it in ``` fences.\n```python\nn = 1\n```", "n = 1\n"),
        ("A ```python block:\n```python\nn = 1\n```", "n = 1\n"),
        ("Between ``` and ```:\n```\nn = 1\n```", "n = 1\n"),
        ("It begins with ```\n```python\nn = 1\n```", "n = 1\n"),
        ("```\n```python\nn = 1\n```", "n = 1\n"),
        # fences behind text, and in the line of code
        ("So: ```python\nn = 1\n``` and that is it", "n = 1\n"),
        ("```python\nprint(1)```\nprints\n```\n1\n```", "print(1)"),
        ("```python\nn = 1\n```<|im_end|>", "n = 1\n"),
        # a block that the end does not close, and another one
        ("```python\nn = (1\nAgain:\n```python\nn = 1\n```", "n = 1\n"),
        # a session
        ("```python\nn = 1\n```\nSo:\n```python\n>>> n + 1 - 1 + 2 - 2\n1\n```", "n = 1\n"),
        # thoughts
        ("<think>```python\na_long_draft_of_it = 1 + 2\n``` no.</think>\n```\nn = 1\n```", "n = 1\n"),
        ("<think>```python\na_long_draft_of_it = 1 + 2\n``` no.</think>\nn = 1", "\nn = 1"),
        ("so ```python\na_long_draft_of_it = 1 + 2\n``` no.</think>```\nn = 1\n```", "n = 1\n"),
        ("<think>a lone ``` here</think>\n```python\nn = 1\n```", "n = 1\n"),
        ("<think>```python\nn = 1\n```</think>I give up.", "I give up."),
        ("<think>```python\nn = 1\n``` let me", ""),
    ],
)
def test_the_last_fenced_block_is_the_program(completion: str, program: str) -> None:
    assert program_of(completion) == program


@pytest.mark.parametrize(
    "label",
    [
        "python:main.py", "python file=main.py", "python title=\"my solution\"", "python,ignore", "python:", "python=",
        "python (3.x)", "python3:solution.py", "Python code:", "python // main.py", "python <!-- main -->", "Python 3",
        "python3 {main.py}", "python {linenos=true}", "python{1,3}", "python # main.py", "python\tmain.py", "python-3",
        "python main.py - the solution", "python 3.11 or newer", "python [main.py]", "python; 3",
    ],
)  # fmt: skip
def test_a_label_is_no_part_of_the_program(label: str) -> None:
    program = "import sys\nprint(input())\n"
    shown = "```text\na long example of an output\n```"
    assert program_of(f"```{label}\n{program}```\n{shown}") == program


@pytest.mark.parametrize(
    "code",
    ["from sys import stdin", "import sys", "def f(n): return n", "n = int(input())", "n=int(input())", "print(1)",
     "a, b = b, a", "for n in range(3): pass", "@cache", "n += 1", "sys.stdin.read()"],
)  # fmt: skip
@pytest.mark.parametrize("label", ["python ", "py3 ", ""])
def test_code_may_follow_the_language_on_its_line(label: str, code: str) -> None:
    assert program_of(f"```{label}{code}\nprint(2)\n```") == f"{code}\nprint(2)\n"


@pytest.mark.parametrize(
    "unit",
    [
        "\n    ",
        "```",
        "```python",
        "```a\n",
        "def ",
        "```python (",
        "x```\n",
        "````\n```\n",
        "```python\n",
        "```python from ",
    ],
)
def test_a_text_that_repeats_itself_is_read_in_one_pass(unit: str) -> None:
    """A quadratic look at these would take minutes."""
    text = unit * (150_000 // len(unit))
    assert with_preamble(program_of(text), "def f():\n", "f")


@pytest.mark.parametrize(
    ("verdict", "outcome"),
    [
        (RunStatus.OK, RewardOutcome.CORRECT),
        *((verdict, RewardOutcome.WRONG) for verdict in RunStatus if verdict.is_about_the_program and verdict is not RunStatus.OK),
        (RunStatus.INFRA_ERROR, RewardOutcome.GRADER_FAILED),
        (RunStatus.CANCELLED, RewardOutcome.GRADER_FAILED),
    ],
)  # fmt: skip
async def test_only_verdicts_about_the_program_are_rewards(verdict: RunStatus, outcome: RewardOutcome) -> None:
    result = await CodeReward(Queue(verdict))(STDIN, "print(1)")
    assert result.outcome is outcome
    assert verdict is RunStatus.OK or str(verdict) in result.detail


@pytest.mark.parametrize(("case_time_s", "wall_s"), [(6.0, 6.0), (2.0, 2.0), (None, 7.0)])
async def test_a_case_has_the_time_that_is_set_or_the_sandboxes(case_time_s: float | None, wall_s: float) -> None:
    queue = Queue()
    await CodeReward(queue, case_time_s)(STDIN, "print(1)")
    limits = queue.requests[0].limits.within(SandboxConfig(wall_time_s=7.0, cpu_time_s=6.5))
    assert (limits["wall_s"], limits["cpu_s"]) == (wall_s, 6.5)


@pytest.mark.parametrize("error", [CapacityError("full", retry_after_s=2.0), DeadlineError("waited at a worker")])
async def test_a_program_that_only_waited_is_to_be_judged_later(error: Exception) -> None:
    with pytest.raises(CapacityError) as full:
        await CodeReward(Queue(error=error))(STDIN, "print(1)")
    assert full.value.retry_after_s


async def test_the_queue_ends_a_judgement_before_the_call_ends() -> None:
    """Else the wait for a worker would end as a failed grader, not as one to be judged later."""
    given: dict[str, float] = {}

    class Timed(Queue):
        async def run(self, job: JudgeRequest, *, deadline_s: float, wait_s: float, **_: Any) -> JudgeResult:
            given.update(deadline_s=deadline_s, wait_s=wait_s)
            return await super().run(job)

    await CodeReward(Timed())(STDIN, "print(1)")
    # the waits for a place and for a slot, and the longest ``sandbox.judging_time_s``
    assert 2 * given["wait_s"] + 500 <= given["deadline_s"] < CodeReward.timeout_s


async def test_slow_programs_of_one_task_leave_a_slot_to_others() -> None:
    running: list[str] = []
    end = asyncio.Event()

    class Slow(Queue):
        async def judge(self, request: JudgeRequest, lane: Lane = Lane.BATCH) -> JudgeResult:
            running.append(request.code)
            await end.wait()
            return await self.run(request)

    reward = CodeReward(queue_over(Slow().judge, 4))
    other = {"tests": {"kind": "stdin", "cases": [{"stdin": "2", "expected": "2"}]}}
    group = [asyncio.create_task(reward(STDIN, f"print({n})")) for n in range(8)]
    group.append(asyncio.create_task(reward(other, "print('other')")))
    while "print('other')" not in running:
        await asyncio.sleep(0)
    assert len(running) == 4
    end.set()
    assert all(result.outcome is RewardOutcome.CORRECT for result in await asyncio.gather(*group))
    assert len(running) == 9


async def test_integer_keys_and_other_readings_of_a_row_reach_the_judge() -> None:
    queue = Queue()
    case = {"args": [{"1": 2}, {"a": {"-3": [{"1": 2}]}}, {}], "expected": 4, "also": [[4], "4"]}
    tests = {"kind": "call", "entry_point": "f", "cases": [case], "integer_keys": True}
    await CodeReward(queue)({"tests": tests}, "def f(*given): return 4")
    assert queue.requests[0].tests == CallTests(
        entry_point="f", cases=(CallCase(args=({1: 2}, {"a": {-3: [{1: 2}]}}, {}), expected=4, also=([4], "4")),)
    )


async def test_an_empty_program_is_not_judged() -> None:
    queue = Queue()
    assert (await CodeReward(queue)(STDIN, "```\n\n```")).outcome is RewardOutcome.UNPARSED
    assert not queue.requests
    await CodeReward(queue)(STDIN, "print(1)")
    assert [request.stop_early for request in queue.requests] == [True] and queue.lanes == [Lane.INTERACTIVE]


@pytest.mark.parametrize(
    ("completion", "code"),
    [
        ("    return x", "def f(x):\n    return x"),
        ("```python\ndef f(x):\n    return x\n```", "def f(x):\n    return x"),
        ("class f:\n    pass", "class f:\n    pass"),
    ],
)
async def test_a_completion_that_goes_on_from_the_prompt_is_joined_to_it(completion: str, code: str) -> None:
    queue = Queue()
    task = {"tests": {"kind": "assert", "tests": "check(f)", "entry_point": "f", "preamble": "def f(x):\n"}}
    await CodeReward(queue)(task, completion)
    assert queue.requests[0].code == code
    assert queue.requests[0].tests == AssertTests(tests="check(f)", entry_point="f", preamble="def f(x):\n")


@pytest.mark.parametrize(
    ("task", "message"),
    [
        ({}, "has no tests"),
        ({"tests": {"kind": "essay"}}, "kind 'essay'"),
        ({"tests": {"kind": "stdin", "cases": [{"input": "1"}]}}, "have the wrong form"),
        ({"tests": {"kind": "call", "entry_point": "f"}}, "have the wrong form"),
        ({"tests": {}}, "have the wrong form"),
    ],
)
def test_a_task_whose_tests_are_not_understood_is_refused(task: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        read_tests(task)
