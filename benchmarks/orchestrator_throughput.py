"""Sequences per second from issue to pulled batch, and how long one takes, through the real orchestrator.

Three workloads over sequences of 1,000 policy tokens, task groups of 8, all processes on ``--cores`` cores:

* *throughput*: replicas answer at once, the trainer pulls batches of 256 and publishes at once, max_staleness 2.
  Counted from the second batch on.
* *latency*: one task group of 8 at a time, due at seeded exponential gaps, 96 sequences per second on average. A group
  is issuable when the version before is published; the clock runs from the moment it is *due* until the trainer holds
  the group.
* *paced*, of ours alone: 96 rollouts per second end, one at a time at seeded exponential gaps, in any order; batches of
  256, max_staleness 2. ``finish_to_batch`` is from the end of the last rollout of a batch until the trainer holds all
  of the batch.

``orchestrator_cpu_ms`` are those of the orchestrator's process per trained sequence when saturated; ``all_cpu_ms`` are
those of all three, which share the cores. ``journal_bytes_per_token`` counts the segments.

Ours: orchestrator, scripted replica and scripted trainer as processes, over gRPC, every record journaled before it is
acknowledged. Theirs (``_polling.py``): a hub polled over HTTP that moves pickled arrays and keeps them in memory only.

    python benchmarks/orchestrator_throughput.py [--quick] [--cores 2] [--seed 7]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import _polling
from benchmarks._cores import pin
from benchmarks._pace import FINISHED_AT, PacedReplica
from benchmarks._peers import NUM_PROMPT_TOKENS, Rollouts, ScriptedReplica, ScriptedTrainer
from benchmarks._processes import ROOT, free_port, kill, orchestrator, spawn, tree_cpu_s
from benchmarks._report import median_and_spread, report
from services.common.config.loading import save_resolved, validate
from services.orchestrator.journal import entries
from services.orchestrator.journal.reader import JournalReader

NUM_TOKENS = 1000
GROUP_SIZE = 8
BATCH = 256
MAX_STALENESS = 2
RATE = 96.0  # sequences per second of the latency and the paced workload
NUM_PACED_SLOTS = 256  # rollouts that are played at once
WARM_UP = 1  # batches


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="at most a minute")
    parser.add_argument("--cores", type=int, default=2, help="cores that all processes share, if there are so many")
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--role", help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.role:
        _play(options.role, options.port, options.seed)
        return
    cores = pin(options.cores)
    seconds, repeats, num_due, num_paced = (4.0, 2, 40, 6) if options.quick else (15.0, 5, 600, 100)
    gaps = _gaps(num_due, options.seed)
    ours, theirs = [], []
    for _ in range(repeats):  # interleaved: a busy machine slows both
        ours.append(_ours(_Throughput(seconds), BATCH, MAX_STALENESS, options.seed))
        theirs.append(_theirs(lambda trainer: _throughput_http(trainer, seconds), BATCH, MAX_STALENESS, options.seed))
    our_delays = _ours(lambda trainer, _: _latency_grpc(trainer, gaps), GROUP_SIZE, 0, options.seed)
    their_delays = _theirs(lambda trainer: _latency_http(trainer, gaps), GROUP_SIZE, 0, options.seed)
    paced = _ours(lambda trainer, _: _paced_grpc(trainer, num_paced), BATCH, MAX_STALENESS, options.seed, paced=True)
    our_rate, spread = median_and_spread([one.rate for one in ours])
    their_rate, their_spread = median_and_spread(theirs)
    report(
        "orchestrator_throughput",
        our_rate,
        their_rate,
        our_rate / their_rate,
        spread,
        unit="sequences of 1000 tokens per second",
        their_spread=their_spread,
        p50_ms=_percentile_ms(our_delays, 50),
        p99_ms=_percentile_ms(our_delays, 99),
        their_p50_ms=_percentile_ms(their_delays, 50),
        their_p99_ms=_percentile_ms(their_delays, 99),
        trained_per_s=our_rate,
        finish_to_batch_p50_ms=_percentile_ms(paced, 50),
        finish_to_batch_p99_ms=_percentile_ms(paced, 99),
        num_paced_batches=len(paced),
        journal_bytes_per_token=statistics.median(one.bytes_per_token for one in ours),
        orchestrator_cpu_ms=statistics.median(one.orchestrator_cpu_ms for one in ours),
        all_cpu_ms=statistics.median(one.all_cpu_ms for one in ours),
        latency_rate=RATE,
        cores=cores,
        repeats=repeats,
        seed=options.seed,
    )


def _percentile_ms(delays: list[float], percent: float) -> float:
    return float(np.percentile(delays, percent) * 1000)


def _gaps(count: int, seed: int) -> list[float]:
    rng = random.Random(seed)
    return [rng.expovariate(RATE / GROUP_SIZE) for _ in range(count)]


# --- ours ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Ours:
    """The parts of one run of ours."""

    run_dir: Path
    orchestrator: subprocess.Popen[bytes]
    replica: subprocess.Popen[bytes]


def _ours(workload: Any, batch: int, max_staleness: int, seed: int, *, paced: bool = False) -> Any:
    with tempfile.TemporaryDirectory(prefix="rollmill-bench-") as folder:
        port = free_port()
        _write_recipe(Path(folder), port, batch, max_staleness)
        run = _Ours(
            Path(folder), orchestrator(folder), spawn(_role("paced replica" if paced else "replica", port, seed))
        )
        try:
            return asyncio.run(_with_trainer(workload, run, f"127.0.0.1:{port}"))
        finally:
            kill([run.orchestrator, run.replica])


async def _with_trainer(workload: Any, run: _Ours, address: str) -> Any:
    trainer = ScriptedTrainer(address)
    try:
        async with asyncio.timeout(60):
            await trainer.join()
            await trainer.publish(0)
        return await workload(trainer, run)
    finally:
        await trainer.close()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Saturated:
    rate: float  # trained sequences per second
    orchestrator_cpu_ms: float  # per trained sequence
    all_cpu_ms: float
    bytes_per_token: float  # of recorded trajectories


class _Throughput:
    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    async def __call__(self, trainer: ScriptedTrainer, run: _Ours) -> _Saturated:
        began: list[float] = []
        count, took_s = await trainer.throughput(self._seconds, WARM_UP, lambda: began.extend(_cpu_s(run)))
        used = [end - begin for begin, end in zip(began, _cpu_s(run), strict=True)]
        return _Saturated(
            rate=count / took_s,
            orchestrator_cpu_ms=1000 * used[0] / count,
            all_cpu_ms=1000 * sum(used) / count,
            bytes_per_token=_bytes_per_token(run.run_dir / "journal"),
        )


def _cpu_s(run: _Ours) -> list[float]:
    """Of orchestrator, replica and trainer, which is this process."""
    return [tree_cpu_s(run.orchestrator.pid), tree_cpu_s(run.replica.pid), time.process_time()]


def _bytes_per_token(journal: Path) -> float:
    """Of the present files, while the orchestrator goes on writing."""
    num_bytes = sum(path.stat().st_size for path in journal.iterdir())
    with closing(JournalReader(journal)) as reader:
        num_records = sum(1 for _ in reader.rows_of(entries.TRAJECTORY))
    return num_bytes / (num_records * (NUM_TOKENS + NUM_PROMPT_TOKENS))


async def _paced_grpc(trainer: ScriptedTrainer, num_batches: int) -> list[float]:
    """Seconds from the end of the last rollout of each batch to the arrival of the batch."""
    delays = []
    for step in range(1, num_batches + WARM_UP + 1):
        pulled = await trainer.pull(step)
        delays.append(time.time() - max(item.sequence.metrics[FINISHED_AT] for item in pulled.sequences))
        await trainer.publish(step)
    return delays[WARM_UP:]


async def _latency_grpc(trainer: ScriptedTrainer, gaps: list[float]) -> list[float]:
    delays: list[float] = []
    await trainer.pull(1)
    due = time.perf_counter()
    for step, gap in enumerate(gaps, start=1):
        due += gap
        await asyncio.sleep(max(0.0, due - time.perf_counter()))
        await trainer.publish(step)
        await trainer.pull(step + 1)
        delays.append(time.perf_counter() - due)
    return delays


def _write_recipe(folder: Path, port: int, batch: int, max_staleness: int) -> None:
    data = folder / "tasks.jsonl"
    data.write_text("".join(json.dumps({"question": f"question {row}", "answer": row}) + "\n" for row in range(1000)))
    tree = {
        "name": "orchestrator-throughput",
        "run": {"id": "benchmark", "steps": 1_000_000},
        "policies": {"model0": {"model": {"path": "none"}, "batch": {"size": batch, "max_staleness": max_staleness}}},
        "data": {"train": {"path": str(data)}},
        "evaluation": {"at_start": False, "at_end": False},
        "rollout": {"group_size": GROUP_SIZE},
        "orchestrator": {"port": port},
        "inference": {"a": {"engine": "scripted", "port": 0}},
        "envgateway": None,
    }
    save_resolved(validate(tree, source="benchmark"), folder)


async def _run_replica(port: int, seed: int, *, paced: bool = False) -> None:
    rollouts = Rollouts(num_tokens=NUM_TOKENS, seed=seed)
    address = f"127.0.0.1:{port}"
    replica = (
        PacedReplica(address, RATE, seed, num_slots=NUM_PACED_SLOTS, rollouts=rollouts)
        if paced
        else ScriptedReplica(address, num_slots=1024, rollouts=rollouts)
    )
    replica.start()
    await replica.drained.wait()
    await replica.close()


# --- theirs ----------------------------------------------------------------------------------------------------------


def _theirs(workload: Any, batch: int, max_staleness: int, seed: int) -> Any:
    port = free_port()
    hub = spawn([*_role("hub", port, seed)], HUB=f"{batch},{max_staleness}")
    try:
        _wait_for(port)
        workers = spawn(_role("workers", port, seed))
        try:
            return workload(_polling.Trainer(port))
        finally:
            kill([workers])
    finally:
        kill([hub])


def _throughput_http(trainer: _polling.Trainer, seconds: float) -> float:
    count, begin, step = 0, 0.0, 0
    while not begin or time.perf_counter() - begin < seconds:
        step += 1
        count += len(trainer.pull())
        trainer.publish(step)
        if step == WARM_UP:
            count, begin = 0, time.perf_counter()
    return count / (time.perf_counter() - begin)


def _latency_http(trainer: _polling.Trainer, gaps: list[float]) -> list[float]:
    delays: list[float] = []
    trainer.pull()
    due = time.perf_counter()
    for step, gap in enumerate(gaps, start=1):
        due += gap
        time.sleep(max(0.0, due - time.perf_counter()))
        trainer.publish(step)
        trainer.pull()
        delays.append(time.perf_counter() - due)
    return delays


# --- processes -------------------------------------------------------------------------------------------------------


def _role(name: str, port: int, seed: int) -> list[str]:
    return [sys.executable, __file__, "--role", name, "--port", str(port), "--seed", str(seed)]


def _play(role: str, port: int, seed: int) -> None:
    if role in ("replica", "paced replica"):
        asyncio.run(_run_replica(port, seed, paced=role == "paced replica"))
    elif role == "hub":
        batch, max_staleness = map(int, os.environ["HUB"].split(","))
        _polling.serve(port, batch, GROUP_SIZE, max_staleness)
    else:
        _polling.replica(port, NUM_TOKENS, num_threads=8, seed=seed)


def _wait_for(port: int) -> None:
    end = time.monotonic() + 20
    while time.monotonic() < end:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.05)
    raise TimeoutError(f"no process listens on port {port} after 20 s")


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    main()
