"""Compares every loss, mask and advantage with the answers of published RL code on the same small batches.

    python benchmarks/oracle_vectors.py [ALGORITHM ...] [--quick]

Reads ROLLMILL_DATA_ROOT/oracle_vectors: answers of verl, AReaL, AstraFlow, RLinf and prime-rl on seeded random batches.
For each algorithm: how many of its cases agree within the oracle's own tolerance, how many differ by design, with the
reason, and the largest difference of those that agree, relative to max(1, |theirs|). It exits with 1 when one differs
without a reason, or when a file has no adapter. ``--quick`` has no effect: the whole takes seconds.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any

from benchmarks._bench import EVERYTHING, report_facts
from benchmarks._oracle_vectors import ADVANTAGE_ADAPTERS as ADVANTAGES
from benchmarks._oracle_vectors import LOSS_ADAPTERS as LOSSES
from benchmarks._oracle_vectors import Adapter, Verdict, algorithms, cases, folder, judge

NAME = "oracle_vectors"
ADAPTERS: dict[str, Adapter] = {**LOSSES, **ADVANTAGES}


def summary(verdicts: Sequence[Verdict]) -> dict[str, Any]:
    """The last line's entry of one algorithm."""
    agreeing = [v for v in verdicts if v.agrees]
    reasons: dict[str, int] = {}
    for verdict in verdicts:
        if not verdict.agrees and verdict.by_design:
            reasons[verdict.by_design] = reasons.get(verdict.by_design, 0) + 1
    return {
        "cases": len(verdicts),
        "agree": len(agreeing),
        "by_design": reasons,
        "differ": len(verdicts) - len(agreeing) - sum(reasons.values()),
        "max_difference": max((v.difference for v in agreeing), default=None),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("algorithms", nargs="*", help="files without their .json; all where none is named")
    parser.add_argument("--quick", action="store_true")
    arguments = parser.parse_args()
    root = folder()
    if root is None:
        report_facts(NAME, left_out={EVERYTHING: "ROLLMILL_DATA_ROOT names no folder with oracle_vectors"})
        return 0
    found: dict[str, dict[str, Any]] = {}
    lacking = []
    for name in arguments.algorithms or algorithms(root):
        if name not in ADAPTERS:
            lacking.append(name)
            continue
        verdicts = [judge(case, ADAPTERS[name](case)) for case in cases(root, name)]
        found[name] = summary(verdicts)
        print(f"{name:24} {found[name]}", flush=True)
        for verdict in verdicts:
            if not verdict.agrees and not verdict.by_design:
                print(f"  {verdict.case.title}: {verdict.output} differs by {verdict.difference:.3g}")
    totals = {key: sum(f[key] for f in found.values()) for key in ("cases", "agree", "differ")}
    by_design = sum(sum(f["by_design"].values()) for f in found.values())
    report_facts(
        NAME,
        **totals,
        by_design=by_design,
        algorithms=found,
        left_out=dict.fromkeys(lacking, "there is no adapter for it"),
    )
    return 1 if totals["differ"] or lacking else 0


if __name__ == "__main__":
    sys.exit(main())
