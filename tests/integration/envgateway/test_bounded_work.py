"""Texts and values from outside cost the gateway's event loop little, whatever they are; an odd one fails itself.

The loop's wait is measured in CPU time of the process between two rounds of the loop.
"""

from __future__ import annotations

import asyncio
import gc
import itertools
import json
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import pytest

from services.common.config.envgateway import ScorerConfig
from services.envgateway.calls import RewardOutcome
from services.envgateway.judge.checks import TextCheck, ValueCheck, failure, packed
from services.envgateway.judge.compare import ValueRule
from services.envgateway.judge.records import Comparison, ComparisonMode
from services.envgateway.rewards.math_worker import COMPARISON
from services.envgateway.rewards.pool import MathPool
from services.envgateway.rewards.registry import Rewards

LONG, MOST = 32_000, 8 << 20
BOUND_S = 0.05


def bound_s() -> float:
    """The bound, for a machine on which a linear walk over a text takes no longer than usual."""
    began = time.process_time()
    for _ in "a " * 100_000:
        pass
    return max(BOUND_S, 5 * (time.process_time() - began))


@contextmanager
def no_collection() -> Iterator[None]:
    """Without walks of the collector over all objects of the test process."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@asynccontextmanager
async def a_loop_that_goes_on(what: object) -> AsyncIterator[None]:
    longest, ended = 0.0, False

    async def beat() -> None:
        nonlocal longest
        before = time.process_time()
        while not ended:
            await asyncio.sleep(0.001)
            now = time.process_time()
            longest, before = max(longest, now - before), now

    with no_collection():
        beating = asyncio.create_task(beat())
        await asyncio.sleep(0)
        yield
        ended = True
        await beating
    assert longest < bound_s(), what


@pytest.fixture
async def math_pool() -> AsyncIterator[MathPool]:
    pool = MathPool(ScorerConfig(num_workers=1, timeout_s=1.0))
    await pool.grade("1", "$\\frac12$")
    yield pool
    await pool.close()


REPEATED = (
    "1, ",
    "1 ",
    "1 or ",
    "\n",
    " ",
    "{",
    "\\boxed{",
    "\\boxed{1} or ",
    "</think>",
    "<think>",
    "[1,",
    "$1$ ",
    "1\\mid ",
)


@pytest.mark.slow
async def test_a_repetitive_completion_keeps_no_other_call_waiting(math_pool: MathPool) -> None:
    rewards = Rewards(math_pool)
    for reward, unit, end in itertools.product(("boxed", "math"), REPEATED, ("", "18,", "and so")):
        text = unit * (LONG // len(unit)) + end
        async with a_loop_that_goes_on((reward, unit, end)):
            result = await rewards.compute(reward, {"answer": "18"}, text)
        assert result.outcome is not RewardOutcome.GRADER_FAILED, (reward, unit, end)


SMALL: dict[str, Any] = {
    "ranges": ["l", *(["r", 0, 999_999, 1] for _ in range(200))],
    "set of ranges": ["s", *(["r", 0, 999_999 + n, 1] for n in range(200))],
    "decimals": ["l", *(["D", f"1e-{4900 + n}"] for n in range(99))],
    "fraction": ["F", ["i", "0x" + "7" * 1900], ["i", "0x" + "9" * 1900]],
    "dimensions": ["n", "<i8", ["t", *([2**53 - 1] * 200)], 1],
    "nested": json.loads("[" * 900 + "]" * 900),
    "names": ["o", "\ud800" * 300],
}
LARGE = {
    "fraction": json.dumps(["F", ["i", "0x" + "7" * (MOST // 2 - 50)], ["i", "0x" + "9" * (MOST // 2 - 50)]]),
    "dimensions": json.dumps(["n", "<i8", ["t", *([2**53 - 1] * 400_000)], 1]),
    "copies": json.dumps(["n", "<i8", ["t", *([1] * 450), 400_000], *([1] * 400_000)]),
    "nodes": "[" + "[]," * (MOST // 3 - 1) + "[]]",
    "depth": "[" * (MOST // 2) + "]" * (MOST // 2),
    "text": json.dumps("a" * (MOST - 10)),
    "integer": json.dumps(["i", "0x" + "f" * (MOST - 20)]),
    "digits": "9" * (MOST - 2),
}
EXPECTED = (["l", 1, 2], ["l", *range(200)], ["s", *range(200)], ["d", "a", 1], 5, ["F", 1, 3], "a", None)
RULES = (ValueRule(), ValueRule(strict=True), ValueRule(tolerance=1e-6), ValueRule(unordered=True))


@pytest.mark.parametrize("name", SMALL)
def test_a_small_value_is_compared_at_once(name: str) -> None:
    answer = json.dumps(SMALL[name]).encode()
    assert len(answer) <= 4096 or name in ("ranges", "set of ranges")
    for expected in (*EXPECTED, ["l", *([["l", 1]] * 200)]):
        for rule in RULES:
            began = time.process_time()
            with no_collection():
                told = failure(ValueCheck(expected, rule), answer)
            assert time.process_time() - began < bound_s(), (expected, rule)
            assert told
            told.encode()


@pytest.mark.slow
async def test_a_large_value_uses_up_its_own_comparison_only() -> None:
    pool = MathPool(ScorerConfig(num_workers=1, timeout_s=2.0), COMPARISON)
    right = packed(ValueCheck(["l", 1], ValueRule()))
    try:
        assert await pool.failure(right, b'["l", 1]') == ""
        for name, answer in LARGE.items():
            data = answer.encode()
            for check in (ValueCheck(["F", 1, 3], ValueRule()), TextCheck("1", Comparison(mode=ComparisonMode.FLOAT))):
                frame = packed(check)
                async with a_loop_that_goes_on((name, check)):
                    told = await pool.failure(frame, data)
                assert told, name
                assert len(told) < 1000
            assert await pool.failure(right, b'["l", 1]') == ""
    finally:
        await pool.close()
