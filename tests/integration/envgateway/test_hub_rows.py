"""Tasks made of rows of every dataset on the hub are rewarded: by the real judge and by Math-Verify."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from services.common.config.data import DatasetConfig
from services.common.config.envgateway import ScorerConfig
from services.envgateway.calls import RewardOutcome
from services.envgateway.judge.judge import Judge
from services.envgateway.queue import local_queue
from services.envgateway.rewards.pool import MathPool
from services.envgateway.rewards.registry import CodeReward, MathReward
from services.envgateway.sandbox.pool import SandboxPool
from services.orchestrator.tasks.datasets import open_source
from services.orchestrator.tasks.rows import FORMS, KNOWN, UsableRows
from tests.hub_rows import RIGHT, ROWS
from tests.integration.envgateway.conftest import shared_pool

pytestmark = pytest.mark.asyncio(loop_scope="module")
pool = shared_pool


def tasks(name: str, form: Any) -> UsableRows:
    return open_source(DatasetConfig(path=str(ROWS / f"{name}.jsonl"), form=form), seed=0)


def named(form: str) -> list[str]:
    return sorted(name for name in RIGHT if KNOWN[name].normalise is FORMS[form])


@pytest.mark.parametrize("name", named("code"))
async def test_programs_are_right_or_wrong(name: str, pool: SandboxPool) -> None:
    reward, source = CodeReward(local_queue(pool, Judge(pool))), tasks(name, "code")
    for place, right in enumerate(RIGHT[name]):
        data = source[place].data
        assert (await reward(data, f"```python\n{right}\n```")).outcome is RewardOutcome.CORRECT, data
        if "solution" in data:
            assert (await reward(data, data["solution"])).outcome is RewardOutcome.CORRECT, data
        assert (await reward(data, "```python\nprint('other')\n```")).outcome is RewardOutcome.WRONG, data


@pytest_asyncio.fixture(loop_scope="module")
async def math_pool() -> AsyncIterator[MathPool]:
    pool = MathPool(ScorerConfig(num_workers=1))
    yield pool
    await pool.close()


async def test_answers_are_right_or_wrong(math_pool: MathPool) -> None:
    reward = MathReward(math_pool)
    for name in named("math"):
        source = tasks(name, "math")
        for place, right in enumerate(RIGHT[name]):
            data = source[place].data
            assert (await reward(data, f"So it is {right}.")).outcome is RewardOutcome.CORRECT, (name, data)
            assert (await reward(data, r"So it is \boxed{123456}.")).outcome is RewardOutcome.WRONG, (name, data)
