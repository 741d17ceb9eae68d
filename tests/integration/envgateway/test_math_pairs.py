"""Written answers by class, each against its reference answer: no false verdict in any class."""

from __future__ import annotations

import asyncio
import time
from collections import Counter

import pytest

from services.common.config.envgateway import ScorerConfig
from services.envgateway.calls import RewardOutcome
from services.envgateway.rewards.math import (
    alternatives,
    ends_in_bare_list,
    equations,
    intervals,
    other_form,
    rewritten,
    without_unit,
)
from services.envgateway.rewards.pool import MathPool
from services.envgateway.rewards.registry import MathReward
from tests.integration.envgateway.math_pairs import pairs

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
