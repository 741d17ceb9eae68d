"""Measures whether policies that are trained in one run slow each other down.

Four policies share an orchestrator and a replica, each task group played by one of them (``rollout.policies: apart``).
Trainers are stand-ins that sleep through a step, 4x different in speed, and rollouts are scripted: the ring is
measured, not a model. For each policy: its steps per second together, over its steps per second in a run of its own
(ratio).

    solo       one run per policy, the same settings
    together   all four in one run
    killed     all four; the fastest trainer is killed half way: speed of the others afterwards, over their speed before

    python benchmarks/policies_isolation.py [--quick] [--cores 2]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks._bench import ROOT, free_port, median_and_spread, orchestrator, pin, report, spawn
from benchmarks._bench import kill as kill_all
from benchmarks._peers import Rollouts, ScriptedReplica, ScriptedTrainer
from services.common.config.loading import save_resolved, validate

STEP_S = {"a": 0.1, "b": 0.2, "c": 0.3, "d": 0.4}
BATCH, GROUP_SIZE, NUM_TOKENS = 32, 8, 64
WARM_UP_S = 3.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="at most a minute")
    parser.add_argument("--cores", type=int, default=2, help="cores that all processes share, if there are so many")
    parser.add_argument("--replica", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.replica:
        asyncio.run(_replica(*options.replica.split("/")))
        return
    cores = pin(options.cores)
    seconds, repeats = (4.0, 1) if options.quick else (10.0, 3)
    ratios: dict[str, list[float]] = {policy: [] for policy in STEP_S}
    solo: dict[str, list[float]] = {policy: [] for policy in STEP_S}
    together: dict[str, list[float]] = {policy: [] for policy in STEP_S}
    survivors: list[float] = []
    for _ in range(repeats):  # interleaved: a busy machine slows both
        alone = {policy: _run((policy,), seconds)[0][policy] for policy in STEP_S}
        shared, _ = _run(tuple(STEP_S), seconds)
        for policy in STEP_S:
            solo[policy].append(alone[policy])
            together[policy].append(shared[policy])
            ratios[policy].append(shared[policy] / alone[policy])
        before, after = _run(tuple(STEP_S), seconds, kill="a")
        survivors += [after[policy] / before[policy] for policy in STEP_S if policy != "a"]
    worst = min(STEP_S, key=lambda policy: statistics.median(ratios[policy]))
    ratio, spread = median_and_spread(ratios[worst])
    report(
        "policies_isolation",
        statistics.median(together[worst]),
        statistics.median(solo[worst]),
        ratio,
        spread,
        unit="training steps per second of the policy with the worst ratio",
        worst=worst,
        ratios={policy: statistics.median(values) for policy, values in ratios.items()},
        solo_steps_per_s={policy: statistics.median(values) for policy, values in solo.items()},
        after_kill_ratio=statistics.median(survivors),
        after_kill_worst=min(survivors),
        step_s=STEP_S,
        stand_in="trainers sleep, rollouts are scripted",
        cores=cores,
        repeats=repeats,
    )


def _run(policies: tuple[str, ...], seconds: float, kill: str = "") -> tuple[dict[str, float], dict[str, float]]:
    """Steps per second of each policy; with ``kill``, of the time before and after that trainer was killed."""
    with tempfile.TemporaryDirectory(prefix="rollmill-bench-") as folder:
        port = free_port()
        _write_recipe(Path(folder), port, policies)
        replica = [sys.executable, __file__, "--replica", f"{port}/{','.join(policies)}"]
        processes = [orchestrator(folder), spawn(replica)]
        try:
            return asyncio.run(_measure(f"127.0.0.1:{port}", policies, seconds, kill))
        finally:
            kill_all(processes)


async def _measure(
    address: str, policies: tuple[str, ...], seconds: float, kill: str
) -> tuple[dict[str, float], dict[str, float]]:
    trainers = {policy: ScriptedTrainer(address, policy=policy, train_s=STEP_S[policy]) for policy in policies}
    running = {policy: asyncio.create_task(trainer.run(1_000_000)) for policy, trainer in trainers.items()}
    try:
        async with asyncio.timeout(60):
            while not all(trainer.pulled for trainer in trainers.values()):  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        await asyncio.sleep(WARM_UP_S)
        first = await _rates(trainers, seconds)
        if not kill:
            return first, {}
        running[kill].cancel()
        await trainers[kill].close()
        return first, await _rates(trainers, seconds)
    finally:
        for task in running.values():
            task.cancel()
        await asyncio.gather(*running.values(), return_exceptions=True)
        for policy, trainer in trainers.items():
            if policy != kill:
                await trainer.close()


async def _rates(trainers: dict[str, ScriptedTrainer], seconds: float) -> dict[str, float]:
    """Each policy's steps per second, between its own first and last step of the window."""
    seen: dict[str, list[tuple[float, int]]] = {policy: [] for policy in trainers}
    end = time.perf_counter() + seconds
    while (now := time.perf_counter()) < end:
        for policy, trainer in trainers.items():
            step = max(trainer.pulled)
            if not seen[policy] or seen[policy][-1][1] != step:
                seen[policy].append((now, step))
        await asyncio.sleep(0.005)
    return {
        policy: (times[-1][1] - times[1][1]) / (times[-1][0] - times[1][0]) if len(times) > 2 else 0.0
        for policy, times in seen.items()
    }


async def _replica(port: str, policies: str) -> None:
    replica = ScriptedReplica(
        f"127.0.0.1:{port}",
        policies=tuple(policies.split(",")),
        num_slots=512,
        rollouts=Rollouts(num_tokens=NUM_TOKENS, latency_s=0.02),
    )
    replica.start()
    await replica.drained.wait()
    await replica.close()


def _write_recipe(folder: Path, port: int, policies: tuple[str, ...]) -> None:
    data = folder / "tasks.jsonl"
    data.write_text("".join(json.dumps({"question": f"question {row}", "answer": row}) + "\n" for row in range(1000)))
    tree: dict[str, Any] = {
        "name": "policies-isolation",
        "run": {"id": "benchmark", "steps": 1_000_000},
        "policies": {
            policy: {
                "model": {"path": "none"},
                "batch": {"size": BATCH, "max_staleness": 2},
                "trainer": {"port": 0},
                "weights": {"port": 0},
            }
            for policy in policies
        },
        "data": {"train": {"path": str(data)}},
        "evaluation": {"at_start": False, "at_end": False},
        "rollout": {"group_size": GROUP_SIZE, "policies": "apart"},
        "orchestrator": {"port": port},
        "inference": {"a": {"engine": "scripted", "port": 0}},
        "envgateway": None,
    }
    save_resolved(validate(tree, source="benchmark"), folder)


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    main()
