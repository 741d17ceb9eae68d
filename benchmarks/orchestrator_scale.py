"""CPU per trajectory and time to dispatch of one orchestrator, from 64 to 1,000 replicas, and with 10,000 task groups
in flight.

Three arms, one after the other, each with an orchestrator of its own:

* ``64`` and ``1000``: so many replicas of 64 slots, all slots taken: 512 and 8,000 task groups of 8 in flight.
* ``groups_10000``: 64 replicas of 1,250 slots: 10,000 task groups of 8 in flight.

The load is the same in every arm: ``--rate`` trajectories per second of 256 tokens (400 by default), which the
orchestrator of the smallest arm carries with a third of a core, so that the orchestrator is measured and not starved:
replicas (``_replica_pool.py``, two processes) and trainer share the two cores. Replicas end whole task groups,
oldest of a replica first, over real gRPC, each replica with a connection and streams of its own; they report as often
as they are asked to (every 2 s, of 1,000 every 5 s) with accounts, peers and gauges. The trainer takes batches of 4,096 and publishes a
version, which is announced to every replica and reported by each at once. Every record is in the journal before its
acknowledgement.

``cpu_ms``: user and system time of the orchestrator's process over acknowledged trajectories, journal included, and
all its work per replica: reports, versions, the watch. ``dispatch``: from the end of a task group, when
its records are given to the stream, until the order for its slots is at the replica; two commits of the journal lie
between. ``late_s``: by how much the replicas fell behind their rate; above a second, the machine was too busy.

    python benchmarks/orchestrator_scale.py [--quick] [--rate 400] [--arms 64,1000,groups_10000]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks._cores import pin
from benchmarks._peers import ScriptedTrainer
from benchmarks._processes import ROOT, free_port, kill, spawn, tree_cpu_s
from benchmarks._replica_pool import PoolPlan
from benchmarks._report import report_facts
from services.common.config.reading.loading import save_resolved, validate

HERE = Path(__file__).resolve().parent
GROUP_SIZE = 8
BATCH = 4096
MAX_STALENESS = 31  # a quota that is larger than all slots: they are what bounds
NUM_TOKENS = 256
LEASE_S = 120.0  # no lease shall run out because the machine is busy
NUM_PROCESSES = 2  # that play the replicas
CORES = 2
MOST_FILES = 8192


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    """How large one orchestrator's pool is."""

    name: str
    num_replicas: int
    num_slots: int

    @property
    def num_groups(self) -> int:
        """In flight when all slots are taken."""
        return self.num_replicas * (self.num_slots // GROUP_SIZE)


ARMS = {
    arm.name: arm
    for arm in (
        Arm(name="64", num_replicas=64, num_slots=64),
        Arm(name="1000", num_replicas=1000, num_slots=64),
        Arm(name="groups_10000", num_replicas=64, num_slots=1256),
    )
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """One arm."""

    cpu_ms: float  # of the orchestrator, per trajectory
    cpu_share: float  # of one core
    p50_dispatch_ms: float
    p99_dispatch_ms: float
    rate: float  # acknowledged per second
    late_s: float
    replicas_cpu_share: float
    num_groups: int  # in flight at the end
    fill_s: float  # from the first replica's start until every slot was taken
    num_batches: int


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="at most a minute and a half")
    parser.add_argument("--rate", type=float, default=400.0, help="trajectories per second")
    parser.add_argument("--arms", default=",".join(ARMS))
    options = parser.parse_args()
    pin(CORES)
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(MOST_FILES, most), most))
    warm_up_s, measured_s = (3.0, 10.0) if options.quick else (10.0, 40.0)
    found: dict[str, Measured] = {}
    for name in options.arms.split(","):
        found[name] = _measure(ARMS[name], options.rate, warm_up_s, measured_s)
        print(name, json.dumps(asdict(found[name])), flush=True)
    facts: dict[str, Any] = {}
    for name, arm in found.items():
        facts |= {
            f"cpu_ms_{name}": arm.cpu_ms,
            f"p50_dispatch_ms_{name}": arm.p50_dispatch_ms,
            f"p99_dispatch_ms_{name}": arm.p99_dispatch_ms,
            f"late_s_{name}": arm.late_s,
            f"cpu_share_{name}": arm.cpu_share,
        }
    base = found.get("64")
    for key, name in (("ratio", "1000"), ("ratio_groups_10000", "groups_10000")):
        if base is not None and name in found:
            facts[key] = found[name].cpu_ms / base.cpu_ms
    report_facts("orchestrator_scale", **facts, rate=options.rate, num_tokens=NUM_TOKENS, batch=BATCH)


def _measure(arm: Arm, rate: float, warm_up_s: float, measured_s: float) -> Measured:
    with tempfile.TemporaryDirectory(prefix="rollmill-bench-") as folder:
        port = free_port()
        _write_recipe(Path(folder), port)
        process = spawn([sys.executable, "-m", "services.orchestrator", "--run-dir", folder])
        try:
            return asyncio.run(_follow(arm, process.pid, f"127.0.0.1:{port}", rate, warm_up_s, measured_s))
        finally:
            kill([process])


