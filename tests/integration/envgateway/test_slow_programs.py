"""Programs that take all their time: each has its own verdict, however many are judged at once."""

from __future__ import annotations

import asyncio

import pytest

from services.common.errors import CapacityError
from services.envgateway.calls import RewardOutcome, RewardResult
from services.envgateway.judge.judge import Judge
from services.envgateway.queue.local import local_queue
from services.envgateway.rewards import registry
from services.envgateway.sandbox.pool import SandboxPool
from tests.integration.envgateway.conftest import CONFIG

_SLOW = CONFIG.model_copy(update={"num_slots": 2, "judging_time_s": 0.5, "wall_time_s": 0.5})
_CASES = [{"stdin": f"{n}", "expected": f"{n}"} for n in range(100)]
_TASK = {"tests": {"kind": "stdin", "cases": _CASES}}
_OTHER = {"tests": {"kind": "stdin", "cases": _CASES[1:2]}}


@pytest.mark.parametrize("pool", [_SLOW], indirect=True, ids=["slow"])
async def test_slow_programs_of_a_group_are_wrong_and_hold_no_other_task_up(
    pool: SandboxPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry, "WAIT_S", 0.2)
    reward = registry.CodeReward(local_queue(pool, Judge(pool)))
    asked_again = 0

    async def judged(number: int) -> RewardResult:
        nonlocal asked_again
        while True:
            try:
                return await reward(_TASK, f"import time\ntime.sleep(0.3)\nprint(input())  # {number}")
            except CapacityError as full:
                asked_again += 1
                await asyncio.sleep(full.retry_after_s or 0.1)

    group = [asyncio.create_task(judged(number)) for number in range(5)]
    assert (await reward(_OTHER, "print(input())")).outcome is RewardOutcome.CORRECT
    assert {result.outcome for result in await asyncio.gather(*group)} == {RewardOutcome.WRONG}
    assert asked_again
