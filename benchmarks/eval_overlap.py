"""Measures the cost of an evaluation during training, and its effect on rollouts.

Rollouts are scripted and take as long as they take, trainers are stand-ins without work: training is as fast as
replicas play, so the cost of an evaluation is visible. Two ways, each without and with evaluations that follow
each other without a pause, interleaved:

    spare   four replicas, evaluation.engines 1: one whole replica is pinned, three train (capacity given: 1/4)
    share   one replica, evaluation.share 0.25: a quarter of its slots, not pinned (capacity given: 1/4)

``ratio`` is the sequences trained per second with evaluations over without, for the worse way; it may not fall below
1 - capacity. ``cancelled`` counts rollouts that an evaluation ended: there must be none.

    python benchmarks/eval_overlap.py [--quick] [--cores 2]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks._cores import pin
from benchmarks._peers import Rollouts, ScriptedReplica, ScriptedTrainer
from benchmarks._processes import ROOT, free_port, kill, orchestrator
from benchmarks._report import median_and_spread, report
from services.common.config.reading.loading import save_resolved, validate

WAYS = {"spare": 4, "share": 1}  # replicas
CAPACITY = 0.25
BATCH, GROUP_SIZE, NUM_TOKENS, LATENCY_S = 32, 8, 32, 0.5
SLOTS = 64  # of all replicas together
TASKS = 120
WARM_UP_S = 3.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="at most a minute")
    parser.add_argument("--cores", type=int, default=2, help="cores that all processes share, if there are so many")
    options = parser.parse_args()
    logging.getLogger("asyncio").setLevel(logging.CRITICAL)  # grpc's own tasks, when a replica's streams are closed
    cores = pin(options.cores)
    seconds, repeats = (6.0, 1) if options.quick else (12.0, 4)
    ratios: dict[str, list[float]] = {way: [] for way in WAYS}
    rates: dict[str, tuple[list[float], list[float]]] = {way: ([], []) for way in WAYS}
    evaluated: dict[str, list[dict[str, Any]]] = {way: [] for way in WAYS}
    cancelled = 0
    for _ in range(repeats):  # interleaved: a busy machine slows both
        for way, num_replicas in WAYS.items():
            without, _, ended = _run(num_replicas, seconds, every=0)
            during, results, more = _run(num_replicas, seconds, every=1)
            cancelled += ended + more
            rates[way][0].append(during)
            rates[way][1].append(without)
            ratios[way].append(during / without)
            evaluated[way] += results
    worst = min(WAYS, key=lambda way: statistics.median(ratios[way]))
    ratio, spread = median_and_spread(ratios[worst])
    report(
        "eval_overlap",
        statistics.median(rates[worst][0]),
        statistics.median(rates[worst][1]),
        ratio,
        spread,
        unit="sequences trained per second, with evaluations and without",
        worst=worst,
        capacity=CAPACITY,
        ratios={way: statistics.median(values) for way, values in ratios.items()},
        cancelled=cancelled,
        evaluations={way: len(results) for way, results in evaluated.items()},
        pinned={way: sum(bool(result["pinned"]) for result in results) for way, results in evaluated.items()},
        failed_samples=sum(result["num_failed"] for results in evaluated.values() for result in results),
        stand_in="trainers without work, rollouts are scripted",
        cores=cores,
        repeats=repeats,
    )


def _run(num_replicas: int, seconds: float, every: int) -> tuple[float, list[dict[str, Any]], int]:
    """Sequences trained per second, finished evaluations, and cancelled rollouts."""
    with tempfile.TemporaryDirectory(prefix="rollmill-bench-") as folder:
        port = free_port()
        _write_recipe(Path(folder), port, every)
        process = orchestrator(folder)
        try:
            rate, cancelled = asyncio.run(_measure(f"127.0.0.1:{port}", num_replicas, seconds))
        finally:
            kill([process])
        rows = map(json.loads, (Path(folder) / "metrics" / "orchestrator.jsonl").read_text().splitlines())
        return rate, [row for row in rows if row["kind"] == "evaluation"], cancelled


async def _measure(address: str, num_replicas: int, seconds: float) -> tuple[float, int]:
    rollouts = Rollouts(num_tokens=NUM_TOKENS, latency_s=LATENCY_S)
    replicas = [
        ScriptedReplica(address, replica_id=f"r{n}", num_slots=SLOTS // num_replicas, rollouts=rollouts)
        for n in range(num_replicas)
    ]
    trainer = ScriptedTrainer(address)
    training = asyncio.create_task(trainer.run(1_000_000))
    try:
        for replica in replicas:
            replica.start()
        async with asyncio.timeout(60):
            while len(trainer.pulled) < 2:  # noqa: ASYNC110 - a number to watch, nothing that tells
                await asyncio.sleep(0.05)
        await asyncio.sleep(WARM_UP_S)
        began, first = time.perf_counter(), set(trainer.pulled)
        await asyncio.sleep(seconds)
        trained = sum(len(pulled.sequences) for step, pulled in trainer.pulled.items() if step not in first)
        rate = trained / (time.perf_counter() - began)
        return rate, sum(len(replica.cancelled) for replica in replicas)
    finally:
        training.cancel()
        await asyncio.gather(training, return_exceptions=True)
        await trainer.close()
        for replica in replicas:
            await replica.close()


def _write_recipe(folder: Path, port: int, every: int) -> None:
    data = folder / "tasks.jsonl"
    data.write_text("".join(json.dumps({"question": f"question {row}", "answer": row}) + "\n" for row in range(TASKS)))
    tree: dict[str, Any] = {
        "name": "eval-overlap",
        "run": {"id": "benchmark", "steps": 1_000_000},
        "policies": {
            "model0": {
                "model": {"path": "none"},
                "batch": {"size": BATCH, "max_staleness": 6},
                "trainer": {"port": 0},
                "weights": {"port": 0},
            }
        },
        "data": {"train": {"path": str(data)}, "evaluation": {"held_out": {"path": str(data)}}},
        "evaluation": {"at_start": False, "at_end": False, "every": every, "engines": 1, "share": CAPACITY},
        "rollout": {"group_size": GROUP_SIZE},
        "orchestrator": {"port": port},
        "inference": {"a": {"engine": "scripted", "port": 0}},
        "envgateway": None,
    }
    save_resolved(validate(tree, source="benchmark"), folder)


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    main()
