"""Reward functions of the user: what they return, and what becomes of those that misbehave."""

from __future__ import annotations

import asyncio
import threading
import time
from typing import Any, cast

import pytest

from services.common.errors import ConfigError, DeadlineError
from services.common.types import Task
from services.inference.workflows import rewards
from services.inference.workflows.base import Gateway
from services.inference.workflows.rewards import build_grader

HERE = "tests.unit.inference.test_rewards"
TASK = Task(task_id="7", data={"answer": "42"})
NOWHERE = cast(Gateway, None)  # functions of this process need no gateway

never = threading.Event()


def exact(task: Any, completion: str) -> float:
    return float(completion == task["answer"])


async def slowly_exact(task: Any, completion: str) -> float:
    await asyncio.sleep(0.001)
    return exact(task, completion)


def not_a_number(task: Any, completion: str) -> float:
    return float("nan")


def raises(task: Any, completion: str) -> float:
    raise KeyError("no such column")


def runs_for_ever(task: Any, completion: str) -> float:
    never.wait(30)
    return 1.0


@pytest.mark.parametrize("name", ["exact", "slowly_exact"])
async def test_a_function_scores_the_completion(name: str) -> None:
    grade = build_grader(f"{HERE}:{name}")
    assert [(await grade(NOWHERE, TASK, text)).value for text in ("42", "41")] == [1.0, 0.0]


async def test_what_is_no_number_is_no_reward() -> None:
    with pytest.raises(ValueError, match="must be a finite number"):
        await build_grader(f"{HERE}:not_a_number")(NOWHERE, TASK, "42")


async def test_what_a_function_raises_reaches_the_rollout() -> None:
    with pytest.raises(KeyError, match="no such column"):
        await build_grader(f"{HERE}:raises")(NOWHERE, TASK, "42")


async def test_a_function_that_runs_for_ever_ends_its_rollout_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rewards, "REWARD_TIMEOUT_S", 0.1)
    stuck, fine = build_grader(f"{HERE}:runs_for_ever"), build_grader(f"{HERE}:exact")
    running = [asyncio.ensure_future(stuck(NOWHERE, TASK, "42")) for _ in range(6)]
    began = time.monotonic()
    for call in running:
        with pytest.raises(DeadlineError, match=r"runs_for_ever of task 7 took longer than 0\.1 s"):
            await call
    assert (await fine(NOWHERE, TASK, "42")).value == 1.0
    never.set()
    assert time.monotonic() - began < 25, "it waited for the function"


def test_what_is_no_function_is_refused_at_start() -> None:
    with pytest.raises(ConfigError, match="is no function"):
        build_grader(f"{HERE}:TASK")
