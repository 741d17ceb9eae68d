"""Races Rollmill against TRL's GRPO to one goal, from one checkpoint, on the same two cores.

Both demonstrations of the repository are trained by both sides, in turns, never at once:

    code    recipes/quickstart-code: one-line programs, judged on hidden inputs
    tool    recipes/quickstart: arithmetic with a calculator, at most three turns

    isolated    Rollmill as the recipe has it: every program in the sandbox
    inprocess   Rollmill with reward and tool as plain functions in the replica's process
    trl-PxG     TRL's GRPOTrainer with P prompts of G rollouts in a batch, reward and tool as plain functions
    isolated-grpo, trl-PxG-reward
                the estimator of the other side: Rollmill with GRPO's advantages, and TRL changed so that the reward is
                the advantage, as in the recipes

The hit is the first moment at which the mean over the last 1,280 sampled rollouts, those of dropped groups included, is
.9. Seconds count from version 0: imports, the loading of the model and the making of the checkpoint do not. CPU seconds
are those of all processes of a side. No side evaluates. ``code_ratio`` and ``tool_ratio`` are TRL's seconds to the hit
over those of Rollmill isolated, ``…_inprocess_ratio`` over those of Rollmill in process, ``…_cpu_ratio`` the same of
CPU seconds; medians over seeds, TRL at its best setting. ``…_grpo_ratio`` has GRPO's advantages on both sides,
``…_changed_ratio`` the reward as advantage on both sides. A run that has not hit at the cap counts with its end
(``cut_off``).

Runs are kept in docs/race.jsonl as they end, so an interrupted race continues; ``--quick`` keeps no results: one seed,
TRL at the setting that was best. ``docs/race.md`` has the choices and their reasons; its table and picture are written
here.

    make race-env
    python benchmarks/race.py [--quick] [--tasks code tool] [--arms isolated trl-32x8 ...] [--seeds 3] [--cap 300]
    [--again]
"""

from __future__ import annotations

import argparse
import hashlib
import json
import logging
import os
import platform
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import structlog

from benchmarks._cores import pin
from benchmarks._race_arms import ARMS, RECIPES, ROOT, Cell, checkpoint_of, run_cell, settings_of
from benchmarks._race_report import draw, ratios, table
from benchmarks._report import report_facts, report_nothing
from benchmarks._study_report import put_into

CAP_S, QUICK_CAP_S = 300.0, 150.0
# The best in docs/race.jsonl.
QUICK_TRL = {"code": ("trl-16x8", "trl-16x8-reward"), "tool": ("trl-8x8", "trl-8x8-reward")}
TRL_PYTHON = ROOT / ".venv-race" / "bin" / "python"


class Results:
    """Finished runs, one JSON line each. A line of other settings, or one cut off, counts as not there."""

    def __init__(self, path: Path) -> None:
        self._path = path
        text = path.read_text() if path.is_file() else ""
        self._lines = [line for line in text.splitlines() if line]
        self._rows: dict[Cell, dict[str, Any]] = {}
        for line in self._lines:
            try:
                row = json.loads(line)
            except ValueError:  # cut off while it was written
                continue
            cell = Cell(row["task"], row["arm"], row["seed"])
            if cell.arm in ARMS and row["settings"] == digest_of(cell):
                self._rows[cell] = row

    def has(self, cell: Cell, cap_s: float) -> bool:
        """Whether the cell was measured, to the hit or to no smaller a cap."""
        row = self._rows.get(cell)
        return row is not None and (row["hit_wall_s"] is not None or row["cap_s"] >= cap_s)

    def rows(self) -> list[dict[str, Any]]:
        return [self._rows[cell] for cell in sorted(self._rows, key=str)]

    def add(self, cell: Cell, values: Mapping[str, Any]) -> None:
        row = {**asdict(cell), "settings": digest_of(cell), **values}
        self._rows[cell] = row
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.open("a") as file:
            file.write("\n" * self._is_torn() + json.dumps(row) + "\n")

    def _is_torn(self) -> bool:
        return self._path.is_file() and not self._path.read_bytes().endswith(b"\n") and self._path.stat().st_size > 0


def digest_of(cell: Cell) -> str:
    return hashlib.blake2b(json.dumps(settings_of(cell), sort_keys=True).encode(), digest_size=8).hexdigest()


def cells(tasks: Sequence[str], arms: Mapping[str, Sequence[str]], num_seeds: int) -> Iterator[Cell]:
    """Seeds outermost, and in each the sides in turns: a slow hour of the machine slows all of them."""
    for seed in range(1, num_seeds + 1):
        for task in tasks:
            yield from (Cell(task, arm, seed) for arm in arms[task])


def machine() -> dict[str, Any]:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    model = next(
        (line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine()
    )
    return {"cpu": model, "cores": len(os.sched_getaffinity(0)), "load": round(os.getloadavg()[0], 2)}


def main() -> None:
    options = _options()
    if not options.trl_python.is_file():
        report_nothing("race", f"{options.trl_python} is missing: make race-env")
        return
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING))
    cores = pin(2)
    num_seeds = options.seeds or (1 if options.quick else 3)
    cap_s = options.cap or (QUICK_CAP_S if options.quick else CAP_S)
    quick = {task: ("isolated", "inprocess", *QUICK_TRL[task]) for task in RECIPES}
    arms = {task: options.arms or (quick[task] if options.quick else ARMS) for task in RECIPES}
    with tempfile.TemporaryDirectory(prefix="rollmill-race-") as folder:
        results = Results(Path(folder) / "race.jsonl" if options.quick else options.results)
        for number, cell in enumerate(cells(options.tasks, arms, num_seeds)):
            if results.has(cell, cap_s) and not options.again:
                continue
            checkpoint_of(cell.task, options.cache)
            place = Path(folder) / str(number)
            place.mkdir()
            before = machine()
            values = run_cell(cell, options.cache, place, cap_s, options.trl_python).as_row()
            results.add(cell, {"cap_s": cap_s, "machine": before, **values})
            print(f"{cell}: hit after {values['hit_wall_s']} s, {values['hit_cpu_s']} CPU s; {values['rollouts']} rollouts"
                  f" in {values['end_wall_s']} s", flush=True)  # fmt: skip
        if not options.quick and results.rows():
            draw(results.rows(), options.docs / "race.png")
            if (document := options.docs / "race.md").is_file():
                put_into(document, "hits", table(results.rows()))
        rows = [row for row in results.rows() if row["task"] in options.tasks]
        print(table(rows))
        report_facts("race", **ratios(rows), cap_s=cap_s, seeds=num_seeds, cores=cores)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one seed, TRL at its best setting, no results are kept")
    parser.add_argument("--tasks", nargs="+", choices=list(RECIPES), default=list(RECIPES))
    parser.add_argument("--arms", nargs="+", choices=ARMS, help="fewer sides than all")
    parser.add_argument("--seeds", type=int, help="1 to so many (3)")
    parser.add_argument("--cap", type=float, help=f"seconds after which a run is cut off ({CAP_S:g})")
    parser.add_argument("--again", action="store_true", help="measure runs that are there already, too")
    parser.add_argument("--results", type=Path, default=ROOT / "docs" / "race.jsonl", help="the file of finished runs")
    parser.add_argument("--docs", type=Path, default=ROOT / "docs", help="where race.md and its picture are")
    parser.add_argument("--cache", type=Path, default=ROOT / "runs" / "race", help="where the checkpoints are kept")
    parser.add_argument("--trl-python", type=Path, default=TRL_PYTHON, help="the interpreter of TRL's environment")
    return parser.parse_args()


if __name__ == "__main__":
    main()
