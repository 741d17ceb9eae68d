"""Are the judge's verdicts right? Reference solutions, mutants of them, and our own contest solutions.

- HumanEval: canonical solutions must be OK, all 164.
- LeetCode rows: reference solutions must be OK, at least 99%.
- Mutants, by seed: one operator, comparison or constant of a reference solution changed. A mutant counts when it answers
  differently from its reference on some case of the tests, which a program that runs both finds out without the judge. At
  least 98% must be rejected.
- Rows by data set: how many are read as calls and values (or are stdin or call rows), and how many are opaque: their test
  code must run in the process of the program, which can forge the verdict. Training leaves opaque rows out.
- Ten Codeforces and CodeContests rows: our right solutions must pass all their cases, our wrong ones fail; every case has
  a verdict, also those after the first failure.

The rows are read from the folder that ROLLMILL_DATA_ROOT (or --data) names: humaneval/, leetcode/, deepcoder_codeforces/,
code_contests/; rows are also counted of mbpp/ and livecodebench/, where they are there. ``ours`` is the share of right verdicts over everything.

    python benchmarks/judge_verdicts.py [--quick] [--rows] [--data DIR] [--seed 1] [--mutants 1000]
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks._bench import report, report_nothing, why_no_rows, why_not

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from services.common.config.data import DatasetConfig
from services.common.config.envgateway import SandboxConfig
from services.common.errors import DatasetError
from services.envgateway.sandbox.pool import SandboxPool
from services.orchestrator.tasks.datasets import are_opaque, open_source, why_tests_are_unusable
from tests.integration.envgateway.verdicts import check, rows

_COUNTED = ("humaneval", "mbpp", "leetcode", "livecodebench", "code_contests", "deepcoder_codeforces")


def readable(data: Path) -> dict[str, dict[str, int]]:
    """Rows by how they are judged; a data set that is not there has none."""
    return {name: _readable(sorted((data / name).glob("*.jsonl"))) for name in _COUNTED}


def _readable(files: list[Path]) -> dict[str, int]:
    count = Counter({"rows": 0, "readable": 0, "opaque": 0, "unusable": 0})

    def note(row: Mapping[str, Any], where: str) -> None:
        kind = (
            "unusable" if why_tests_are_unusable(row["tests"]) else "opaque" if are_opaque(row["tests"]) else "readable"
        )
        count[kind] += 1

    for file in files:
        try:
            source = open_source(DatasetConfig(path=str(file), form="code"), seed=0, required=note)
            count["unusable"] += source.left_out.count
        except DatasetError as error:
            print(f"{file}: {error.message}")
    count["rows"] = count["readable"] + count["opaque"] + count["unusable"]
    return dict(count)


def not_there(counted: dict[str, dict[str, int]]) -> dict[str, str]:
    return {name: "the folder of the rows has none of it" for name, kinds in counted.items() if not kinds["rows"]}


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
    counted = readable(data)
    for name, kinds in counted.items():
        print(f"{name:14} {kinds}")
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
        rows=counted,
        left_out=not_there(counted),
        results_that_are_no_prefix=not_prefixes,
        seconds=time.monotonic() - started,
        **{name: {"right": tally.right, "of": tally.asked} for name, tally in tallies.items()},
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="200 mutants: under a minute")
    parser.add_argument("--rows", action="store_true", help="only count the rows that are readable and opaque")
    parser.add_argument("--data", type=Path, default=os.environ.get("ROLLMILL_DATA_ROOT"), help="folder of the rows")
    parser.add_argument("--seed", type=int, default=1, help="of the mutants")
    parser.add_argument("--mutants", type=int, default=1000, help="how many must be judged")
    arguments = parser.parse_args()
    if arguments.rows and arguments.data is not None:
        counted = readable(arguments.data)
        total = sum(kinds["rows"] for kinds in counted.values())
        share = sum(kinds["readable"] for kinds in counted.values()) / total if total else None
        report("judge_verdicts", share, 1.0, share, 0.0, rows=counted, left_out=not_there(counted))
        return
    if reason := why_no_rows(arguments.data, rows.FILES) or why_not("isolating sandbox"):
        report_nothing("judge_verdicts", reason)
        return
    asyncio.run(measure(arguments.data, 200 if arguments.quick else arguments.mutants, arguments.seed))


if __name__ == "__main__":
    main()
