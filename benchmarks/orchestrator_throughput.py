"""Sequences per second from issue to pulled batch, and how long one takes, through the real orchestrator.

Two workloads over sequences of 1,000 policy tokens, task groups of 8, all processes on ``--cores`` cores:

* *throughput*: replicas answer at once, the trainer pulls batches of 256 and publishes at once, max_staleness 2. Counted
  from the second batch on.
* *latency*: one task group of 8 at a time, due at seeded exponential gaps, 96 sequences per second on average. It is
  issuable when the version before is published; the clock runs from the moment it is *due* until the trainer holds it.

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
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import _polling
import numpy as np
from _cores import pin
from _peers import Rollouts, ScriptedReplica, ScriptedTrainer
from _processes import ROOT, free_port, kill, orchestrator, spawn
from _report import median_and_spread, report

from services.common.config.loading import save_resolved, validate

NUM_TOKENS = 1000
GROUP_SIZE = 8
BATCH = 256
MAX_STALENESS = 2
RATE = 96.0  # sequences per second of the latency workload
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
    seconds, repeats, num_due = (4.0, 2, 80) if options.quick else (15.0, 5, 600)
    gaps = _gaps(num_due, options.seed)
    ours, theirs = [], []
    for _ in range(repeats):  # interleaved: a busy machine slows both
        ours.append(_ours(lambda trainer: _throughput_grpc(trainer, seconds), BATCH, MAX_STALENESS, options.seed))
        theirs.append(_theirs(lambda trainer: _throughput_http(trainer, seconds), BATCH, MAX_STALENESS, options.seed))
    our_delays = _ours(lambda trainer: _latency_grpc(trainer, gaps), GROUP_SIZE, 0, options.seed)
    their_delays = _theirs(lambda trainer: _latency_http(trainer, gaps), GROUP_SIZE, 0, options.seed)
    our_rate, spread = median_and_spread(ours)
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


def _ours(workload: Any, batch: int, max_staleness: int, seed: int) -> Any:
    with tempfile.TemporaryDirectory(prefix="millrace-bench-") as folder:
        port = free_port()
        _write_recipe(Path(folder), port, batch, max_staleness)
        processes = [orchestrator(folder), spawn(_role("replica", port, seed))]
        try:
            return asyncio.run(_with_trainer(workload, f"127.0.0.1:{port}"))
        finally:
            kill(processes)


async def _with_trainer(workload: Any, address: str) -> Any:
    trainer = ScriptedTrainer(address)
    try:
        async with asyncio.timeout(60):
            await trainer.join()
            await trainer.publish(0)
        return await workload(trainer)
    finally:
        await trainer.close()


async def _throughput_grpc(trainer: ScriptedTrainer, seconds: float) -> float:
    count, took_s = await trainer.throughput(seconds, WARM_UP)
    return count / took_s


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
    data.write_text("".join(json.dumps({"question": f"question {row}"}) + "\n" for row in range(1000)))
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


async def _run_replica(port: int, seed: int) -> None:
    rollouts = Rollouts(num_tokens=NUM_TOKENS, seed=seed)
    replica = ScriptedReplica(f"127.0.0.1:{port}", num_slots=1024, rollouts=rollouts)
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
    if role == "replica":
        asyncio.run(_run_replica(port, seed))
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
    raise TimeoutError(f"nothing listens on port {port} after 20 s")


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    main()
