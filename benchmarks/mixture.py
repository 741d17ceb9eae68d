"""Shares of several sources among the trained sequences, when one is ten times slower or is thrown away more often.

The real orchestrator as a process, over its real contract; a scripted replica plays, a scripted trainer pulls batches and
publishes. Task groups of 8, batches of 64, max_staleness 2, all on ``--cores`` cores:

* *slow*: two sources, 1 : 1, rollouts of 20 and of 200 ms.
* *dropped*: two sources, 1 : 1, 10% and 80% of whose task groups have equal rewards, which dynamic sampling drops.
* *weights*: three sources, 1 : 2 : 4, rollouts of 20, 200 and 60 ms, 50% of the second dropped.
* *killed*: as *slow*; the orchestrator is killed (SIGKILL) after a third of the steps, and started again.
* *fast only*, *slow only*: one dataset with rollouts of 20 or of 200 ms, for comparison.

``share_error`` is the largest distance of a share from its weight, over all sources and arms, at the end of each arm; it is
counted from the pulled batches themselves, and compared with what the run's metrics say (``told_error``).
``trained_per_s`` of *slow* has a bound: half of its sequences come at the pace of the slow source. Staleness is the mean and
maximum over the steps of each source.

    python benchmarks/mixture.py [--quick] [--cores 2] [--seed 7]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import random
import tempfile
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks._cores import pin
from benchmarks._peers import Rollouts, ScriptedReplica, ScriptedTrainer
from benchmarks._processes import free_port, kill, orchestrator
from benchmarks._report import report_facts
from services.common.config.loading import save_resolved, validate
from services.common.pb import pool_pb2
from services.common.telemetry.metrics import StepKey, source_key

GROUP_SIZE, BATCH, MAX_STALENESS, SLOTS = 8, 64, 2, 512
FAST_S, SLOW_S, MIDDLE_S = 0.02, 0.2, 0.06
NUM_ROWS = 200
STARTED_S = 90.0


@dataclass(frozen=True, slots=True)
class Source:
    weight: float
    seconds: float
    dropped: float = 0.0  # share of its task groups with equal rewards


@dataclass(frozen=True, slots=True)
class Arm:
    sources: Mapping[str, Source]
    killed: bool = False


ARMS = {
    "slow": Arm({"fast": Source(1, FAST_S), "slow": Source(1, SLOW_S)}),
    "dropped": Arm({"kept": Source(1, FAST_S, 0.1), "dropped": Source(1, FAST_S, 0.8)}),
    "weights": Arm({"a": Source(1, FAST_S), "b": Source(2, SLOW_S, 0.5), "c": Source(4, MIDDLE_S)}),
    "killed": Arm({"fast": Source(1, FAST_S), "slow": Source(1, SLOW_S)}, killed=True),
    "fast only": Arm({"": Source(1, FAST_S)}),
    "slow only": Arm({"": Source(1, SLOW_S)}),
}


@dataclass(slots=True)
class Found:
    """What one arm trained."""

    sequences: Counter[str] = field(default_factory=Counter)  # by source, from the pulled batches
    played: Counter[str] = field(default_factory=Counter)  # rollouts by source
    trained_per_s: float = 0.0
    error: float = 0.0
    told_error: float = 0.0
    staleness: dict[str, dict[str, float]] = field(default_factory=dict)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="at most a minute")
    parser.add_argument("--cores", type=int, default=2, help="cores that all processes share, if there are so many")
    parser.add_argument("--seed", type=int, default=7)
    options = parser.parse_args()
    cores = pin(options.cores)
    logging.getLogger("asyncio").setLevel(logging.CRITICAL)  # of streams that a killed orchestrator leaves half open
    steps = 40 if options.quick else 300
    found = {name: asyncio.run(_play(arm, steps, options.seed)) for name, arm in ARMS.items()}
    mixed = {name: one for name, one in found.items() if len(ARMS[name].sources) > 1}
    report_facts(
        "mixture",
        share_error=max(one.error for one in mixed.values()),
        told_error=max(one.told_error for one in mixed.values()),
        error_by_arm={name: one.error for name, one in mixed.items()},
        trained={name: dict(one.sequences) for name, one in mixed.items()},
        played={name: dict(one.played) for name, one in mixed.items()},
        trained_per_s={name: one.trained_per_s for name, one in found.items()},
        staleness={name: one.staleness for name, one in mixed.items()},
        steps=steps,
        batch=BATCH,
        cores=cores,
        seed=options.seed,
    )


async def _play(arm: Arm, steps: int, seed: int) -> Found:
    with tempfile.TemporaryDirectory(prefix="rollmill-mixture-") as folder:
        run_dir, port = Path(folder), free_port()
        _write_recipe(run_dir, port, arm, steps)
        process = orchestrator(folder)
        replica = ScriptedReplica(f"127.0.0.1:{port}", num_slots=SLOTS, rollouts=_rollouts(arm, seed))
        trainer = ScriptedTrainer(f"127.0.0.1:{port}")
        try:
            replica.start()
            async with asyncio.timeout(STARTED_S):
                await trainer.join()
                await trainer.publish(0)
            began = time.perf_counter()
            if arm.killed:
                await trainer.train(range(1, steps // 3 + 1))
                kill([process])
                process = orchestrator(folder)
                await trainer.train(range(steps // 3 + 1, steps + 1))
            else:
                await trainer.train(range(1, steps + 1))
            took_s = time.perf_counter() - began
        finally:
            await trainer.close()
            await replica.close()
            kill([process])
        return _found(arm, replica, trainer, run_dir, took_s)


def _rollouts(arm: Arm, seed: int) -> Rollouts:
    def reward(order: pool_pb2.RunTaskGroup, index: int) -> float:
        drawn = random.Random(f"{seed}/{order.source}/{order.seed}").random()
        return 0.0 if drawn < arm.sources[order.source].dropped else float(index % 2)

    seconds = {name: source.seconds for name, source in arm.sources.items()}
    return Rollouts(reward=reward, seed=seed, latency_of_source_s=seconds)


def _found(arm: Arm, replica: ScriptedReplica, trainer: ScriptedTrainer, run_dir: Path, took_s: float) -> Found:
    found = Found()
    source_of = {order.task_group_id: order.source for order in replica.orders}
    for order in replica.orders:
        found.played[order.source] += len(order.indices)
    for pulled in trainer.pulled.values():
        found.sequences.update(source_of[name.partition("/")[0]] for name in pulled.ids)
    found.trained_per_s = found.sequences.total() / took_s
    if len(arm.sources) == 1:
        return found
    rows = [json.loads(line) for line in (run_dir / "metrics" / "orchestrator.jsonl").read_text().splitlines()]
    steps = [row for row in rows if row["kind"] == "training_step"]
    total = sum(source.weight for source in arm.sources.values())
    for name, source in arm.sources.items():
        share = found.sequences[name] / found.sequences.total()
        found.error = max(found.error, abs(share - source.weight / total))
        told: float = steps[-1][source_key(name, StepKey.SHARE)]
        found.told_error = max(found.told_error, abs(share - told))
        found.staleness[name] = _staleness(steps, name)
    return found


def _staleness(rows: list[dict[str, Any]], source: str) -> dict[str, float]:
    means = [row[key] for row in rows if (key := source_key(source, StepKey.STALENESS_MEAN)) in row]
    most = [row[key] for row in rows if (key := source_key(source, StepKey.STALENESS_MAX)) in row]
    return {"mean": sum(means) / len(means), "max": max(most)}


def _write_recipe(folder: Path, port: int, arm: Arm, steps: int) -> None:
    data = folder / "tasks.jsonl"
    data.write_text(
        "".join(json.dumps({"question": f"question {row}", "answer": row}) + "\n" for row in range(NUM_ROWS))
    )
    rows = {"path": str(data)}
    mixed = [{**rows, "source": name, "weight": source.weight} for name, source in arm.sources.items()]
    tree = {
        "name": "mixture",
        "run": {"id": "mixture", "steps": steps},
        "policies": {
            "model0": {
                "model": {"path": "none"},
                "batch": {"size": BATCH, "max_staleness": MAX_STALENESS, "dynamic_sampling": True},
            }
        },
        "data": {"train": mixed if len(mixed) > 1 else rows},
        "evaluation": {"at_start": False, "at_end": False},
        "rollout": {"group_size": GROUP_SIZE},
        "orchestrator": {"port": port, "min_free_bytes": 0},
        "inference": {"a": {"engine": "scripted", "port": 0}},
        "envgateway": None,
    }
    save_resolved(validate(tree, source="benchmark"), folder)


if __name__ == "__main__":
    main()
