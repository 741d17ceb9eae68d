"""Checks that the doctor names failures that are injected into real runs, and names none in healthy runs.

Each run is a real one of ``recipes/quickstart-code`` or ``recipes/quickstart`` (all services, real gRPC, a real model),
shortened. Eight have a fault: a learning rate of nearly zero; rewards that are constant, equal within each group, higher
for longer answers, for one answer to everything (drawn at a low temperature), or often missing; an engine that takes no
more weights, and one whose weights are disturbed after each update. The others differ in their seed alone. Runs of one
recipe begin from one checkpoint. The run without weights never ends; it is interrupted, and its directory is read like
that of any broken run.

    injected, named    faults, and those that are among the findings of their run
    named_first        faults that are the first finding of their run
    healthy            runs without a fault
    false_alarms       findings in these
    runs               by name: the findings, whether the policy has learned, training steps

About fifteen minutes on two cores. ``--quick`` makes one run with a fault and one without.

    python benchmarks/doctor.py [--quick] [--only NAME ...] [--keep DIRECTORY]
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks._bench import report_facts
from services.cli.doctor import Failure, Verdict, examine

ROOT = Path(__file__).resolve().parent.parent
LIMIT_S = 300.0
HEALTHY = {"quickstart-code": 5, "quickstart": 5}  # seeds by recipe
SHORT = ("run.steps=24", "run.until=null", "evaluation.samplings={sampled: {temperature: 1.0, max_new_tokens: 28}}",
         "evaluation.every=0", "evaluation.during_samplings=[]")  # fmt: skip
FAULTY = ("workflow.name=benchmarks._doctor_faults:Faulty", "workflow.settings.reward=code")


@dataclass(frozen=True, slots=True)
class Case:
    name: str
    recipe: str
    settings: tuple[str, ...]
    expected: Failure | None = None
    limit_s: float = LIMIT_S
    """A run that goes on for longer is interrupted."""


def _reward(name: str) -> str:
    return f"workflow.settings.reward=benchmarks._doctor_faults:{name}"


CODE = "quickstart-code"
INJECTED = (
    Case("learning rate of zero", CODE, ("policies.model0.optimizer.lr=1e-12",), Failure.NOTHING_LEARNED),
    Case("constant reward", CODE, (_reward("constant"),), Failure.REWARD_CONSTANT),
    Case("reward of the task", CODE, (_reward("of_the_task"),), Failure.GROUPS_EQUAL),
    Case("reward of the length", CODE, (_reward("of_the_length"),), Failure.LENGTHS_RUN_AWAY),
    Case("reward for one answer", CODE, (_reward("for_one_answer"), "run.steps=48", "sampling.temperature=0.6"),
         Failure.ENTROPY_GONE),
    Case("missing rewards", CODE, (_reward("often_raises"), "rollout.max_masked_share=1.0"), Failure.SAMPLES_MASKED),
    Case("engine without updates", CODE, (*FAULTY, "workflow.settings.fault=weights"), Failure.WEIGHTS_NOT_ARRIVING, 75.0),
    Case("engine with noise", CODE, (*FAULTY, "workflow.settings.fault=mismatch"), Failure.MISMATCH),
)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one run with a fault and one without")
    parser.add_argument("--only", nargs="+", help="names of runs", metavar="NAME")
    parser.add_argument("--keep", type=Path, help="a directory for the runs; finished ones in it are not made again")
    options = parser.parse_args()
    healthy = tuple(
        Case(f"healthy {recipe} {seed}", recipe, (f"run.seed={seed}",))
        for recipe, seeds in HEALTHY.items()
        for seed in range(1, seeds + 1)
    )
    cases = [case for case in (*INJECTED, *healthy) if not options.only or case.name in options.only]
    if options.quick:
        cases = [replace(case, settings=(*case.settings, "run.steps=12")) for case in (INJECTED[1], healthy[0])]
    with tempfile.TemporaryDirectory(prefix="rollmill-doctor-") as scratch:
        verdicts = {case: _verdict(case, options.keep or Path(scratch)) for case in cases}
    _report(verdicts)


def _report(verdicts: dict[Case, Verdict]) -> None:
    injected = {case: verdict for case, verdict in verdicts.items() if case.expected is not None}
    found = {case: [finding.failure for finding in verdict.findings] for case, verdict in verdicts.items()}
    without = [case for case in verdicts if case not in injected]
    report_facts(
        "doctor",
        injected=len(injected),
        named=sum(case.expected in found[case] for case in injected),
        named_first=sum(found[case][:1] == [case.expected] for case in injected),
        healthy=len(without),
        false_alarms=sum(len(found[case]) for case in without),
        runs={case.name: _told(verdict) for case, verdict in verdicts.items()},
    )


def _told(verdict: Verdict) -> dict[str, Any]:
    return {
        "findings": {finding.failure.name.lower(): finding.evidence for finding in verdict.findings},
        "learned": [str(learning.change) for learning in verdict.learning],
        "steps": [learning.num_steps for learning in verdict.learning],
    }


def _verdict(case: Case, directory: Path) -> Verdict:
    run_dir = directory / case.name.replace(" ", "-")
    began = time.monotonic()
    if not run_dir.is_dir():
        start = _checkpoint(case.recipe, directory)
        settings = (*SHORT, f"policies.model0.model.path={start}", "warm_start={}", *case.settings)
        _run(case.recipe, run_dir, settings, case.limit_s)
    verdict = examine(run_dir)
    print(f"{case.name}: {[f.failure.name for f in verdict.findings]}, {time.monotonic() - began:.0f} s", flush=True)
    return verdict


def _checkpoint(recipe: str, directory: Path) -> Path:
    """The starting checkpoint of a recipe, made once."""
    run_dir = directory / f"start-{recipe}"
    if not run_dir.is_dir():
        nothing = (
            "run.steps=1",
            "run.until=null",
            "evaluation.every=0",
            "evaluation.at_start=false",
            "evaluation.at_end=false",
        )
        _run(recipe, run_dir, nothing, LIMIT_S)
    return run_dir / "warm_start" / "model0"


def _run(recipe: str, run_dir: Path, settings: tuple[str, ...], limit_s: float) -> None:
    """Run to the end or the limit, then interrupt it like a person does."""
    chosen = (*settings, f"run.dir={run_dir.parent}", f"run.id={run_dir.name}")
    given = [part for setting in chosen for part in ("--set", setting)]
    command = [sys.executable, "-m", "services.cli", "run", str(ROOT / "recipes" / recipe), *given]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    run_dir.parent.mkdir(parents=True, exist_ok=True)
    with (run_dir.parent / f"{run_dir.name}.log").open("wb") as log:
        process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=log, stderr=subprocess.STDOUT)
        try:
            process.wait(limit_s)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGINT)
            process.wait(60.0)


if __name__ == "__main__":
    main()
