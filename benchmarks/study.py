"""Losses under stale data, and late rollouts by ``batch.late``: learning curves of a tiny model, seeds with intervals.

Part ``losses`` trains the quickstart's calculator with each loss on batches that are exactly 0, 2, 8 or 32 versions old
(``_virtual_training.py``); part ``late`` runs the asynchronous ring in virtual time with long-tailed tool calls
(``_virtual_ring.py``). Finished cells are kept, so an interrupted study continues, and a changed setting is measured
again. ``docs/study.md`` has the results; its tables and pictures are written by this script.

    make study
    python benchmarks/study.py [--part losses | --part late] [--quick | --tune] [--results FILE] [--docs DIR]
"""

from __future__ import annotations

import argparse
import logging
import tempfile
import time
from collections.abc import Sequence as Seq
from dataclasses import replace
from pathlib import Path
from typing import Any

import structlog
import transformers

from benchmarks._report import report_facts
from benchmarks._study_cells import LOSSES, ROOT, Cell, Results, Study, measure
from benchmarks._study_report import (
    area,
    by_cell,
    collapsed,
    draw_late,
    draw_losses,
    ends_table,
    interval,
    late_table,
    losses_table,
    put_into,
)
from benchmarks._virtual_ring import Pace

PARTS = ("losses", "late")
RATES = (3e-4, 1e-3, 3e-3)  # of --tune
QUICK = Study(
    steps=6, batch_size=32, warm_start_steps=30, warm_start_batch=32, seeds=(0, 1), losses=("m2po", "grpo"),
    staleness=(2,), late_modes=("keep", "drop"), late_staleness=(2,), pace=Pace(num_slots=64, evaluate_every=6),
)  # fmt: skip


def run(study: Study, parts: Seq[str], results: Results, cache: Path) -> int:
    """Measure the missing cells; returns their number."""
    cells = list(study.cells(parts))
    missing = [cell for cell in cells if cell not in results]
    print(
        f"{len(cells) - len(missing)} of {len(cells)} cells are there, {results.num_stale} lines are of other settings"
    )
    for number, cell in enumerate(missing, start=1):
        began = time.perf_counter()
        results.add(cell, measure(study, cell, cache))
        print(f"[{number}/{len(missing)}] {cell}: {time.perf_counter() - began:.1f} s", flush=True)
    return len(missing)


def write_documents(results: Results, docs: Path) -> None:
    """Write tables into ``study.md``, and pictures into its folder."""
    losses, late = results.rows("losses"), results.rows("late")
    tables: dict[str, str] = {}
    if losses:
        draw_losses(losses, docs / "study-losses.png")
        tables |= {"ends": ends_table(losses), "losses": losses_table(losses)}
    if late:
        draw_late(late, docs / "study-late.png")
        tables["late"] = late_table(late)
    document = docs / "study.md"
    for name, table in tables.items():
        if document.is_file():
            put_into(document, name, table)


def tune(study: Study, cache: Path) -> dict[str, dict[str, Any]]:
    """The rule for the one learning rate of all cells: GRPO at staleness 0, the rate with the largest mean of the curve."""
    found: dict[str, dict[str, Any]] = {}
    for rate in RATES:
        rows = [
            measure(replace(study, learning_rate=rate), Cell("losses", "grpo", 0, seed), cache)
            for seed in study.seeds[:3]
        ]
        found[f"{rate:g}"] = {"area": str(interval([area(r["curve"]) for r in rows])),
                              "sampled": str(interval([r["sampled"] for r in rows]))}  # fmt: skip
        print(f"learning rate {rate:g}: {found[f'{rate:g}']}", flush=True)
    return found


def summary(rows: Seq[dict[str, Any]]) -> dict[str, Any]:
    """Sampled reward at the end by "arm/staleness", with its interval, and how many runs collapsed."""
    return {
        f"{arm}/{staleness}": {
            "sampled": interval([r["sampled"] for r in found]).mean,
            "half": interval([r["sampled"] for r in found]).half,
            "seeds": len(found),
            "collapsed": sum(collapsed(r["curve"]) for r in found),
        }
        for (arm, staleness), found in by_cell(rows).items()
    }


def late_summary(rows: Seq[dict[str, Any]]) -> dict[str, Any]:
    """Reward on long and on short tasks at the end by "mode/staleness"."""
    ends = ("reward_long", "reward_short")
    return {
        f"{mode}/{staleness}": {end: interval([r["points"][end][-1] for r in found]).mean for end in ends}
        for (mode, staleness), found in by_cell(rows).items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument(
        "--quick", action="store_true", help="a few cells of a few steps, into a folder that is removed"
    )
    parser.add_argument("--tune", action="store_true", help="only compare learning rates for GRPO at staleness 0")
    parser.add_argument("--part", choices=PARTS, help="one of the two")
    parser.add_argument("--seeds", type=int, help="fewer seeds than the study's")
    parser.add_argument("--losses", nargs="+", choices=sorted(LOSSES), help="fewer losses than the study's")
    parser.add_argument(
        "--minibatches", type=int, help="optimizer updates per batch; name other --results and --docs too"
    )
    parser.add_argument(
        "--results", type=Path, default=ROOT / "docs" / "study.jsonl", help="the file of finished cells"
    )
    parser.add_argument("--docs", type=Path, default=ROOT / "docs", help="where study.md and its pictures are")
    parser.add_argument(
        "--cache", type=Path, default=ROOT / "runs" / "study", help="where starting checkpoints are kept"
    )
    options = parser.parse_args()
    transformers.utils.logging.disable_progress_bar()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING))
    parts = [options.part] if options.part else list(PARTS)
    study = QUICK if options.quick else Study()
    if options.seeds:
        study = replace(study, seeds=study.seeds[: options.seeds])
    if options.losses:
        study = replace(study, losses=tuple(options.losses))
    if options.minibatches:
        study = replace(study, minibatches=options.minibatches)
    if options.tune:
        report_facts("study", tuned=tune(study, options.cache), losses=list(LOSSES))
        return
    with tempfile.TemporaryDirectory() as folder:
        if options.quick:
            options.docs = options.cache = Path(folder)
            options.results = Path(folder) / "study.jsonl"
        results = Results(options.results, study)
        measured = run(study, parts, results, options.cache)
        write_documents(results, options.docs)
    missing = [str(cell) for cell in study.cells(parts) if cell not in results]
    report_facts(
        "study", measured=measured, losses=summary(results.rows("losses")), late=late_summary(results.rows("late")),
        left_out=dict.fromkeys(missing, "not measured"),
    )  # fmt: skip


if __name__ == "__main__":
    main()
