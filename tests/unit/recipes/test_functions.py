"""The tasks of the two demonstrations: the held-out rows, the accuracy of the demonstrators, the content of a test log."""

from __future__ import annotations

from itertools import islice
from typing import Any, cast

import pytest

from recipes.functions import coins, steps
from services.common.records import Task
from services.inference.workflows.base import Execution, Gateway, ProgramStatus


def test_no_held_out_program_is_trained_or_demonstrated() -> None:
    held_out = {row["id"] for row in steps.problems(0, "held_out")}
    assert len(held_out) == steps.NUM_HELD_OUT
    assert not held_out & {row["id"] for row in steps.problems(5)}
    sentences = {row["messages"][0]["content"] for row in steps.problems(0, "held_out")}
    assert not sentences & {d["messages"][0]["content"] for d in islice(steps.demonstrations(3), 3000)}


def test_the_program_of_a_right_demonstration_passes_its_tests_and_a_wrong_one_fails() -> None:
    tests = {row["messages"][0]["content"]: row["tests"] for row in steps.problems(0)}
    right = 0
    for dialogue in islice(steps.demonstrations(1), 500):
        scope: dict[str, Any] = {}
        exec(dialogue["messages"][1]["content"], scope)
        cases = tests[dialogue["messages"][0]["content"]]["cases"]
        passed = all(scope["f"](*case["args"]) == case["expected"] for case in cases)
        assert passed or not dialogue["right"]
        right += dialogue["right"]
    assert 0.25 < right / 500 < 0.4


@pytest.mark.parametrize("split", ["train", "held_out"])
def test_which_number_is_accepted_is_a_coin_that_nothing_shows(split: str) -> None:
    rows = list(coins.problems(3, split))
    first = [accepted_first(row) for row in rows]
    assert 0.35 < sum(first) / len(first) < 0.65
    assert {row["messages"][0]["content"] for row in rows} == {coins.sentence(spec) for spec in coins._all_specs()}


def accepted_first(row: dict[str, Any]) -> bool:
    _, word, first, _ = row["id"].split("-")
    scope: dict[str, Any] = {}
    exec(coins.program(word, int(first)), scope)
    return all(scope["f"](*case["args"]) == case["expected"] for case in row["tests"]["cases"])


def test_the_demonstrators_are_little_better_than_chance() -> None:
    verdicts = list(islice(coins.verifications(1), 2000))
    agree = sum(("ok" in d["messages"][0]["content"]) == ("approve" in d["messages"][1]["content"]) for d in verdicts)
    assert 0.55 < agree / 2000 < 0.65


class Sandbox:
    """Runs programs in this process: they are the test's own."""

    async def execute_code(self, code: str, **_: Any) -> Execution:
        said: list[str] = []
        try:
            exec(code, {"print": said.append})
        except Exception:
            return Execution(status=ProgramStatus.RUNTIME_ERROR)
        return Execution(status=ProgramStatus.OK, stdout="\n".join(said) + "\n")


@pytest.mark.parametrize(
    ("solution", "log"),
    [
        ("def f(x): return x+3", "f(2) ok\nf(7) ok"),
        ("def f(x): return x+2", "f(2) FAIL\nf(7) FAIL"),
        ("def f(x): return x*", "f(2) FAIL\nf(7) FAIL"),
        ("approve", "f(2) FAIL\nf(7) FAIL"),
    ],
)
async def test_the_log_says_what_the_hidden_tests_found(solution: str, log: str) -> None:
    cases = [{"args": [value], "expected": value + 3} for value in coins.INPUTS]
    task = Task(task_id="1", data={"tests": {"cases": cases}})
    assert await coins.test_log(cast(Gateway, Sandbox()), task, solution) == log