@contextmanager
def _replicas(
    arm: Arm, address: str, rate: float, warm_up_s: float, measured_s: float
) -> Iterator[list[subprocess.Popen[str]]]:
    share = arm.num_replicas // NUM_PROCESSES
    plan = PoolPlan(
        address=address,
        prefix="",
        num_replicas=share,
        num_slots=arm.num_slots,
        num_tokens=NUM_TOKENS,
        rate=rate / NUM_PROCESSES,
        warm_up_s=warm_up_s,
        measured_s=measured_s,
    )
    pools = [
        subprocess.Popen(
            [
                sys.executable,
                str(HERE / "_replica_pool.py"),
                json.dumps(asdict(plan) | {"prefix": p}),
            ],
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for p in "abcdefgh"[:NUM_PROCESSES]
    ]
    try:
        yield pools
    finally:
        for pool in pools:
            pool.kill()
            pool.wait(10)


async def _follow(arm: Arm, pid: int, address: str, rate: float, warm_up_s: float, measured_s: float) -> Measured:
    trainer = ScriptedTrainer(address)
    try:
        async with asyncio.timeout(60):
            await trainer.join()
            await trainer.publish(0)
        began = time.perf_counter()
        with _replicas(arm, address, rate, warm_up_s, measured_s) as pools:
            await _all_say("filled", pools)
            fill_s = time.perf_counter() - began
            training = asyncio.create_task(trainer.train(range(1, 1_000_000)), name="trainer")
            for pool in pools:
                assert pool.stdin is not None
                print(file=pool.stdin, flush=True)
            await _all_say("warm", pools)
            cpu_before, began = tree_cpu_s(pid), time.perf_counter()
            trainer.pulled.clear()
            figures = [json.loads(line) for line in await _lines(pools)]
            cpu_s, passed = tree_cpu_s(pid) - cpu_before, time.perf_counter() - began
            if training.done():
                training.result()
            training.cancel()
            await asyncio.gather(training, return_exceptions=True)
    finally:
        await trainer.close()
    _check(arm, figures)
    count = sum(found["num_acknowledged"] for found in figures)
    delays = [delay for found in figures for delay in found["dispatch_s"]]
    return Measured(
        cpu_ms=cpu_s / count * 1000,
        cpu_share=cpu_s / passed,
        p50_dispatch_ms=float(np.percentile(delays, 50) * 1000),
        p99_dispatch_ms=float(np.percentile(delays, 99) * 1000),
        rate=count / passed,
        late_s=max(found["late_s"] for found in figures),
        replicas_cpu_share=sum(found["cpu_s"] for found in figures) / measured_s,
        num_groups=sum(found["num_running_groups"] for found in figures),
        fill_s=fill_s,
        num_batches=len(trainer.pulled),
    )


def _check(arm: Arm, figures: list[dict[str, Any]]) -> None:
    """A figure of another pool than the arm's has no meaning."""
    for fault in ("num_refused", "num_overfilled"):
        if count := sum(found[fault] for found in figures):
            raise SystemExit(f"{arm.name}: {fault} is {count}, and should be 0")
    in_flight = sum(found["num_running_groups"] for found in figures)
    if in_flight < 0.9 * arm.num_groups:
        raise SystemExit(f"{arm.name}: {in_flight} task groups are in flight at the end, not {arm.num_groups}")


async def _lines(pools: list[subprocess.Popen[str]]) -> list[str]:
    lines = await asyncio.gather(*(asyncio.to_thread(_line, pool) for pool in pools))
    return list(lines)


def _line(pool: subprocess.Popen[str]) -> str:
    assert pool.stdout is not None
    line = pool.stdout.readline()
    if not line:
        raise SystemExit("a process of replicas has ended: its traceback is above")
    return line


async def _all_say(word: str, pools: list[subprocess.Popen[str]]) -> None:
    for line in await _lines(pools):
        if line.strip() != word:
            raise SystemExit(f"a process of replicas said {line!r}, not {word!r}")


def _write_recipe(folder: Path, port: int) -> None:
    data = folder / "tasks.jsonl"
    data.write_text("".join(json.dumps({"question": f"question {row}", "answer": row}) + "\n" for row in range(1000)))
    tree = {
        "name": "orchestrator-scale",
        "run": {"id": "benchmark", "steps": 1_000_000},
        "policies": {"model0": {"model": {"path": "none"}, "batch": {"size": BATCH, "max_staleness": MAX_STALENESS}}},
        "data": {"train": {"path": str(data)}},
        "evaluation": {"at_start": False, "at_end": False},
        "rollout": {"group_size": GROUP_SIZE},
        "orchestrator": {"port": port, "lease_s": LEASE_S},
        "inference": {"a": {"engine": "scripted", "port": 0}},
        "envgateway": None,
    }
    save_resolved(validate(tree, source="benchmark"), folder)


if __name__ == "__main__":
    main()
