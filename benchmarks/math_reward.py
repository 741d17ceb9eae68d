"""Is the math reward right and quick? Against Math-Verify called directly, in one run.

- Agreement: answers of MATH-500, AIME, AMC and MATH train inside free-form completions (boxed, prose, plain words,
  reformulated, wrong, none; made by seed) are graded by the reward and by Math-Verify called directly. Must agree on at
  least 99%.
- Classes: written answers by class (tests/integration/envgateway/math_pairs.py), false positives and negatives of each.
- Throughput: the pool of workers, every case through Math-Verify (the reward's own short cuts off), against one
  Math-Verify in this process times the number of workers. Each repeat has cases that neither side has seen before; the
  sides take turns. Other work on the machine lowers the figure: see ``load``, and ``cpu_ratio``, the CPU time of one
  Math-Verify over that of the pool, owner included: the ratio to expect on idle cores. ``throughput_ratio``
  is ours / (workers x theirs).

The rows are read from the folder that ROLLMILL_DATA_ROOT (or --data) names: math500/, aime24/, aime25/, amc23/,
math_train/.

    python benchmarks/math_reward.py [--quick] [--data DIR] [--workers 2] [--cases 6000] [--per-repeat 2000] [--seed 1]
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import statistics
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

from benchmarks._bench import median_and_spread, report, report_nothing, why_no_rows
from benchmarks._math_cases import ROWS, Case, completions

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from services.common.config.envgateway import ScorerConfig
from services.common.system.machine import num_cores
from services.envgateway.calls import RewardOutcome, RewardResult
from services.envgateway.rewards.pool import MathPool
from services.envgateway.rewards.registry import MathReward
from services.envgateway.sandbox.bare import procfs
from tests.integration.envgateway.math_pairs import pairs

_IN_FLIGHT = 64
_REPEATS, _QUICK_REPEATS = 5, 3
_SHOWN = 12


class Direct:
    """Math-Verify by its public call, in this process."""

    def __init__(self) -> None:
        logging.disable(logging.WARNING)
        from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

        self._parse, self._verify = parse, verify
        self._boxed_first = [LatexExtractionConfig(boxed_match_priority=0), ExprExtractionConfig()]

    def is_right(self, case: Case, boxed_first: bool = False) -> bool:
        settings = {"extraction_config": self._boxed_first} if boxed_first else {}
        gold = self._parse(f"${case.truth}$", **settings)
        return bool(self._verify(gold, self._parse(case.completion, **settings)))


async def graded(grade: Any, cases: list[Any]) -> list[RewardResult]:
    """All of them, some at a time."""
    room = asyncio.Semaphore(_IN_FLIGHT)

    async def one(case: Any) -> RewardResult:
        async with room:
            return await grade(case)  # type: ignore[no-any-return]

    return list(await asyncio.gather(*(one(case) for case in cases)))


async def agreement(pool: MathPool, direct: Direct, cases: list[Case]) -> dict[str, Any]:
    reward = MathReward(pool)
    results = await graded(lambda case: reward({"answer": case.truth}, case.completion), cases)
    agreed: Counter[str] = Counter()
    labelled, as_labelled = 0, 0
    shown = 0
    for case, result in zip(cases, results, strict=True):
        ours = result.outcome is RewardOutcome.CORRECT
        theirs = direct.is_right(case)
        agreed[case.kind] += ours is theirs
        if case.right is not None:
            labelled += 1
            as_labelled += ours is case.right
        if ours is not theirs and shown < _SHOWN:
            shown += 1
            end = case.completion[-60:].replace("\n", " ")
            print(
                f"    differs ({case.kind}): truth {case.truth!r}, ...{end!r}: ours {result.outcome}, theirs {theirs}"
            )
    total = Counter(case.kind for case in cases)
    return {
        "cases": len(cases),
        "agreement": agreed.total() / len(cases),
        "agreement_by_kind": {kind: agreed[kind] / n for kind, n in total.items()},
        "as_labelled": as_labelled / labelled,
        "outcomes": dict(Counter(result.outcome.value for result in results)),
    }


async def classes(pool: MathPool) -> dict[str, Any]:
    """Written answers by class: false verdicts in each."""
    reward = MathReward(pool)
    table = list(pairs())
    results = await graded(lambda pair: reward({"answer": pair.truth}, f"So $\\boxed{{{pair.answer}}}$."), table)
    false: dict[str, Counter[str]] = {"positives": Counter(), "negatives": Counter()}
    for pair, result in zip(table, results, strict=True):
        is_right = result.outcome is RewardOutcome.CORRECT
        if is_right is not pair.right:
            false["positives" if is_right else "negatives"][pair.kind] += 1
            print(f"    false ({pair.kind}): truth {pair.truth!r}, {pair.answer!r}: {result.outcome}")
    return {
        "pairs": len(table),
        "pairs_by_class": dict(Counter(pair.kind for pair in table)),
        "pairs_false_positives": dict(false["positives"]),
        "pairs_false_negatives": dict(false["negatives"]),
    }


def _cpu_s(pool: MathPool) -> float:
    """CPU time of the pool: its workers' and this process's."""
    return procfs.usage(pool.pids).cpu_s + time.process_time()


async def throughput(pool: MathPool, direct: Direct, cases: list[Case], repeats: int, workers: int) -> dict[str, Any]:
    """Interleaved repeats over fresh cases; the first slice warms both sides up and does not count.

    Slices are long, because at the end of each the workers become idle one after the other.
    """
    size = len(cases) // (repeats + 1)
    ours, theirs, ratios, cpu_ratios = [], [], [], []
    for repeat in range(repeats + 1):
        part = cases[repeat * size : (repeat + 1) * size]
        began, cpu_began = time.perf_counter(), _cpu_s(pool)
        await graded(lambda case: pool.grade(case.truth, case.completion), part)
        pool_s, pool_cpu_s = time.perf_counter() - began, _cpu_s(pool) - cpu_began
        began, cpu_began = time.perf_counter(), time.process_time()
        for case in part:
            direct.is_right(case, boxed_first=True)
        direct_s = time.perf_counter() - began
        if repeat:
            ours.append(size / pool_s)
            theirs.append(size / direct_s)
            ratios.append(ours[-1] / (workers * theirs[-1]))
            cpu_ratios.append((time.process_time() - cpu_began) / pool_cpu_s)
            print(f"    {ours[-1]:6.0f}/s by {workers} workers, {theirs[-1]:6.0f}/s in process: {ratios[-1]:.2f}")
    ratio, spread = median_and_spread(ratios)
    return {
        "ours": statistics.median(ours),
        "theirs": statistics.median(theirs),
        "throughput_ratio": ratio,
        "throughput_spread": spread,
        "cpu_ratio": statistics.median(cpu_ratios),
        "gradings_per_repeat": size,
    }


async def measure(data: Path, num_cases: int, repeats: int, per_repeat: int, workers: int, seed: int) -> None:
    direct = Direct()
    pool = MathPool(ScorerConfig(num_workers=workers))
    try:
        num_timed = (repeats + 1) * per_repeat
        fresh = completions(data, num_timed + num_cases, seed)
        print(f"throughput: {repeats} repeats over {per_repeat} fresh completions each")
        speed = await throughput(pool, direct, fresh[:num_timed], repeats, workers)
        print(f"agreement: {num_cases} other completions")
        right = await agreement(pool, direct, fresh[num_timed:])
        print("written answers by class")
        written = await classes(pool)
    finally:
        await pool.close()
    ratio, spread = speed.pop("throughput_ratio"), speed.pop("throughput_spread")
    report(
        "math_reward",
        speed.pop("ours"),
        workers * speed["theirs"],
        ratio,
        spread,
        throughput_ratio=ratio,
        throughput_spread=spread,
        workers=workers,
        seed=seed,
        one_in_process=speed.pop("theirs"),
        **speed,
        **right,
        **written,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer of everything: under a minute")
    parser.add_argument("--data", type=Path, default=os.environ.get("ROLLMILL_DATA_ROOT"), help="folder of the rows")
    parser.add_argument("--workers", type=int, default=max(1, int(num_cores()) // 2), help="of the pool")
    parser.add_argument("--cases", type=int, default=6000, help="completions of the comparison")
    parser.add_argument("--per-repeat", type=int, default=2000, help="completions of each repeat of the timing")
    parser.add_argument("--seed", type=int, default=1, help="of the completions")
    arguments = parser.parse_args()
    if reason := why_no_rows(arguments.data, ROWS.values()):
        report_nothing("math_reward", reason)
        return
    num_cases = min(arguments.cases, 600) if arguments.quick else arguments.cases
    per_repeat = min(arguments.per_repeat, 800) if arguments.quick else arguments.per_repeat
    repeats = _QUICK_REPEATS if arguments.quick else _REPEATS
    asyncio.run(measure(arguments.data, num_cases, repeats, per_repeat, arguments.workers, arguments.seed))


if __name__ == "__main__":
    main()
