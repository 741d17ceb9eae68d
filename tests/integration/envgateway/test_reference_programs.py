"""The reward ``code`` against recorded verdicts of the reference's grader."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from services.common.config.envgateway import SandboxConfig
from services.envgateway.judge.judge import Judge
from services.envgateway.queue import local_queue
from services.envgateway.rewards.registry import CodeReward
from services.envgateway.sandbox.pool import SandboxPool
from services.orchestrator.tasks.code_rows import code_row
from tests.integration.envgateway.reference_programs import PROGRAMS, Program


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def reward() -> AsyncIterator[CodeReward]:
    config = SandboxConfig(num_slots=2, wall_time_s=6, cpu_time_s=6, memory_bytes=2 << 30, prewarm_scientific=False)
    pool = SandboxPool.start_before_threads(config.model_copy(update={"allow_tier_0": True}))
    yield CodeReward(local_queue(pool, Judge(pool)))
    await pool.close()


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("program", PROGRAMS, ids=[program.name for program in PROGRAMS])
async def test_a_program_is_judged_as_the_reference_does_or_as_the_page_tells(
    reward: CodeReward, program: Program
) -> None:
    tests: dict[str, Any] = {"inputs": program.inputs, "outputs": program.outputs, "fn_name": program.fn_name}
    row = code_row({"problem": "p", "input_output": tests}, program.name)
    result = await reward(row, program.answer)
    right = program.there if program.here is None else program.here
    assert (result.reward == 1.0) is right, result


def test_each_stricter_verdict_is_told_in_the_table_of_the_recipe(repository: Path) -> None:
    told = (repository / "recipes" / "code" / "README.md").read_text()
    for program in PROGRAMS:
        assert program.here is None or program.here is not program.there
        assert f"| {program.row} " in told if program.row else program.here is not False, program.name
