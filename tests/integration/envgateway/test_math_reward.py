"""Math rewards by real workers."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Mapping
from typing import Any

import pytest

from services.common.config.envgateway import MathRewardConfig
from services.common.errors import InfrastructureError, InvalidRequestError
from services.envgateway.rewards.math import MathReward
from services.envgateway.rewards.math_pool import MathPool
from services.envgateway.rewards.registry import Rewards
from services.envgateway.rewards.result import RewardOutcome, RewardResult

pytest.importorskip("math_verify", reason="the envgateway extra is not installed")
R = RewardOutcome


@pytest.fixture
async def math_pool() -> AsyncIterator[MathPool]:
    pool = MathPool(MathRewardConfig(num_workers=1, timeout_s=3.0))
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
    ("7", "I do not know.", R.UNPARSED),
    ("2", r"\boxed{", R.UNPARSED),
    ("2", "", R.UNPARSED),
]


async def test_golden_answers(math_pool: MathPool) -> None:
    reward = MathReward(math_pool)
    found = [(truth, text, (await reward({"answer": truth}, text)).outcome) for truth, text, _ in GOLDEN]
    assert found == GOLDEN


async def test_plain_integers_start_no_worker(math_pool: MathPool) -> None:
    reward = MathReward(math_pool)
    assert (await reward({"answer": 1786}, r"\boxed{1786}")).outcome is R.CORRECT
    assert (await reward({"answer": 1786}, r"\boxed{1785}")).outcome is R.WRONG
    assert not math_pool._workers


@pytest.mark.slow
@pytest.mark.parametrize(
    "bomb",
    [
        r"\boxed{9^{9^{9^{9^{9}}}}}",
        r"\boxed{((((99!)!)!)!)!}",
        r"\boxed{" + "9" * 100_000 + "}",
        r"\boxed{1}" * 10_000,
        r"\boxed{" + "{" * 5_000 + "1" + "}" * 5_000 + "}",
    ],
)
async def test_bombs_are_bounded_and_cost_no_worker(math_pool: MathPool, bomb: str) -> None:
    reward = MathReward(math_pool)
    async with asyncio.timeout(60):
        result = await reward({"answer": r"\frac{1}{7}"}, bomb)
        assert result.outcome in (R.GRADER_FAILED, R.WRONG, R.UNPARSED)
        assert (await reward({"answer": r"\frac{1}{2}"}, r"\boxed{0.5}")).outcome is R.CORRECT


async def test_a_killed_worker_is_replaced_and_the_answer_graded(math_pool: MathPool) -> None:
    reward = MathReward(math_pool)
    assert (await reward({"answer": r"\frac{1}{2}"}, r"\boxed{0.5}")).outcome is R.CORRECT
    (worker,) = math_pool._workers
    os.kill(worker._process.pid, 9)
    assert (await reward({"answer": r"\frac{1}{2}"}, r"\boxed{0.5}")).outcome is R.CORRECT
    assert math_pool.counts["crashes"] == 1


async def test_cancelling_one_grading_leaves_the_next_its_own_answer(math_pool: MathPool) -> None:
    reward = MathReward(math_pool)
    await reward({"answer": r"\frac{1}{2}"}, r"\boxed{0.5}")
    for _ in range(3):
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.001):
                await reward({"answer": "x^2"}, r"\boxed{y^3 + \sqrt{x}}")
    assert (await reward({"answer": r"\frac{1}{2}"}, r"\boxed{0.5}")).outcome is R.CORRECT


def half(task: Mapping[str, Any], completion: str) -> float:
    return 0.5


async def graded(task: Mapping[str, Any], completion: str) -> RewardResult:
    return RewardResult(outcome=R.CORRECT, reward=2.0, detail=completion)


def broken(task: Mapping[str, Any], completion: str) -> float:
    raise KeyError("no such column")


def disconnected(task: Mapping[str, Any], completion: str) -> float:
    raise InfrastructureError("the judge is gone")


async def test_functions_by_import_path(math_pool: MathPool) -> None:
    rewards = Rewards(math_pool)
    here = __name__
    assert (await rewards.compute("boxed", {"answer": 3}, r"\boxed{3}")).reward == 1.0
    assert (await rewards.compute(f"{here}:half", {}, "")).outcome is R.PARTIAL
    assert (await rewards.compute(f"{here}:graded", {}, "text")).detail == "text"
    failed = await rewards.compute(f"{here}:broken", {}, "")
    assert (failed.outcome, "KeyError" in failed.detail) == (R.GRADER_FAILED, True)
    with pytest.raises(InfrastructureError):
        await rewards.compute(f"{here}:disconnected", {}, "")
    with pytest.raises(InvalidRequestError, match="boxed, math"):
        await rewards.compute("guess", {}, "")
    with pytest.raises(InvalidRequestError, match="no module"):
        await rewards.compute("nowhere_at_all:f", {}, "")
