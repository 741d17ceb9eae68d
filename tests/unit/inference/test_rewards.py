"""Reward functions of the user: their results, and the treatment of faulty ones."""

from __future__ import annotations

import asyncio
import threading
from typing import Any, cast

import pytest

from services.common.aio import deadline
from services.common.errors import ConfigError, DeadlineError
from services.common.records import Task
from services.common.system.threads import DaemonThreads
from services.inference.workflows import base
from services.inference.workflows.base import Gateway, build_grader
from tests.waiting import WAIT_S, until

HERE = "tests.unit.inference.test_rewards"
TASK = Task(task_id="7", data={"answer": "42"})
NOWHERE = cast(Gateway, None)  # functions of this process need no gateway

never = threading.Event()
ended: list[str] = []  # the calls of runs_for_ever


def exact(task: Any, completion: str) -> float:
    return float(completion == task["answer"])


async def slowly_exact(task: Any, completion: str) -> float:
    await asyncio.sleep(0.001)
    return exact(task, completion)


def leaves(task: Any, completion: str) -> float:
    raise {"exit": SystemExit, "cancel": asyncio.CancelledError, "close": GeneratorExit}[completion](completion)


async def leaves_later(task: Any, completion: str) -> float:
    return leaves(task, completion)


def runs_for_ever(task: Any, completion: str) -> float:
    never.wait(2 * WAIT_S)
    ended.append(completion)
    return 1.0


@pytest.mark.parametrize("name", ["exact", "slowly_exact"])
async def test_a_function_scores_the_completion(name: str) -> None:
    grade = build_grader(f"{HERE}:{name}")
    assert [(await grade(NOWHERE, TASK, text)).value for text in ("42", "41")] == [1.0, 0.0]


@pytest.mark.parametrize("name", ["leaves", "leaves_later"])
async def test_a_function_that_leaves_or_cancels_ends_its_own_call_alone(name: str) -> None:
    grade = build_grader(f"{HERE}:{name}")
    for completion in ("exit", "cancel", "close"):
        with pytest.raises(BaseException, match=completion):
            await grade(NOWHERE, TASK, completion)
    assert (await build_grader(f"{HERE}:exact")(NOWHERE, TASK, "42")).value == 1.0


async def test_a_function_that_runs_for_ever_ends_its_rollout_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base, "REWARD_TIMEOUT_S", 0.1)
    stuck, fine = build_grader(f"{HERE}:runs_for_ever"), build_grader(f"{HERE}:exact")
    running = [asyncio.ensure_future(stuck(NOWHERE, TASK, "42")) for _ in range(6)]
    for call in running:
        with pytest.raises(DeadlineError, match=r"runs_for_ever of task 7 took longer than 0\.1 s"):
            await call
    monkeypatch.undo()
    assert (await fine(NOWHERE, TASK, "42")).value == 1.0
    assert ended == [], "no rollout waited for the function"
    never.set()


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (None, "returned None .*is a `return` missing"),
        ("1.0", "returned '1.0'"),
        ([1.0, 2.0], r"returned \[1.0, 2.0\]"),
        ({}, r"returned \{\}"),
        (float("inf"), "returned inf"),
        (float("nan"), "must be a finite number"),
        pytest.param(10**5000, "must be a finite number", id="more than Python writes in decimal"),
    ],
)
async def test_what_a_function_returns_beside_finite_numbers_is_told(
    monkeypatch: pytest.MonkeyPatch, given: object, told: str
) -> None:
    monkeypatch.setattr(f"{HERE}.exact", lambda task, completion: given)
    with pytest.raises(ValueError, match=told):
        await build_grader(f"{HERE}:exact")(NOWHERE, TASK, "42")


@pytest.mark.parametrize(
    ("reward", "told"),
    [("maths", "did you mean 'math'"), ("rewards.exact", "did you mean 'rewards:exact'"), ("", "boxed, code, math")],
)
def test_a_reward_that_is_neither_built_in_nor_a_path_is_refused_at_start(reward: str, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        build_grader(reward)


async def test_the_clock_of_a_function_starts_when_a_thread_begins_it(monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[float] = []

    class Recorded(deadline):
        def begin_again(self, seconds: float, name: str) -> None:
            begun.append(seconds)
            super().begin_again(seconds, name)

    monkeypatch.setattr(base, "deadline", Recorded)
    monkeypatch.setattr(base, "REWARD_THREADS", DaemonThreads(2))
    gate = threading.Semaphore(0)

    def waits(task: Any, completion: str) -> float:
        gate.acquire()
        return 1.0

    monkeypatch.setattr(f"{HERE}.exact", waits)
    calls = [asyncio.ensure_future(build_grader(f"{HERE}:exact")(NOWHERE, TASK, "42")) for _ in range(12)]
    await until(lambda: len(begun) == 2, "two functions have begun")
    for num_ended in range(1, 11):
        gate.release()
        await until(lambda wanted=2 + num_ended: len(begun) == wanted, "the next function has begun")  # type: ignore[misc]
    gate.release(2)
    assert [(await call).value for call in calls] == [1.0] * 12
    assert begun == [base.REWARD_TIMEOUT_S] * 12


async def test_as_many_functions_run_at_once_as_the_service_has_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    threads = DaemonThreads(4)
    threads.allow(64)
    monkeypatch.setattr(base, "REWARD_THREADS", threads)
    together = threading.Barrier(64)

    def meets(task: Any, completion: str) -> float:
        together.wait(WAIT_S)
        return 1.0

    monkeypatch.setattr(f"{HERE}.exact", meets)
    grade = build_grader(f"{HERE}:exact")
    assert [reward.value for reward in await asyncio.gather(*(grade(NOWHERE, TASK, "42") for _ in range(64)))] == [
        1.0
    ] * 64
