"""Checks that faults of numerics stop a run before it trains on them, with their cause, and that healthy runs go on.

Each run is a real one of ``recipes/quickstart``: all services, real gRPC, a tiny model, shortened. Ten have a fault in the
process in which it would occur (``_numerics_hooks.py``): rows that leak in the trainer; in the engine another rope base,
another template, no updates, no adapter, an old head, a temperature 1.1 times as high, bfloat16, exchanged layers, a token
more. A fault that begins with the first update is compared after two. The others have none: every recipe with
``--profile tiny``, and the quickstart with five seeds.

    injected, named    faults, and those that stopped their run at the first comparison that can show them with their cause
    healthy            runs without a fault
    false_alarms       of these, those that were paused
    runs               by fault: the cause, the step that was refused, the message

About four minutes for the faults on two cores. ``--quick`` makes two runs with a fault and one without.

    python benchmarks/numerics_gate.py [--quick] [--only NAME ...] [--keep DIRECTORY]
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks._bench import report_facts
from benchmarks._numerics_hooks import FAULT
from services.common.config.loading import load_recipe
from services.trainer.warm_start import make_starting_checkpoint

ROOT = Path(__file__).resolve().parents[1]
LIMIT_S = 400.0
SEEDS = 5
REFUSED = re.compile(
    r"disagree by (?P<mean>\S+) nats .*? of step (?P<step>\d+);.*?Likely cause: (?P<cause>[^(.]+?)(?: \(|\. Remedy)"
)
WARM_START = ("warm_start.model0.steps=60",)
SHORT = (
    "run.until=null",
    "run.steps=4",
    "evaluation.every=0",
    "evaluation.at_start=false",
    "evaluation.at_end=false",
    "policies.model0.batch.size=32",
    "policies.model0.batch.max_staleness=0",  # every token is fresh
    "policies.model0.algorithm.advantage=grpo",
    "workflow.settings.reward=benchmarks._chaos_hooks:share_of_digits",
    "workflow.settings.max_turns=1",
    "inference.a.num_slots=32",
)


@dataclass(frozen=True, slots=True)
class Case:
    name: str  # as in ``_numerics_hooks.FAULTS``
    cause: str
    step: int = 1  # the batch that is refused
    settings: tuple[str, ...] = ()


INJECTED = (
    Case("packing", "packing"),
    Case("rope_base", "rope base"),
    Case("template", "template"),
    Case("stale_replica", "older weights", 3),
    Case("adapter_not_applied", "adapter not applied", 3, ("policies.model0.adapter={rank: 4, alpha: 8.0}",)),
    Case("head_not_repacked", "head of an older version", 3),
    Case("temperature", "temperature"),
    Case("half_precision", "half precision"),
    Case("shuffled_layer", "order of layers"),
    Case("one_token_more", "one token more or less"),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="two runs with a fault and one without")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="names of faults, recipes or `seed-N`")
    parser.add_argument("--keep", type=Path, metavar="DIRECTORY", help="a directory for the runs")
    options = parser.parse_args()
    injected = [case for case in INJECTED if not options.only or case.name in options.only]
    recipes = sorted(path for path in (ROOT / "recipes").glob("**/recipe.yaml"))
    healthy = {str(path.parent.relative_to(ROOT / "recipes")): path for path in recipes}
    healthy |= {f"seed-{seed}": ROOT / "recipes" / "quickstart" for seed in range(1, SEEDS + 1)}
    chosen = [name for name in healthy if not options.only or name in options.only]
    if options.quick:
        injected, chosen = [INJECTED[6], INJECTED[3]], ["seed-1"]
    with tempfile.TemporaryDirectory(prefix="rollmill-numerics-") as scratch:
        directory = options.keep or Path(scratch)
        found = {case: with_fault(case, directory) for case in injected}
        outputs = {name: _healthy(name, healthy[name], directory) for name in chosen}
    unable = {name for name, (code, output) in outputs.items() if code and not REFUSED.search(output)}
    report_facts(
        "numerics_gate",
        injected=len(found),
        named=sum(told.get("cause") == case.cause and told.get("step") == case.step for case, told in found.items()),
        healthy=len(outputs) - len(unable),
        false_alarms=sum(bool(REFUSED.search(output)) for _, output in outputs.values()),
        left_out={name: outputs[name][1][-300:] for name in sorted(unable)},
        runs={case.name: told for case, told in found.items()},
    )


def with_fault(case: Case, directory: Path) -> dict[str, Any]:
    """Run with a fault; the refusal as cause, step and message, empty without one."""
    hooks = directory / "hooks"
    hooks.mkdir(parents=True, exist_ok=True)
    (hooks / "sitecustomize.py").write_text("from benchmarks import _numerics_hooks\n_numerics_hooks.install()\n")
    start = _checkpoint(directory)
    settings = (*SHORT, "warm_start={}", f"policies.model0.model.path={start}", *case.settings)
    began = time.monotonic()
    code, output = run(ROOT / "recipes" / "quickstart", directory / case.name, settings, fault=case.name, hooks=hooks)
    match = REFUSED.search(output)
    print(f"{case.name}: {match['cause'] if match else 'not refused'}, {time.monotonic() - began:.0f} s", flush=True)
    if match is None:
        return {"code": code, "output": output[-1000:]}
    told = output[match.start() :].split("To accept")[0]
    return {"cause": match["cause"], "step": int(match["step"]), "mean": float(match["mean"]), "message": told[:600]}


def _healthy(name: str, recipe: Path, directory: Path) -> tuple[int, str]:
    seed = name.removeprefix("seed-") if name.startswith("seed-") else None
    settings = ("run.steps=12", "run.until=null", f"run.seed={seed}") if seed else ()
    began = time.monotonic()
    code, output = run(recipe, directory / name.replace("/", "-"), settings, *([] if seed else ["--profile", "tiny"]))
    print(f"{name}: exit code {code}, {time.monotonic() - began:.0f} s", flush=True)
    return code, output


def _checkpoint(directory: Path) -> Path:
    """The starting checkpoint of all runs with a fault, made once."""
    return make_starting_checkpoint(load_recipe(ROOT / "recipes" / "quickstart", WARM_START, {}), "model0", directory)


def run(
    recipe: Path, run_dir: Path, settings: Sequence[str], *options: str, fault: str = "", hooks: Path | None = None
) -> tuple[int, str]:
    """Exit code and output of ``rollmill run``, on one line; interrupted after ``LIMIT_S``."""
    chosen = (*settings, f"run.dir={run_dir.parent}", f"run.id={run_dir.name}")
    given = [part for setting in chosen for part in ("--set", setting)]
    paths = [str(path) for path in (hooks, ROOT) if path is not None]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1", FAULT: fault}
    command = [sys.executable, "-m", "services.cli", "run", str(recipe), *options, *given]
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=log, stderr=subprocess.STDOUT)
        try:
            process.wait(LIMIT_S)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGINT)
            process.wait(60.0)
        log.seek(0)
        return process.returncode, " ".join(log.read().split())


if __name__ == "__main__":
    main()
