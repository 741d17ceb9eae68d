"""The judge on real rows: reference solutions pass, wrong programs do not."""

from __future__ import annotations

from pathlib import Path

import pytest

from services.envgateway.sandbox.pool import SandboxPool
from tests.integration.envgateway.verdicts import check, rows


@pytest.mark.slow
async def test_reference_solutions_pass_and_wrong_programs_fail(pool: SandboxPool, data_root: Path) -> None:
    humaneval, leetcode = rows.humaneval(data_root), rows.leetcode(data_root)
    tally = await check.references(pool, humaneval)
    assert (tally.right, tally.asked) == (164, 164), tally.wrong
    tally = await check.references(pool, leetcode)
    assert tally.share >= 0.99, tally.wrong
    mutants = await check.rejected_mutants(pool, {**humaneval, **leetcode}, 150, seed=1)
    assert mutants.asked == 150 and mutants.share >= 0.98, mutants.wrong
    right, wrong, not_prefixes = await check.contest_solutions(pool, rows.contests(data_root))
    assert (right.right, wrong.right) == (10, 10), (right.wrong, wrong.wrong)
    assert not_prefixes > 0
