"""Measures the share of trained rollouts by length, in the four modes of ``batch.late``.

Rollouts of mean 0.9 s with long tails (Pareto alpha 1.6, log-normal sigma 0.5 and 0.9), task groups of 8, batches of
64, 128 slots, training steps of 0.9 s; ``max_staleness`` 1, 2, 4 and 8. Played in virtual time over the orchestrator's
own quota, buffer and late rule (``_starving.py``), so the figures are the same on any machine. Counted are the rollouts
that were issued in a window of steps, and the run goes on until the last of them is decided: one that was cut would
lose its longest ones.

    untrained_share       of the sampled tokens, those that were not trained
    p_trained_above_p99   of the tokens of rollouts longer than 99%, the trained share
    length_bias           mean number of trained tokens of a rollout of which any was trained / mean length of all
    efficiency            of the bound max(training, rollouts)
    age_p50, age_p99, age_max   of trained tokens, in versions

The last line has the worst of the default mode over staleness 2 and more, and all cases.

    python benchmarks/starvation.py [--quick]
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import sys
from pathlib import Path
from typing import get_args

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks._cores import pin
from benchmarks._report import report_facts
from benchmarks._starving import DISTRIBUTIONS, Case, Late, Ring
from services.common.config.training import BatchConfig
from services.common.system.machine import num_cores

STALENESS = (1, 2, 4, 8)
LEAST_STALENESS = 2  # of the worst of the default mode
GOALS = {
    "untrained_share": "<= 0.005",
    "p_trained_above_p99": ">= 0.97",
    "length_bias": "1 +- 0.01",
    "efficiency": ">= 0.9",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="at most a minute")
    parser.add_argument("--seed", type=int, default=7)
    options = parser.parse_args()
    cores = pin(2)
    window = 50 if options.quick else 300
    cases = [
        Case(distribution=distribution, max_staleness=staleness, late=late, window=window, seed=options.seed)
        for distribution in DISTRIBUTIONS
        for staleness in STALENESS
        for late in get_args(Late)
    ]
    with multiprocessing.get_context("spawn").Pool(max(1, round(num_cores()))) as pool:
        figures = pool.map(_measure, cases, chunksize=1)
    each = {_name(case): found for case, found in zip(cases, figures, strict=True)}
    for name, found in each.items():
        print(json.dumps({"case": name, **{key: round(value, 4) for key, value in found.items()}}), flush=True)
    default = BatchConfig().late
    default_cases = [
        found
        for case, found in zip(cases, figures, strict=True)
        if case.late == default and case.max_staleness >= LEAST_STALENESS
    ]
    report_facts(
        "starvation",
        cores=cores,
        default=default,
        untrained_share=max(f["untrained_share"] for f in default_cases),
        p_trained_above_p99=min(f["p_trained_above_p99"] for f in default_cases),
        length_bias=max((f["length_bias"] for f in default_cases), key=lambda bias: abs(bias - 1)),
        efficiency=min(f["efficiency"] for f in default_cases),
        goals=GOALS,
        each=each,
        window=window,
        seed=options.seed,
    )


def _name(case: Case) -> str:
    return f"{case.distribution}/{case.max_staleness}/{case.late}"


def _measure(case: Case) -> dict[str, float]:
    return Ring(case).run().figures(case.bound_s)


if __name__ == "__main__":
    main()
