"""The code reward: choice of the program and the tests, and the value of a verdict."""

from __future__ import annotations

from typing import Any

import pytest

from services.common.config.processes.envgateway import SandboxConfig
from services.common.errors import CapacityError, InvalidRequestError
from services.common.telemetry.gateway_queue import Lane
from services.common.text.programs import program_of
from services.envgateway.judge.records import AssertTests, CaseResult, JudgeRequest, JudgeResult
from services.envgateway.rewards.code import CodeReward, read_tests
from services.envgateway.rewards.result import RewardOutcome
from services.envgateway.sandbox.bare.statuses import RunStatus

STDIN = {"tests": {"kind": "stdin", "cases": [{"stdin": "1", "expected": "1"}]}}


class Queue:
    """Records requests; answers with a verdict, or fails."""

    def __init__(self, verdict: RunStatus = RunStatus.OK, error: Exception | None = None) -> None:
        self.requests: list[JudgeRequest] = []
        self.verdict = verdict
        self.error = error

    async def run(self, job: JudgeRequest, **_: Any) -> JudgeResult:
        self.requests.append(job)
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
        ("```python\nunclosed", "```python\nunclosed"),
    ],
)
def test_the_last_fenced_block_is_the_program(completion: str, program: str) -> None:
    assert program_of(completion) == program


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


async def test_a_full_queue_is_no_reward() -> None:
    result = await CodeReward(Queue(error=CapacityError("full")))(STDIN, "print(1)")
    assert result.outcome is RewardOutcome.GRADER_FAILED


async def test_an_empty_program_is_not_judged() -> None:
    queue = Queue()
    assert (await CodeReward(queue)(STDIN, "```\n\n```")).outcome is RewardOutcome.UNPARSED
    assert not queue.requests


@pytest.mark.parametrize(
    ("completion", "code"),
    [
        ("    return x", "def f(x):\n    return x"),
        ("```python\ndef f(x):\n    return x\n```", "def f(x):\n    return x\n"),
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


async def test_the_first_failure_ends_the_cases_and_a_waiting_rollout_goes_before_batches() -> None:
    queue = Queue()
    await CodeReward(queue)(STDIN, "print(1)")
    assert [(request.stop_early, request.lane) for request in queue.requests] == [(True, Lane.INTERACTIVE)]
