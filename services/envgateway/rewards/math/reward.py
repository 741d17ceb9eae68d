"""The ``math`` reward: right when Math-Verify accepts the answer, decided at once without algebra."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from services.common.records.dataset_rows import last_boxed
from services.envgateway.rewards.math.boxed import compare_plainly, ends_in_bare_list, num_boxes
from services.envgateway.rewards.math.pool import MathPool
from services.envgateway.rewards.result import RewardOutcome, RewardResult, truth_of


class MathReward:
    """Boxed answers first, then LaTeX and plain expressions in the text. No numeric tolerance."""

    def __init__(self, pool: MathPool) -> None:
        self._pool = pool

    async def __call__(self, task: Mapping[str, Any], completion: str) -> RewardResult:
        truth = truth_of(task)
        # Several boxes may together be one answer, a set: that is for Math-Verify to say.
        answer = last_boxed(completion) if num_boxes(completion) == 1 else None
        if answer is not None:
            plain = compare_plainly(answer, truth)
            if plain is not None:
                return plain
        elif num_boxes(completion) == 0 and "," not in truth and ends_in_bare_list(completion[-1000:]):
            return RewardResult(outcome=RewardOutcome.WRONG, detail="a list where one value is asked for")
        return await self._pool.grade(truth, completion)
