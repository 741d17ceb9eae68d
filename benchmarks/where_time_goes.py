"""Measures the time of a run by process and by stage.

Runs a recipe and reads three things: the processor seconds of every process (/proc), the time accounts of every
component (``summary.json``), and the phases of the rollouts (in the journal).

    processes   CPU seconds by component, its children apart (``envgateway/children`` are the programs)
    stages      seconds by component and activity, of all its lanes together: a replica has one per slot
    rollouts    mean milliseconds of a rollout by phase, and how many of them there were

    make profile [RECIPE=recipes/quickstart-code]
    python benchmarks/where_time_goes.py [RECIPE] [--set KEY=VALUE ...] [--quick]
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks._bench import Sampler, report_facts
from services.orchestrator.journal import entries
from services.orchestrator.journal.reader import JournalReader

ROOT = Path(__file__).resolve().parents[1]
LIMIT_S = 3000.0
SMALLEST_SHARE = 0.005  # of a component's time, that is shown
QUICK = ("run.steps=8", "warm_start.model0.steps=40", "evaluation.at_start=false", "evaluation.at_end=false")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", nargs="?", type=Path, default=ROOT / "recipes" / "quickstart")
    parser.add_argument(
        "--set", action="append", default=[], dest="overrides", help="override a setting, as `rollmill run`"
    )
    parser.add_argument("--quick", action="store_true", help="eight steps of the quickstart from a rough checkpoint")
    options = parser.parse_args()
    overrides = [*(QUICK if options.quick else ()), *options.overrides]
    with tempfile.TemporaryDirectory(prefix="rollmill-profile-") as folder:
        facts = profile(options.recipe, overrides, Path(folder))
    print_tables(facts)
    report_facts("where_time_goes", recipe=options.recipe.name, **facts)


def profile(recipe: Path, overrides: Sequence[str], folder: Path) -> dict[str, Any]:
    """Run the recipe in ``folder`` and read its use of time. Raises ``RuntimeError`` with the last output on failure."""
    run_dir = folder / "run"
    command = [sys.executable, "-m", "services.cli", "run", str(recipe)]
    for override in (*overrides, f"run.dir={folder}", f"run.id={run_dir.name}"):
        command += ["--set", override]
    began = time.perf_counter()
    with (folder / "log").open("w") as log:
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )
        sampler = Sampler(process.pid, run_dir / "pids.json")
        try:
            code = process.wait(LIMIT_S)
        finally:
            sampler.close()
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    if code:
        raise RuntimeError(f"{' '.join(command)} ended with {code}: {(folder / 'log').read_text()[-2000:]}")
    summary = json.loads((run_dir / "summary.json").read_text())
    seconds = time.perf_counter() - began
    last = sampler.curve.components[-1] if sampler.curve.components else {}
    return {
        "seconds": seconds,
        "cpu_seconds": summary["cpu_seconds"],
        "processes": dict(sorted(last.items(), key=lambda item: -item[1])),
        "stages": summary["time"],
        "rollouts": rollout_phases(run_dir),
    }


def rollout_phases(run_dir: Path) -> dict[str, Any]:
    """Milliseconds of a rollout by phase, means over all of them; ``between`` is the time outside all phases."""
    reader = JournalReader(run_dir / "journal")
    seconds: defaultdict[str, float] = defaultdict(float)
    counts: Counter[str] = Counter()
    num = 0
    try:
        for row in reader.rows_of(entries.TRAJECTORY):
            if (record := reader.load(row)) is None:
                continue
            num += 1
            whole = record["finished_at"] - record["started_at"]
            seconds["waiting for a slot"] += max(0.0, record["started_at"] - record["timing"]["accepted_at"])
            for phase in record["timing"]["phases"]:
                seconds[phase["what"]] += phase["seconds"]
                counts[phase["what"]] += 1
                whole -= phase["seconds"]
            seconds["between"] += max(0.0, whole)
    finally:
        reader.close()
    phases = {what: {"ms": 1e3 * total / num, "per_rollout": counts[what] / num} for what, total in seconds.items()}
    return {"num": num, "phases": phases}


def print_tables(facts: Mapping[str, Any]) -> None:
    whole = sum(facts["processes"].values()) or 1.0
    num = facts["rollouts"]["num"] or 1
    print(f"{facts['seconds']:.1f} s, {facts['cpu_seconds']:.1f} CPU s, {facts['rollouts']['num']:,} rollouts\n")
    print(f"{'process':32}{'CPU s':>9}{'share':>8}{'ms per rollout':>17}")
    for name, seconds in facts["processes"].items():
        if seconds >= SMALLEST_SHARE * whole:
            print(f"{name:32}{seconds:9.1f}{seconds / whole:8.1%}{1e3 * seconds / num:17.2f}")
    print(f"\n{'component':32}{'share':>8}  stage")
    for component, shares in facts["stages"].items():
        for what, share in shares.items():
            if share >= SMALLEST_SHARE:
                print(f"{component:32}{share:8.1%}  {what}")
                component = ""
    print(f"\n{'phase of a rollout':32}{'ms':>9}{'per rollout':>13}")
    for what, found in sorted(facts["rollouts"]["phases"].items(), key=lambda item: -item[1]["ms"]):
        print(f"{what:32}{found['ms']:9.1f}{found['per_rollout']:13.2f}")
    print()


if __name__ == "__main__":
    main()
