"""The reward ``reasoning_gym``: the score function of the row's own dataset, in a worker that can be killed.

Score functions parse what a policy wrote, some with sympy: as for Math-Verify, an answer that takes too long is worth 0, and
a worker that fails without its doing is no reward.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from services.common.errors import InvalidRequestError
from services.common.reasoning_gym import COLUMN
from services.envgateway.rewards.math.pool import MathPool
from services.envgateway.rewards.result import RewardResult


class ReasoningGymReward:
    def __init__(self, pool: MathPool) -> None:
        self._pool = pool

    async def __call__(self, task: Mapping[str, Any], completion: str) -> RewardResult:
        reference = task.get(COLUMN)
        if not isinstance(reference, Mapping):
            raise InvalidRequestError(
                f"the task has no column {COLUMN}, and the reward reasoning_gym scores tasks of data.train.reasoning_gym only: "
                "name another reward"
            )
        asked = {**reference, "question": task.get("question")}
        return await self._pool.grade(json.dumps(asked), completion)
