"""Trains with rollouts and training on one device, under a memory limit that is smaller than both halves together.

apart   rollouts and training at the same time, each with its memory: the peak of both, without a limit
shared  the same run with ``placement: shared`` under a limit of ``--share`` of that peak: it must train all steps, within
        the limit and without a process that the kernel ended

``ours`` and ``theirs`` are trained sequences per second of shared and apart, from the first version to the last; on a CPU both
placements have the same cores, so that the ratio shows the cost of the turns. ``limit_gib`` and the peaks are anonymous and
shared memory of all processes of a run (``way`` says how they were limited and measured). Without ``--quick`` apart runs under the
limit too: ``apart_trains_under_the_limit`` must be false; and a shared run of a smaller model loses its trainer twice, its replica
and its orchestrator to kill -9, and must publish every version (``versions_after_kills``).

The model has random weights, and the reward is the parity of the answer's length: a learning signal is not needed here.

    python benchmarks/shared_placement.py [--quick] [--share 0.8]
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import yaml

from benchmarks._bench import ROOT, report, spawn
from recipes.quickstart.model import build

# --- A memory limit over a tree of processes, and the peak of what they hold.


CGROUP_ROOT = Path("/sys/fs/cgroup")
EVERY_S = 0.02
_KILL_WAIT_S = 20.0


@dataclass(slots=True)
class Held:
    """``way``: cgroup-v2, cgroup-v1 or supervisor. ``lost``: processes that the limit has ended, or 1 by the supervisor."""

    way: str
    peak_bytes: int = 0
    lost: int = 0


def way_here() -> str:
    """How a limit can be set on this machine."""
    for way, parent in (("cgroup-v2", CGROUP_ROOT), ("cgroup-v1", CGROUP_ROOT / "memory")):
        if not (parent / ("cgroup.controllers" if way == "cgroup-v2" else "memory.limit_in_bytes")).is_file():
            continue
        probe = parent / f"rollmill-probe-{os.getpid()}"
        try:
            probe.mkdir()
        except OSError:
            continue
        has_limit = (probe / ("memory.max" if way == "cgroup-v2" else "memory.limit_in_bytes")).is_file()
        probe.rmdir()
        if has_limit:
            return way
    return "supervisor"


@contextlib.contextmanager
def limited(
    command: list[str], limit_bytes: int | None, *, environment: dict[str, str], log: Path
) -> Iterator[tuple[subprocess.Popen[bytes], Held]]:
    """Run a command and all its descendants, under a limit if there is one; ends them on the way out."""
    held = Held(way_here())
    group = _group(held.way, limit_bytes)
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, env=environment, stdout=output, stderr=output, start_new_session=True,
            preexec_fn=None if group is None else lambda: (group / "cgroup.procs").write_text("0") and None,
        )  # fmt: skip
    over = threading.Event()
    measure = _of_tree(process.pid) if group is None else _of_group(group, held.way)

    def watch() -> None:
        while not over.wait(EVERY_S):
            held.peak_bytes = max(held.peak_bytes, measure())
            if group is None and limit_bytes is not None and held.peak_bytes > limit_bytes and not held.lost:
                held.lost = 1
                os.killpg(process.pid, signal.SIGKILL)

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        yield process, held
    finally:
        over.set()
        watcher.join()
        if group is not None:
            held.lost = _num_killed(group, held.way)
        _end(process, group)


def _group(way: str, limit_bytes: int | None) -> Path | None:
    if way == "supervisor":
        return None
    group = (
        CGROUP_ROOT if way == "cgroup-v2" else CGROUP_ROOT / "memory"
    ) / f"rollmill-bench-{os.getpid()}-{time.monotonic_ns()}"
    group.mkdir()
    if limit_bytes is not None:
        (group / ("memory.max" if way == "cgroup-v2" else "memory.limit_in_bytes")).write_text(str(limit_bytes))
        with contextlib.suppress(OSError):  # where the kernel does not account for swap
            (group / "memory.swap.max").write_text("0")
    return group


def _of_group(group: Path, way: str) -> Callable[[], int]:
    names = ("anon", "shmem") if way == "cgroup-v2" else ("total_rss", "total_shmem")

    def measure() -> int:
        stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        if names[1] not in stat and way == "cgroup-v1":  # an older kernel: shared memory is mapped cache
            return int(stat["total_rss"]) + int(stat.get("total_mapped_file", 0))
        return sum(int(stat.get(name, 0)) for name in names)

    return measure


def _of_tree(root: int) -> Callable[[], int]:
    """Proportional: memory that several processes share counts once."""

    def measure() -> int:
        total, pending = 0, [root]
        while pending:
            each = Path("/proc") / str(pending.pop())
            try:
                for task in (each / "task").iterdir():
                    pending += map(int, (task / "children").read_text().split())
                lines = (each / "smaps_rollup").read_text().splitlines()
            except (FileNotFoundError, ProcessLookupError, PermissionError):
                continue
            total += sum(1024 * int(line.split()[1]) for line in lines if line.startswith(("Pss_Anon:", "Pss_Shmem:")))
        return total

    return measure


def _num_killed(group: Path, way: str) -> int:
    text = (group / ("memory.events" if way == "cgroup-v2" else "memory.oom_control")).read_text()
    return int(dict(line.split() for line in text.splitlines()).get("oom_kill", 0))


def _end(process: subprocess.Popen[bytes], group: Path | None) -> None:
    """End everything that the command has started."""
    deadline = time.monotonic() + _KILL_WAIT_S
    while group is not None and (pids := (group / "cgroup.procs").read_text().split()):
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
        if time.monotonic() > deadline:
            break
        time.sleep(0.05)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait(_KILL_WAIT_S)
    if group is not None:
        with contextlib.suppress(OSError):
            group.rmdir()


# --- The benchmark itself.


BATCH, STEPS, SLOTS, CONTEXT = 32, 6, 64, 512
LIMIT_S = 240.0
KILLED = ("trainer-model0", "inference-a", "orchestrator", "trainer-model0")  # in this order


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    steps: int  # trained
    peak_gib: float
    rate: float  # sequences per second
    turns: int
    lost: int  # processes that the limit ended


def parity(task: dict[str, Any], completion: str) -> float:
    """1 for an answer of an even number of characters, else 0."""
    return float(len(completion) % 2 == 0)


def recipe(directory: Path, name: str, *, placement: str, steps: int) -> Path:
    """The recipe of one run, as a file."""
    path = directory / f"{name}.yaml"
    tree = {
        "extends": str(ROOT / "recipes" / "base.yaml"),
        "name": name,
        "placement": placement,
        "run": {"id": name, "dir": str(directory / "runs"), "steps": steps, "seed": 1},
        "policies": {
            "model0": {
                "model": {"path": str(directory / "model"), "context_length": CONTEXT},
                "algorithm": {"name": "m2po"},
                "optimizer": {"lr": 1.0e-5},
                "batch": {"size": BATCH, "max_staleness": 1},
                "trainer": {"port": 0, "device": "cpu", "checkpoint_every": 1000, "export_final": False},
                "weights": {"publish_dtype": "float32", "port": 0, "keep_versions": 1},
            }
        },
        "workflow": {"name": "single_turn", "settings": {"reward": "benchmarks.shared_placement:parity"}},
        "data": {
            "train": {"generator": "recipes.quickstart.task:problems", "settings": {"split": "train"}, "id_field": "id"}
        },
        "sampling": {"temperature": 1.0, "max_new_tokens": 48},
        "rollout": {"group_size": 8},
        "evaluation": {"at_start": False, "at_end": False, "every": 0},
        "orchestrator": {"port": 0},
        "inference": {"a": {"port": 0, "engine": "torch", "num_slots": SLOTS, "device": "cpu"}},
        "envgateway": None,
    }
    path.write_text(yaml.safe_dump(tree))
    return path


def play(directory: Path, name: str, limit_bytes: int | None, *, placement: str, steps: int) -> Run:
    """Run a recipe to its end, or until the limit has ended one of its processes."""
    command = [
        sys.executable,
        "-m",
        "services.cli",
        "run",
        str(recipe(directory, name, placement=placement, steps=steps)),
    ]
    variables = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    log = directory / f"{name}.log"
    with limited(command, limit_bytes, environment=variables, log=log) as (process, held):
        end = time.monotonic() + LIMIT_S
        while process.poll() is None and time.monotonic() < end and not (limit_bytes is not None and held.lost):
            time.sleep(0.2)
    events = _events(directory / "runs" / name)
    published = [event for event in events if event["event"] == "version.published"]
    times = [_seconds(event["timestamp"]) for event in published]
    if len(times) < 2 and limit_bytes is None:
        print(log.read_text()[-3000:], file=sys.stderr)
        raise SystemExit(f"the run {name} has not trained: see above")
    rate = BATCH * (len(times) - 1) / (times[-1] - times[0]) if len(times) > 1 else 0.0
    turns = sum(event["event"] == "device.given" for event in events)
    return Run(steps=len(times) - 1, peak_gib=held.peak_bytes / (1 << 30), rate=rate, turns=turns, lost=held.lost)


def play_with_kills(directory: Path, steps: int) -> int:
    """Versions of a shared run whose processes are killed, one after every second version."""
    build(directory / "model", 1, hidden_size=128, num_layers=2, num_heads=4, num_kv_heads=4, head_dim=32)
    path = recipe(directory, "killed", placement="shared", steps=steps)
    command = [sys.executable, "-m", "services.cli", "run", str(path)]
    run, left = directory / "runs" / "killed", list(KILLED)
    end = time.monotonic() + LIMIT_S
    process = spawn(command)
    while process.poll() is None and time.monotonic() < end:
        if left and _num_versions(run) > 2 * (len(KILLED) - len(left)) + 2:
            os.kill(json.loads((run / "pids.json").read_text())[left.pop(0)], signal.SIGKILL)
        time.sleep(0.05)
    if process.poll() is None:
        process.send_signal(signal.SIGINT)
        process.wait(LIMIT_S)
    return _num_versions(run)


def _num_versions(run: Path) -> int:
    return sum(event["event"] == "version.published" for event in _events(run))


def _events(run: Path) -> list[dict[str, Any]]:
    file = run / "logs" / "orchestrator.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.is_file() else []


def _seconds(stamp: str) -> float:
    return datetime.fromisoformat(stamp).timestamp()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="at most a minute")
    parser.add_argument("--share", type=float, default=0.8, help="of the memory of both halves")
    options = parser.parse_args()
    steps = 3 if options.quick else STEPS
    with tempfile.TemporaryDirectory(prefix="rollmill-bench-") as made:
        directory = Path(made)
        hidden, layers = (512, 6) if options.quick else (768, 12)
        build(
            directory / "model", 1, hidden_size=hidden, num_layers=layers, num_heads=8, num_kv_heads=8, head_dim=hidden // 8,
            intermediate_size=4 * hidden, context_length=CONTEXT,
        )  # fmt: skip
        apart = play(directory, "apart", None, placement="apart", steps=steps)
        limit = int(options.share * apart.peak_gib * (1 << 30))
        shared = play(directory, "shared", limit, placement="shared", steps=steps)
        facts: dict[str, Any] = {}
        if not options.quick:
            again = play(directory, "apart-limited", limit, placement="apart", steps=steps)
            facts["apart_trains_under_the_limit"] = again.steps >= steps and not again.lost
            facts["versions_after_kills"] = play_with_kills(directory, steps=10)
    problems = [] if shared.steps >= steps else [f"shared has trained {shared.steps} of {steps} steps"]
    problems += [f"the limit has ended {shared.lost} processes of shared"] if shared.lost else []
    problems += ["the peak of shared is above the limit"] if shared.peak_gib * (1 << 30) > limit else []
    if facts.get("versions_after_kills", 11) != 11:
        problems.append(f"{facts['versions_after_kills']} of 11 versions were published through the kills")
    if facts.get("apart_trains_under_the_limit"):
        problems.append("apart trains under the limit, which is therefore not smaller than both halves")
    report(
        "shared_placement", shared.rate, apart.rate, shared.rate / apart.rate, None, unit="sequences/s", way=way_here(),
        limit_gib=limit / (1 << 30), shared_peak_gib=shared.peak_gib, apart_peak_gib=apart.peak_gib,
        shared_steps=shared.steps, turns=shared.turns, problems=problems, **facts,
    )  # fmt: skip
    if problems:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
