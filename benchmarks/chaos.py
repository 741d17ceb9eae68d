"""Is anything lost, done twice or computed otherwise when everything that can fail fails?

A small real run (orchestrator, gateway, trainer, publisher, replicas; a model of 0.36 M parameters whose rollouts call
the gateway) with ``run.deterministic`` goes through a seeded schedule of faults (``_chaos_schedule.py``). Then its
journal is audited against the acknowledgements that replicas got, and the same run is made again without faults: every
version that both published must have the same digest. At last a run that is asynchronous, as runs are by default, is
played with a kill -9 of a replica every 10 s, in turn with stretches without.

    faults         done, by kind
    lost, twice    acknowledged slots and trained sequences without a record; slots, batches, sequences in batches, versions
                   that are there twice
    audit          other violations by rule (benchmarks/_journal_audit.py)
    bit_identical  every version of the faulty run has the digest of the run without faults; ``steps_compared``
    goodput        trained sequences per second with kills, as a share of those without
    resume_p95_s   by killed process, from the kill: the trainer until its next published version, the others until they serve; with medians
    stuck          faults after which the run did not go on; empty is good

    python benchmarks/chaos.py [--quick] [--minutes N | --hours N] [--seed N] [--kinds KIND ...] [--keep]

--quick takes a minute on two free cores, with few kinds of faults. Without an option: 15 minutes.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks._chaos_faults import Faults
from benchmarks._chaos_schedule import Kind, schedule
from benchmarks._chaos_world import DISK_MIB, DISK_MIB_PER_HOUR, FAR, POLICY, ROOT, World, fork_server
from benchmarks._journal_audit import Findings, Rule, audit
from benchmarks._needs import why_not
from benchmarks._report import report_facts
from services.cli.run.processes import ForkServer
from services.common.config.loading import load_recipe
from services.orchestrator.journal import entries
from services.orchestrator.journal.reader import JournalReader

DETERMINISTIC = [
    "run.deterministic=true",
    f"policies.{POLICY}.batch.size=16",
    f"policies.{POLICY}.batch.max_staleness=0",
    f"policies.{POLICY}.trainer.checkpoint_every=3",
    f"policies.{POLICY}.trainer.keep_checkpoints=3",
    "inference={a: {port: 0, engine: torch, num_slots: 8, device: cpu}, b: {port: 0, engine: torch, num_slots: 8, device: cpu}}",
]
ASYNCHRONOUS = [
    f"policies.{POLICY}.batch.size=32",
    f"policies.{POLICY}.batch.max_staleness=2",
    "inference={"
    + ", ".join(f"{name}: {{port: 0, engine: torch, num_slots: 16, device: cpu}}" for name in "abc")
    + "}",
]
KILL_EVERY_S = 10.0
WARM_UP_STEPS = 3
QUICK_KINDS = (
    Kind.KILL_TRAINER, Kind.KILL_ORCHESTRATOR, Kind.KILL_REPLICA, Kind.KILL_PUBLISHER, Kind.CUT_CONNECTIONS, Kind.CLOCK_FORWARD,
)  # fmt: skip
WARM_START = ["warm_start.model0.steps=2", "warm_start.model0.batch_size=32"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="about a minute, with a few kinds of faults")
    parser.add_argument("--minutes", type=float, default=15.0, help="all in all; about half of it with faults")
    parser.add_argument("--hours", type=float, default=0.0)
    parser.add_argument("--seed", type=int, default=1, help="of the schedule and of the run")
    parser.add_argument("--kinds", nargs="*", default=[], help="kinds of faults, such as 'kill trainer'; left out, all")
    parser.add_argument("--keep", action="store_true", help="leave the run directories")
    options = parser.parse_args()
    seconds = 60.0 if options.quick else 60.0 * (60.0 * options.hours or options.minutes)
    folder = Path(tempfile.mkdtemp(prefix="chaos-"))
    forks = fork_server(folder)
    try:
        facts = _measure(folder, forks, options, seconds)
    finally:
        forks.stop()
        if not options.keep:
            shutil.rmtree(folder, ignore_errors=True)
    report_facts("chaos", seed=options.seed, **facts)


def _measure(folder: Path, forks: ForkServer, options: argparse.Namespace, seconds: float) -> dict[str, Any]:
    started_from = [f"policies.{POLICY}.model.path={_starting_checkpoint(folder)}", f"run.seed={options.seed}"]
    no_tmpfs = why_not("tmpfs")
    wanted = {Kind(kind) for kind in options.kinds} or set(QUICK_KINDS if options.quick else Kind)
    kinds = wanted - ({Kind.FULL_DISK} if no_tmpfs else set())
    disk_mib = 0 if no_tmpfs else DISK_MIB + int(seconds / 3600 * DISK_MIB_PER_HOUR)
    stormy = World(folder, "stormy", forks, [*started_from, *DETERMINISTIC], disk_mib=disk_mib)
    try:
        faults, found, digests = _storm(stormy, options.seed, kinds, (0.2 if options.quick else 0.35) * seconds)
    finally:
        stormy.unmount(options.keep)
    calm = World(folder, "calm", forks, [*started_from, *DETERMINISTIC])
    undisturbed = _calm(calm, max(digests, default=0), max(600.0, seconds))
    common = digests.keys() & undisturbed.keys()
    differ = sorted(number for number in common if digests[number] != undisturbed[number])
    busy = World(folder, "busy", forks, [*started_from, *ASYNCHRONOUS])
    goodput = _goodput(
        busy, rounds=1 if options.quick else max(1, int(seconds / 240)), calm_s=8.0 if options.quick else 40.0
    )
    rules = {rule.value: texts for rule, texts in found.violations.items() if rule not in (Rule.LOST, Rule.TWICE)}
    return {
        "faults": dict(faults.done),
        "num_faults": sum(faults.done.values()),
        "lost": len(found.violations[Rule.LOST]),
        "twice": len(found.violations[Rule.TWICE]),
        "audit": {name: len(texts) for name, texts in rules.items()},
        "bit_identical": bool(common) and not differ and max(digests) in common,
        "steps_compared": len(common),
        "first_difference": differ[0] if differ else None,
        **goodput,
        "resume_p95_s": {kind: _percentile(values, 0.95) for kind, values in faults.resumes.items()},
        "resume_median_s": {kind: _percentile(values, 0.5) for kind, values in faults.resumes.items()},
        "slots": found.num_slots,
        "replicas_ever": stormy.num_replicas_ever,
        "excused": found.num_excused,
        "stuck": faults.stuck,
        "violations": [text for texts in found.violations.values() for text in texts[:3]],
        "left_out": {Kind.FULL_DISK.value: no_tmpfs} if no_tmpfs and Kind.FULL_DISK in wanted else {},
    }


def _starting_checkpoint(folder: Path) -> Path:
    """A model that has been trained for a moment, once for all runs."""
    from services.trainer.warm_start import make_starting_checkpoint

    recipe = load_recipe(ROOT / "recipes" / "quickstart", WARM_START, {})
    make_starting_checkpoint(recipe, POLICY, folder)
    return folder / "warm_start" / POLICY


def _storm(world: World, seed: int, kinds: Iterable[Kind], seconds: float) -> tuple[Faults, Findings, dict[int, str]]:
    """The run with faults, audited: the faults, the findings, and the digests of its versions."""
    faults = Faults(world)
    try:
        world.start()
        world.invite(FAR, world.start_proxy())
        world.wait_for(lambda: world.version() >= WARM_UP_STEPS, 120.0, "the first steps")
        until = time.monotonic() + seconds
        for fault in schedule(seed, tuple(kinds)):
            went_on = faults.do(fault)
            sys.stderr.write(f"{fault.kind.value}: {'goes on' if went_on else faults.stuck[-1]}\n")
            if not went_on or time.monotonic() > until:
                break
    except RuntimeError as error:
        faults.stuck.append(str(error))
    finally:
        world.close()
    reader = JournalReader(world.run_dir / "journal")
    try:
        return faults, audit(reader, world.acknowledged()), _digests(reader)
    finally:
        reader.close()


def _calm(world: World, version: int, limit_s: float) -> dict[int, str]:
    """The same run without faults, as far as the other one went."""
    try:
        world.start()
        world.wait_for(lambda: world.version() >= version, limit_s, f"version {version}")
    finally:
        world.close()
    reader = JournalReader(world.run_dir / "journal")
    try:
        return _digests(reader)
    finally:
        reader.close()


def _goodput(world: World, rounds: int, calm_s: float) -> dict[str, float]:
    """Trained sequences per second, in turn without and with a kill -9 of a replica every 10 s, in one run."""
    calm: list[tuple[float, float]] = []
    killed: list[tuple[float, float]] = []
    kills = 0
    try:
        world.start()
        world.wait_for(lambda: world.version() >= WARM_UP_STEPS, 120.0, "the first steps")
        for _ in range(rounds):
            calm.append(_stretch(calm_s / 2))  # before and after: what else the machine does changes
            began, disturbed_s = time.time(), max(KILL_EVERY_S, calm_s // KILL_EVERY_S * KILL_EVERY_S)
            while time.time() - began < disturbed_s - 0.1:
                replicas = world.replicas()
                world.send(replicas[kills % len(replicas)], 9)
                kills += 1
                _stretch(KILL_EVERY_S)
            killed.append((began, time.time()))
            time.sleep(1.0)
            calm.append(_stretch(calm_s / 2))
    finally:
        world.close()
    rows = [json.loads(line) for line in (world.run_dir / "metrics" / "orchestrator.jsonl").read_text().splitlines()]
    steps = [(row["time"], row["num_sequences"]) for row in rows if row["kind"] == "training_step"]
    with_kills, without = _rate(steps, killed), _rate(steps, calm)
    return {
        "goodput": with_kills / without if without else 0.0,
        "sequences_per_s": without,
        "sequences_per_s_with_kills": with_kills,
        "kills": kills,
    }


def _stretch(seconds: float) -> tuple[float, float]:
    began = time.time()
    time.sleep(seconds)
    return began, time.time()


def _rate(steps: list[tuple[float, float]], stretches: list[tuple[float, float]]) -> float:
    trained = sum(count for at, count in steps if any(begin <= at < end for begin, end in stretches))
    return trained / sum(end - begin for begin, end in stretches)


def _digests(reader: JournalReader) -> dict[int, str]:
    found = {}
    for row in reader.rows_of(entries.VERSION):
        if (record := reader.load(row)) is not None:
            found[int(record["number"])] = str(record["digest"])
    return found


def _percentile(values: list[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
