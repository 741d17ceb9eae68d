"""Measures the cost of recording the phases of rollouts: sequences per second with and without.

The real orchestrator, a real inference service with the scripted engine (so that no work hides the bookkeeping behind a
model), real gRPC, every record journaled; a scripted trainer pulls batches of 256 and publishes at once. *With*:
`rollout.timing` on, its default, several phases for each rollout. *Without*: `rollout.timing=false`. Interleaved,
from the second batch on. Also processor time of orchestrator and replica per sequence, which tells more than throughput
does on a machine that others use, too; bytes of journal per sequence; microseconds per phase of a rollout's clock; and
microseconds that one record takes from its rollout's clock over the wire into the journal's line, alone in this process
(best of many).

Two workloads: `at once` (the engine answers at once: the worst case, all that is done is bookkeeping) and `paced` (each
request takes as long as 200 tokens at 400 per second: where rollouts wait for tokens, as they do).

    python benchmarks/trace_cost.py [--quick] [--seed 7]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import tempfile
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from benchmarks._peers import ScriptedTrainer
from benchmarks._processes import free_port, kill, orchestrator, spawn
from benchmarks._report import median_and_spread, report
from services.common.config.reading.loading import save_resolved, validate
from services.common.pb import trajectory_pb2
from services.common.records.phases import PhaseKind
from services.common.records.types import (
    Segment,
    Sequence,
    StopReason,
    Trajectory,
)
from services.common.wire import read as read_record
from services.common.wire import write as write_record
from services.inference.rollouts.timing import RolloutClock
from services.orchestrator.journal.reader import JournalReader
from services.orchestrator.journal.records import TRAJECTORY
from services.orchestrator.journal.rollouts import trajectory_to_json
from services.orchestrator.journal.storage.segments import header_bytes

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
    cpu: dict[tuple[str, bool], list[float]] = {}
    for repeat in range(repeats):
        for name, tokens_per_s in WORKLOADS.items():
            for timing in (True, False) if repeat % 2 else (False, True):  # a busy machine slows both
                rate, cpu_us, size = _measure(timing, tokens_per_s, seconds, options.seed)
                rates.setdefault((name, timing), []).append(rate)
                cpu.setdefault((name, timing), []).append(cpu_us)
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
            "cpu_us_with": median_and_spread(cpu[name, True])[0],
            "cpu_us_without": median_and_spread(cpu[name, False])[0],
            "cpu_spread": max(median_and_spread(cpu[name, timing])[1] for timing in (True, False)),
        }
    worst = results["at_once"]
    report(
        "trace_cost",
        worst["with"],
        worst["without"],
        worst["ratio"],
        worst["spread"],
        unit="sequences of 200 tokens per second",
        cpu_us_with=worst["cpu_us_with"],
        cpu_us_without=worst["cpu_us_without"],
        cpu_spread=worst["cpu_spread"],
        paced=results["paced"],
        journal_bytes_with=median_and_spread(sizes[True])[0],
        journal_bytes_without=median_and_spread(sizes[False])[0],
        phase_us=_phase_us(),
        record_us_with=_record_us(True),
        record_us_without=_record_us(False),
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
            with clock.phase(PhaseKind.STEP) as phase:
                phase.detail = "turn 1, reward 0"
        best = min(best, (time.perf_counter() - begin) / number)
    return best * 1e6


def _record_us(timing: bool) -> float:
    """One single-turn record of 200 tokens: clock, to the wire, from the wire, to a line of the journal."""
    random = np.random.default_rng(7)
    said = Segment.policy(random.integers(0, 50_000, NUM_TOKENS), -random.random(NUM_TOKENS), 3)
    sequence = Sequence(policy="model0", segments=(said,), reward=1.0, stop_reason=StopReason.STOP)

    def once() -> None:
        clock = RolloutClock(time.time(), enabled=timing)
        with clock.phase(PhaseKind.GENERATE, "model0") as phase:
            phase.segments = (said,)
        made = Trajectory(
            task_group_id="abc123-00000001", index=0, sequences=(sequence,), reward=1.0, timing=clock.timing()
        )
        sent = trajectory_pb2.Trajectory()
        write_record(made, sent)
        wire = sent.SerializeToString()
        read = read_record(Trajectory, trajectory_pb2.Trajectory.FromString(wire))
        orjson.dumps(trajectory_to_json(read), option=orjson.OPT_SERIALIZE_NUMPY)

    number, best = 500, float("inf")
    for _ in range(20):
        begin = time.process_time()
        for _ in range(number):
            once()
        best = min(best, (time.process_time() - begin) / number)
    return best * 1e6


def _measure(timing: bool, tokens_per_s: float, seconds: float, seed: int) -> tuple[float, float, float]:
    """Sequences per second, microseconds of processor time and bytes of journal per sequence."""
    with tempfile.TemporaryDirectory(prefix="rollmill-bench-") as folder:
        port = free_port()
        _write_recipe(Path(folder), port, timing, tokens_per_s, seed)
        address = f"127.0.0.1:{port}"
        replica = [sys.executable, "-m", "services.inference", "--name", "a", "--orchestrator", address]
        processes = [orchestrator(folder), spawn(replica, PYTHONPATH=f"{Path.cwd()}:{Path(__file__).parent}")]
        try:
            rate, cpu_us = asyncio.run(_throughput(address, seconds, [process.pid for process in processes]))
            return rate, cpu_us, _bytes_per_sequence(Path(folder))
        finally:
            kill(processes)


async def _throughput(address: str, seconds: float, pids: list[int]) -> tuple[float, float]:
    trainer = ScriptedTrainer(address)
    try:
        async with asyncio.timeout(60):
            await trainer.join()
            await trainer.publish(0)
        before: list[float] = []
        count, took_s = await trainer.throughput(seconds, WARM_UP, lambda: before.append(_cpu_s(pids)))
        return count / took_s, (_cpu_s(pids) - before[0]) / count * 1e6
    finally:
        await trainer.close()


def _cpu_s(pids: list[int]) -> float:
    """Processor time of these processes, all threads, user and system."""
    ticks = 0
    for pid in pids:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def _bytes_per_sequence(run_dir: Path) -> float:
    with closing(JournalReader(run_dir / "journal")) as reader:
        lengths = [row.length + header_bytes(row.key) for row in reader.rows_of(TRAJECTORY)]
    return sum(lengths) / max(1, len(lengths))


def _write_recipe(folder: Path, port: int, timing: bool, tokens_per_s: float, seed: int) -> None:
    data = folder / "tasks.jsonl"
    data.write_text("".join(json.dumps({"question": f"question {row}", "answer": row}) + "\n" for row in range(1000)))
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
