"""Are the judge's verdicts right? Reference solutions, mutants of them, and our own contest solutions.

- HumanEval: canonical solutions must be OK, all 164.
- LeetCode rows: reference solutions must be OK, at least 99%.
- Mutants, by seed: one operator, comparison or constant of a reference solution changed. A mutant counts when it answers
  differently from its reference on some case of the tests, which a program that runs both finds out without the judge. At
  least 98% must be rejected.
- Ten Codeforces and CodeContests rows: our right solutions must pass all their cases, our wrong ones fail; every case has
  a verdict, also those after the first failure.

The rows are read from the folder that ROLLMILL_DATA_ROOT (or --data) names: humaneval/, leetcode/, deepcoder_codeforces/,
code_contests/. ``ours`` is the share of right verdicts over everything.

    python benchmarks/judge_verdicts.py [--quick] [--data DIR] [--seed 1] [--mutants 1000]
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import time
from pathlib import Path

from benchmarks._needs import why_no_rows, why_not
from benchmarks._report import report, report_nothing

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from services.common.config.processes.envgateway import SandboxConfig
from services.envgateway.sandbox.pool import SandboxPool
from tests.integration.envgateway.verdicts import check, rows


async def measure(data: Path, num_mutants: int, seed: int) -> None:
    pool = SandboxPool.start_before_threads(SandboxConfig(num_slots=4))
    started = time.monotonic()
    try:
        humaneval, leetcode = rows.humaneval(data), rows.leetcode(data)
        tallies = {
            "humaneval": await check.references(pool, humaneval),
            "leetcode": await check.references(pool, leetcode),
            "mutants": await check.rejected_mutants(pool, {**humaneval, **leetcode}, num_mutants, seed),
        }
        right, wrong, not_prefixes = await check.contest_solutions(pool, rows.contests(data))
        tallies |= {"contest_right": right, "contest_wrong": wrong}
    finally:
        await pool.close()
    for name, tally in tallies.items():
        print(f"{name:14} {tally.right} of {tally.asked}")
        for failed in tally.wrong:
            print("   ", failed)
    total = sum(tally.asked for tally in tallies.values())
    share = sum(tally.right for tally in tallies.values()) / total
    report(
        "judge_verdicts",
        share,
        1.0,
        share,
        0.0,
        tier=pool.tier,
        seed=seed,
        results_that_are_no_prefix=not_prefixes,
        seconds=time.monotonic() - started,
        **{name: {"right": tally.right, "of": tally.asked} for name, tally in tallies.items()},
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="200 mutants: under a minute")
    parser.add_argument("--data", type=Path, default=os.environ.get("ROLLMILL_DATA_ROOT"), help="folder of the rows")
    parser.add_argument("--seed", type=int, default=1, help="of the mutants")
    parser.add_argument("--mutants", type=int, default=1000, help="how many must be judged")
    arguments = parser.parse_args()
    if reason := why_no_rows(arguments.data, rows.FILES) or why_not("isolating sandbox"):
        report_nothing("judge_verdicts", reason)
        return
    asyncio.run(measure(arguments.data, 200 if arguments.quick else arguments.mutants, arguments.seed))


if __name__ == "__main__":
    main()
