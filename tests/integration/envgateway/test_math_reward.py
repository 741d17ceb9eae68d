"""Math rewards by real workers."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from typing import Any

import pytest

from services.common.config.envgateway import ScorerConfig
from services.common.errors import ConfigError, InfrastructureError, InvalidRequestError
from services.envgateway.calls import RewardOutcome, RewardResult
from services.envgateway.child import ChildDied, ChildFailed, ChildLost
from services.envgateway.rewards import pool as math_pool_module
from services.envgateway.rewards.math import (
    alternatives,
    ends_in_bare_list,
    equations,
    intervals,
    other_form,
    rewritten,
    without_unit,
)
from services.envgateway.rewards.pool import MathPool, WorkerOverdue, WorkerStarved
from services.envgateway.rewards.registry import MathReward, Rewards
from tests.integration.envgateway.math_pairs import pairs

R = RewardOutcome


@pytest.fixture
async def math_pool() -> AsyncIterator[MathPool]:
    pool = MathPool(ScorerConfig(num_workers=1, timeout_s=3.0))
    yield pool
    await pool.close()


GOLDEN = [
    ("10000", r"\boxed{10000}", R.CORRECT),
    ("10000", r"\boxed{10001}", R.WRONG),
    ("10000", r"about $10001$", R.WRONG),
    ("10000", "[1, 2, 10000]", R.WRONG),
    ("10000", "the candidates are [1, 2, 10000].", R.WRONG),
    ("10000", "1, 2, 10000", R.WRONG),
    ("10000", "$[1, 2, 10000]$", R.WRONG),
    ("10000", "so it is 10,000", R.CORRECT),
    ("10000", r"\boxed{[1, 2, 10000]}", R.WRONG),
    ("1,786", r"\boxed{1786}", R.CORRECT),
    ("5", "The answer is 5.", R.CORRECT),
    ("12", "So we get $x = 12$", R.CORRECT),
    (r"\frac{1}{2}", r"\boxed{0.5}", R.CORRECT),
    (r"\frac{1}{2}", r"\boxed{\frac{2}{4}}", R.CORRECT),
    (r"\frac{1}{2}", r"\boxed{0.4999}", R.WRONG),
    ("0.333", r"\boxed{\frac13}", R.WRONG),
    (r"\sqrt{8}", r"\boxed{2\sqrt{2}}", R.CORRECT),
    (r"x^2+2x+1", r"\boxed{(x+1)^2}", R.CORRECT),
    (r"\{1,2\}", r"\boxed{\{2,1\}}", R.CORRECT),
    (r"\{1,2\}", r"\boxed{\{1,2,3\}}", R.WRONG),
    (r"[0,1)", r"\boxed{[0,1)}", R.CORRECT),
    (r"[0,1)", r"\boxed{(0,1]}", R.WRONG),
    (r"\text{Evelyn}", r"\boxed{\text{Evelyn}}", R.CORRECT),
    (r"$\frac{3}{4}$", r"\boxed{\frac{3}{4}}", R.CORRECT),
    ("3", r"\boxed{2} or \boxed{3}", R.WRONG),
    ("0.0000001", r"\boxed{0.0000002}", R.WRONG),
    ("10000", r"\boxed{9999.9999999}", R.WRONG),
    ("10000", r"\boxed{10000.01}", R.WRONG),
    ("27.0", r"\boxed{27}", R.CORRECT),
    ("2.5", "it is 2.50", R.CORRECT),
    (r"\pi", r"\boxed{3.1416}", R.WRONG),
    (r"\frac{1}{3}", "so 0.333333", R.CORRECT),
    (r"(-\infty, 3]", r"\boxed{(-\infty,3]}", R.CORRECT),
    (r"(1,2)", r"\boxed{(2,1)}", R.WRONG),
    (r"50\%", r"\boxed{0.5}", R.CORRECT),
    (r"x=5", r"\boxed{5}", R.CORRECT),
    ("5", r"\boxed{4}. Wait, that is wrong. The answer is \boxed{5}.", R.CORRECT),
    ("4", r"\boxed{4}. Wait, that is wrong. The answer is \boxed{5}.", R.WRONG),
    (r"\frac{1}{2}", r"\boxed{\frac{1}{3}}. No: \boxed{\frac{2}{4}}", R.CORRECT),
    (r"\frac{1}{2}", r"\boxed{\frac{2}{4}}, or \boxed{0.5}", R.CORRECT),
    (r"\frac{1}{2}", r"\boxed{\frac{2}{4}}, or \boxed{0.6}", R.WRONG),
    ("1,2", r"so $x=\boxed{1}$ and $x=\boxed{2}$", R.CORRECT),
    ("5", r"<think>\boxed{5}</think> I give up.", R.UNPARSED),
    ("5", r"<think>is it \boxed{5}", R.UNPARSED),
    ("5", r"is it \boxed{4}?</think> \boxed{5}", R.CORRECT),
    ("18", "1, 2, 3, 18,", R.WRONG),
    ("18", "17; 18;", R.WRONG),
    ("18", "16 17 18", R.WRONG),
    ("18", "16 or 17 or 18?", R.WRONG),
    ("18", "1, 2, 18 (one of these)", R.WRONG),
    ("18", "$17$ $18$", R.WRONG),
    ("18", r"17 \text{ or } 18", R.WRONG),
    ("18", "3, 6, ..., 18 and so on", R.WRONG),
    ("1,2", "so it is $1, 2$", R.CORRECT),
    ("18", "so it is 18 (one number).", R.CORRECT),
    ("10000", "so it is 10 000", R.CORRECT),
    ("3.5", "so it is 3 1/2", R.CORRECT),
    ("7", "so 10 - 3 = 7", R.CORRECT),
    ("7", "I do not know.", R.UNPARSED),
    ("2", r"\boxed{", R.UNPARSED),
    ("5", r"\boxed{5} then \boxed{", R.UNPARSED),
    ("5", r"\boxed{5\\}", R.CORRECT),
    ("18", r"\boxed{17 \vee 18}", R.WRONG),
    ("18", r"\boxed{18\text{ (or 17)}}", R.WRONG),
    ("18", r"\boxed{18\text{ maybe 17}}", R.WRONG),
    (r"\frac{1}{2}", r"\boxed{\frac12 \text{ or } 0.5}", R.CORRECT),
    ("12:30", r"\boxed{0.4}", R.WRONG),
    ("12:30", r"\boxed{2:5}", R.WRONG),
    ("12:30", r"\boxed{12:30\text{ pm}}", R.CORRECT),
    ("2:5", r"\boxed{\frac25}", R.CORRECT),
    (r"\frac1e", r"\boxed{\frac{1}{\mathrm e}}", R.CORRECT),
    ("45", r"\boxed{45°}", R.CORRECT),
    (r"\sin 30^\circ", r"\boxed{\frac12}", R.CORRECT),
    (r"\sin 30^\circ", r"\boxed{\frac13}", R.WRONG),
    (r"\arctan 1", r"\boxed{\frac\pi4}", R.CORRECT),
    (r"\frac{2}{\pi}", r"\boxed{\frac2\pi}", R.CORRECT),
    ("B", r"\boxed{\textbf{(B)}\ 12}", R.CORRECT),
    ("B", r"\boxed{\textbf{(C)}\ 12}", R.WRONG),
    ("B", r"\boxed{(B) or (C)}", R.WRONG),
    ("true", r"\boxed{\text{True}}", R.CORRECT),
    ("true", r"\boxed{\text{False}}", R.WRONG),
    (r"5\text{ hours}", r"\boxed{5\text{ hrs}}", R.CORRECT),
    (r"5\text{ hours}", r"\boxed{5}", R.CORRECT),
    (r"5\text{ m}", r"\boxed{5\text{ meters}}", R.CORRECT),
    (r"5\text{ cm}^2", r"\boxed{5\text{ square centimeters}}", R.CORRECT),
    (r"6\text{ pm}", r"\boxed{6\text{ p.m.}}", R.CORRECT),
    (r"\$5", r"\boxed{5 dollars}", R.CORRECT),
    ("5 miles per hour", r"\boxed{5\text{ mph}}", R.CORRECT),
    ("5 apples", r"\boxed{5\text{ red apples}}", R.CORRECT),
    ("2", "", R.UNPARSED),
]


async def test_golden_answers_and_a_killed_worker_is_replaced(math_pool: MathPool) -> None:
    reward = MathReward(math_pool)
    found = [(truth, text, (await reward({"answer": truth}, text)).outcome) for truth, text, _ in GOLDEN]
    assert found == GOLDEN
    (pid,) = math_pool.pids
    os.kill(pid, signal.SIGKILL)
    assert (await reward({"answer": r"\frac{1}{2}"}, r"\boxed{0.5}")).outcome is R.CORRECT
    assert math_pool.counts["crashes"] == 1


async def test_plain_integers_start_no_worker(math_pool: MathPool) -> None:
    reward = MathReward(math_pool)
    assert (await reward({"answer": 1786}, r"\boxed{1786}")).outcome is R.CORRECT
    assert (await reward({"answer": 1786}, r"\boxed{1785}")).outcome is R.WRONG
    assert not math_pool.pids


@pytest.fixture
async def hasty_pool() -> AsyncIterator[MathPool]:
    """Gradings have little time."""
    pool = MathPool(ScorerConfig(num_workers=1, timeout_s=0.5))
    yield pool
    await pool.close()


BOMBS = [
    r"\boxed{9^{9^{9^{9^{9}}}}}",
    r"\boxed{((((99!)!)!)!)!}",
    r"\boxed{(x+y+z+1)^{400}}",
    r"\boxed{" + "9" * 100_000 + "}",
    r"\boxed{1}" * 10_000,
    r"\boxed{" + "{" * 5_000 + "1" + "}" * 5_000 + "}",
    "word " * 25_000,
]


@pytest.mark.slow
async def test_a_bomb_gets_no_reward_and_costs_no_sample(hasty_pool: MathPool) -> None:
    reward = MathReward(hasty_pool)
    for bomb in BOMBS:
        async with asyncio.timeout(60):
            result = await reward({"answer": r"\frac{1}{7}"}, bomb)
            assert result.outcome in (R.WRONG, R.UNPARSED) and result.reward == 0.0, bomb[:50]
            assert (await reward({"answer": r"\frac{1}{2}"}, r"\boxed{\frac{2}{4}}")).outcome is R.CORRECT
    assert hasty_pool.counts["timeouts"] >= 1


@pytest.mark.parametrize("truth", [r"9^{9^{9^{9}}}", r"\text{}"])
async def test_a_reference_answer_that_cannot_be_graded_is_the_rows_fault(hasty_pool: MathPool, truth: str) -> None:
    result = await MathReward(hasty_pool)({"answer": truth}, r"\boxed{\frac{2}{14}}")
    assert result.outcome is R.GRADER_FAILED and "the reference answer" in result.detail


async def test_time_is_the_workers_not_the_clocks(hasty_pool: MathPool, monkeypatch: pytest.MonkeyPatch) -> None:
    reward = MathReward(hasty_pool)
    assert (await reward({"answer": r"\frac{1}{2}"}, r"\boxed{0.5}")).outcome is R.CORRECT
    (pid,) = hasty_pool.pids
    os.kill(pid, signal.SIGSTOP)  # no processor for longer than a grading may take
    grading = asyncio.create_task(reward({"answer": r"\frac{1}{2}"}, r"\boxed{0.5}"))
    await asyncio.sleep(1.0)
    os.kill(pid, signal.SIGCONT)
    assert (await grading).outcome is R.CORRECT and hasty_pool.counts["timeouts"] == 0
    # one that gets none at all is replaced: the machine's fault, and no result
    monkeypatch.setattr(math_pool_module, "_STARVED_FACTOR", 6.0)
    os.kill(pid, signal.SIGSTOP)
    assert (await reward({"answer": r"\frac{1}{2}"}, r"\boxed{0.5}")).outcome is R.CORRECT
    assert hasty_pool.counts["starved"] >= 1  # its successor may starve too on a busy machine


class Scripted:
    """A worker process that fails as told."""

    pid = 0

    def __init__(self, failures: list[ChildFailed]) -> None:
        self._failures = failures
        self.failure: ChildFailed | None = None

    async def start(self, what: str) -> None:
        pass

    async def ask(self, frame: bytes) -> dict[str, Any]:
        if self._failures:
            self.failure = self._failures.pop(0)
            raise self.failure
        return {"outcome": "correct", "reward": 1.0, "detail": "", "exhausted": False, "worn": False}

    def kill(self) -> None:
        pass


@pytest.mark.parametrize(
    ("failures", "outcome"),
    [
        ([ChildDied(signal.SIGKILL)], R.CORRECT),
        ([ChildDied(signal.SIGKILL)] * 2, R.CORRECT),
        ([ChildDied(signal.SIGKILL)] * 3, R.GRADER_FAILED),
        ([ChildDied(0)] * 3, R.GRADER_FAILED),
        ([WorkerStarved()] * 3, R.GRADER_FAILED),
        ([ChildLost()] * 2, R.CORRECT),  # to a question that its caller has left
        ([ChildDied(signal.SIGSEGV)], R.CORRECT),
        ([ChildDied(signal.SIGSEGV)] * 2, R.UNPARSED),
        ([ChildDied(signal.SIGSEGV)] * 4, R.GRADER_FAILED),  # the last two: of the reference answer, alone
        ([WorkerOverdue()], R.UNPARSED),
        ([WorkerOverdue(), WorkerOverdue()], R.GRADER_FAILED),  # the second: of the reference answer, alone
    ],
)
async def test_the_cause_of_a_failure_decides_its_outcome(
    monkeypatch: pytest.MonkeyPatch, failures: list[ChildFailed], outcome: R
) -> None:
    left = list(failures)
    monkeypatch.setattr(math_pool_module, "MathProcess", lambda *_: Scripted(left))
    result = await MathPool(ScorerConfig()).grade("1", "2")
    assert result.outcome is outcome and not left


def half(task: Mapping[str, Any], completion: str) -> float:
    return 0.5


async def graded(task: Mapping[str, Any], completion: str) -> RewardResult:
    return RewardResult(outcome=R.CORRECT, reward=2.0, detail=completion)


def broken(task: Mapping[str, Any], completion: str) -> float:
    raise KeyError("no such column")


def disconnected(task: Mapping[str, Any], completion: str) -> float:
    raise InfrastructureError("the judge is gone")


async def test_functions_by_import_path(math_pool: MathPool) -> None:
    here = __name__
    rewards = Rewards(math_pool, paths=[f"{here}:{name}" for name in ("half", "graded", "broken", "disconnected")])
    assert (await rewards.compute("boxed", {"answer": 3}, r"\boxed{3}")).reward == 1.0
    assert (await rewards.compute(f"{here}:half", {}, "")).outcome is R.PARTIAL
    assert (await rewards.compute(f"{here}:graded", {}, "text")).detail == "text"
    failed = await rewards.compute(f"{here}:broken", {}, "")
    assert (failed.outcome, "KeyError" in failed.detail) == (R.GRADER_FAILED, True)
    with pytest.raises(InfrastructureError):
        await rewards.compute(f"{here}:disconnected", {}, "")
    with pytest.raises(InvalidRequestError, match=r"write one of boxed, .*math"):
        await rewards.compute("guess", {}, "")
    with pytest.raises(InvalidRequestError, match=r"envgateway\.rewards"):
        await rewards.compute("os:getcwd", {}, "")
    with pytest.raises(ConfigError, match="no module"):
        Rewards(math_pool, paths=["nowhere_at_all:f"])


HOSTILE = [
    "1" + "=1" * 20_000,
    "0." + r"\overline{" * 5000,
    r"\overline{" + "9" * 50_000 + "}",
    "0." + "1" * 40_000 + r"\overline{3}",
    "1e" + "9" * 5000,
    "9" * 5000 + r"\times 10^{99999999}",
    "3.8e999999999",
    "1 1/" + "0" * 5000,
    "x<" * 5000 + "3",
    r"(1,2)\cup" * 3000 + "(3,4)",
    "(" * 20_000 + "7" + ")" * 20_000,
    r"\sqrt{" * 2000 + "-1" + "}" * 2000,
    "i" * 5000,
]


async def test_every_class_of_written_answers_gets_its_verdict() -> None:
    pool = MathPool(ScorerConfig(num_workers=2, timeout_s=5.0))
    reward = MathReward(pool)
    try:
        table = list(pairs())
        results = await asyncio.gather(
            *(reward({"answer": p.truth}, f"So it is $\\boxed{{{p.answer}}}$.") for p in table)
        )
        twice = await reward({"answer": "7"}, r"so \boxed{7}. Checked: \boxed{7}")
        either = await reward({"answer": "7"}, r"so \boxed{8} or \boxed{7}")
    finally:
        await pool.close()
    assert (twice.outcome, either.outcome) == (RewardOutcome.CORRECT, RewardOutcome.WRONG)
    told = [
        (p.kind, p.truth, p.answer, result.outcome.value)
        for p, result in zip(table, results, strict=True)
        if (result.outcome is RewardOutcome.CORRECT) is not p.right or result.outcome is RewardOutcome.GRADER_FAILED
    ]
    assert told == []
    assert len(table) >= 245 and min(Counter(p.kind for p in table).values()) >= 6


@pytest.mark.parametrize("answer", HOSTILE)
def test_the_rules_on_an_answers_form_take_a_time_that_is_linear_in_its_length(answer: str) -> None:
    began = time.process_time()
    text = rewritten(without_unit(answer))
    for truth in ("7", "(1,2)", r"\{1\}", "x<3", "12:30"):
        other_form(truth, text)
    assert isinstance(equations(text), list) and isinstance(alternatives(text), list)
    intervals(text)
    ends_in_bare_list(answer)
    assert time.process_time() - began < 2.0
