"""What it costs the ring that records say what their rollouts did and when: sequences per second with and without.

The real orchestrator, a real inference service with the scripted engine (so that nothing hides the bookkeeping behind a
model), real gRPC, every record journaled; a scripted trainer pulls batches of 256 and publishes at once. *With*:
`rollout.timing` as it is by default, several phases for each rollout. *Without*: `rollout.timing=false`. Interleaved, from
the second batch on. Also bytes of journal per sequence, and microseconds per phase of a rollout's clock.

Two workloads: `at once` (the engine answers at once: the worst case, all that is done is bookkeeping) and `paced` (each
request takes as long as 200 tokens at 400 per second: where rollouts wait for tokens, as they do).

    python benchmarks/trace_cost.py [--quick] [--seed 7]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from _peers import ScriptedTrainer
from _processes import free_port, kill, orchestrator, spawn
from _report import median_and_spread, report

from services.common.config.loading import save_resolved, validate
from services.inference.timing import RolloutClock

GROUP_SIZE = 8
BATCH = 256
NUM_TOKENS = 200
WARM_UP = 1  # batches
WORKLOADS = {"at_once": 0.0, "paced": 400.0}  # tokens per second of a request


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="at most a minute")
    parser.add_argument("--seed", type=int, default=7)
    options = parser.parse_args()
    seconds, repeats = (2.0, 2) if options.quick else (4.0, 3)
    rates: dict[tuple[str, bool], list[float]] = {}
    sizes: dict[bool, list[float]] = {True: [], False: []}
    for repeat in range(repeats):
        for name, tokens_per_s in WORKLOADS.items():
            for timing in (True, False) if repeat % 2 else (False, True):  # a busy machine slows both
                rate, size = _measure(timing, tokens_per_s, seconds, options.seed)
                rates.setdefault((name, timing), []).append(rate)
                sizes[timing].append(size)
    results: dict[str, Any] = {}
    for name in WORKLOADS:
        with_it, spread = median_and_spread(rates[name, True])
        without, other_spread = median_and_spread(rates[name, False])
        results[name] = {
            "with": with_it,
            "without": without,
            "ratio": with_it / without,
            "spread": max(spread, other_spread),
        }
    worst = results["at_once"]
    report(
        "trace_cost",
        worst["with"],
        worst["without"],
        worst["ratio"],
        worst["spread"],
        unit="sequences of 200 tokens per second",
        paced=results["paced"],
        journal_bytes_with=median_and_spread(sizes[True])[0],
        journal_bytes_without=median_and_spread(sizes[False])[0],
        phase_us=_phase_us(),
        repeats=repeats,
        seconds=seconds,
    )


def answer(task: dict[str, Any], completion: str) -> float:
    """The reward: different within a group."""
    return len(completion) % 7 / 7


def _phase_us() -> float:
    number = 400
    best = float("inf")
    for _ in range(20):
        clock = RolloutClock(enabled=True)
        begin = time.perf_counter()
        for _ in range(number):
            with clock.phase("step") as phase:
                phase.detail = "turn 1, reward 0"
        best = min(best, (time.perf_counter() - begin) / number)
    return best * 1e6


def _measure(timing: bool, tokens_per_s: float, seconds: float, seed: int) -> tuple[float, float]:
    """Sequences per second, and bytes of journal per sequence."""
    with tempfile.TemporaryDirectory(prefix="millrace-bench-") as folder:
        port = free_port()
        _write_recipe(Path(folder), port, timing, tokens_per_s, seed)
        address = f"127.0.0.1:{port}"
        replica = [sys.executable, "-m", "services.inference", "--name", "a", "--orchestrator", address]
        processes = [orchestrator(folder), spawn(replica, PYTHONPATH=f"{Path.cwd()}:{Path(__file__).parent}")]
        try:
            rate = asyncio.run(_throughput(address, seconds))
            return rate, _bytes_per_sequence(Path(folder))
        finally:
            kill(processes)


async def _throughput(address: str, seconds: float) -> float:
    trainer = ScriptedTrainer(address)
    try:
        async with asyncio.timeout(60):
            await trainer.join()
            await trainer.publish(0)
        count, begin, step = 0, 0.0, 0
        while not begin or time.perf_counter() - begin < seconds:
            step += 1
            pulled = await trainer.pull(step)
            count += len(pulled.sequences)
            await trainer.publish(step)
            if step == WARM_UP:
                count, begin = 0, time.perf_counter()
        return count / (time.perf_counter() - begin)
    finally:
        await trainer.close()


def _bytes_per_sequence(run_dir: Path) -> float:
    segments = list((run_dir / "journal").glob("trajectories*.jsonl")) or list(
        (run_dir / "journal").rglob("*trajectories*")
    )
    lines = sum(segment.read_bytes().count(b"\n") for segment in segments)
    return sum(segment.stat().st_size for segment in segments) / max(1, lines)


def _write_recipe(folder: Path, port: int, timing: bool, tokens_per_s: float, seed: int) -> None:
    data = folder / "tasks.jsonl"
    data.write_text("".join(json.dumps({"question": f"question {row}"}) + "\n" for row in range(1000)))
    tree = {
        "name": "trace-cost",
        "run": {"id": "trace-cost", "steps": 100_000, "seed": seed},
        "policies": {
            "model0": {
                "model": {"path": "unused", "context_length": 1024},
                "batch": {"size": BATCH, "max_staleness": 2, "dynamic_sampling": False},
            }
        },
        "workflow": {"name": "single_turn", "settings": {"reward": "trace_cost:answer"}},
        "sampling": {"max_new_tokens": NUM_TOKENS},
        "data": {"train": {"path": str(data)}},
        "evaluation": {"at_start": False, "at_end": False},
        "rollout": {"group_size": GROUP_SIZE, "timing": timing},
        "orchestrator": {"port": port, "min_free_bytes": 0},
        "inference": {
            "a": {
                "engine": "scripted",
                "port": 0,
                "num_slots": 256,
                "scripted": {"response_tokens": NUM_TOKENS, "tokens_per_s": tokens_per_s},
            }
        },
        "envgateway": None,
    }
    save_resolved(validate(tree, source="trace_cost"), folder)


if __name__ == "__main__":
    main()
