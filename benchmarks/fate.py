"""Measures ``rollmill fate`` on a long run: rollouts per second, and memory, which does not grow with the run.

Writes the journal of a run through the real ``Journal`` (task groups of 8, 200 to 400 tokens each, a third of the
groups dropped for equal rewards, batches of 128, a version per batch), then reads it in a fresh process: seconds and
peak memory beyond that of the same process on a journal a quarter as long. ``theirs`` reads every trajectory of the same
journal, which would be needed if verdicts did not hold the lengths of sequences, and adds up its tokens alone.

    python benchmarks/fate.py [--quick] [--seed 7]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks._report import report
from services.common.records.fates import ClosedReason, GroupFate
from services.common.records.types import (
    MinibatchTotals,
    Purpose,
    Sampling,
    Segment,
    Sequence,
    StopReason,
    Task,
    TaskGroupOrder,
    Trajectory,
    WeightVersion,
)
from services.orchestrator.journal import records, rollouts
from services.orchestrator.journal.journal import Journal
from services.orchestrator.journal.records import BatchEntry, BatchRecord, GroupRecord, GroupVerdict, MemberFate

GROUP_SIZE = 8
BATCH = 128

READ = """
import json, resource, sys, time
from pathlib import Path
from services.cli.inspect.fate.reading import read_fates
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
began = time.perf_counter()
found = read_fates(Path(sys.argv[1]))
seconds = time.perf_counter() - began
grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
rollouts = found.total("p").issued_rollouts
print(json.dumps({"seconds": seconds, "grown_kib": grown, "rollouts": rollouts, "broken": len(found.failed_checks)}))
"""

READ_ALL = """
import json, sys, time
from pathlib import Path
from services.orchestrator.journal.reader import JournalReader
from services.orchestrator.journal.records import TRAJECTORY
began, tokens, rollouts = time.perf_counter(), 0, 0
reader = JournalReader(Path(sys.argv[1]) / "journal")
for row in reader.select("r.kind = ?", (TRAJECTORY,), lambda row: row.kind == TRAJECTORY):
    for sequence in reader.load(row)["sequences"]:
        tokens += sum(segment["num_tokens"] for segment in sequence["segments"])
    rollouts += 1
seconds = time.perf_counter() - began
print(json.dumps({"seconds": seconds, "rollouts": rollouts}))
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="at most a minute")
    parser.add_argument("--seed", type=int, default=7)
    options = parser.parse_args()
    num_rollouts = 8_000 if options.quick else 48_000
    with tempfile.TemporaryDirectory() as scratch:
        runs = {
            name: asyncio.run(write_run(Path(scratch) / name, count, options.seed))
            for name, count in (("ours", num_rollouts), ("a quarter", num_rollouts // 4))
        }
        found = {name: read(run, READ) for name, run in runs.items()}
        theirs = read(runs["ours"], READ_ALL)
        size_mb = sum(p.stat().st_size for p in runs["ours"].rglob("*") if p.is_file()) / 1e6
    for name, result in found.items():
        assert result["broken"] == 0, f"{name}: the sums do not come out"
    assert theirs["rollouts"] == found["ours"]["rollouts"]
    speed = {name: result["rollouts"] / result["seconds"] for name, result in {**found, "theirs": theirs}.items()}
    more_kib = found["ours"]["grown_kib"] - found["a quarter"]["grown_kib"]
    more_rollouts = found["ours"]["rollouts"] - found["a quarter"]["rollouts"]
    print(
        f"{found['ours']['rollouts']} rollouts, {size_mb:.0f} MB: {found['ours']['seconds']:.2f} s; from trajectories "
        f"{theirs['seconds']:.2f} s; {1024 * more_kib / more_rollouts:.0f} bytes of memory per rollout more"
    )
    report(
        "fate", speed["ours"], speed["theirs"], speed["ours"] / speed["theirs"], None,
        unit="rollouts per second", rollouts=found["ours"]["rollouts"], journal_mb=size_mb,
        seconds=found["ours"]["seconds"], peak_growth_mb=found["ours"]["grown_kib"] / 1024,
        bytes_per_rollout=1024 * more_kib / more_rollouts, seed=options.seed,
    )  # fmt: skip


def read(run: Path, code: str) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-c", code, str(run)], capture_output=True, text=True, check=True, timeout=300
    )
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


async def write_run(run: Path, num_rollouts: int, seed: int) -> Path:
    random = np.random.default_rng(seed)
    journal = Journal(run / "journal")
    journal.start()
    version, waiting = 0, []
    _publish(journal, version)
    for number in range(num_rollouts // GROUP_SIZE):
        name = f"a-{number:08d}"
        equal = number % 3 == 0
        issued = GroupRecord(order=_order(name), position=number, evaluation="", replica_id="r", incarnation="1")
        journal.submit(records.GROUP, name, partial(records.group_to_json, issued))
        played = [_trajectory(name, index, version, random) for index in range(GROUP_SIZE)]
        for trajectory in played:
            key = rollouts.trajectory_key(name, trajectory.index)
            journal.submit(records.TRAJECTORY, key, partial(rollouts.trajectory_to_json, trajectory))
        verdict = _verdict(played, GroupFate.EQUAL_REWARDS if equal else GroupFate.KEPT)
        journal.submit(records.VERDICT, name, partial(records.verdicts_to_json, name, [verdict]))
        if equal:
            _close(journal, name, ClosedReason.NOTHING_TO_TRAIN)
        else:
            waiting += played
        if len(waiting) >= BATCH:
            version += 1
            batch = _batch(waiting, version)
            await journal.append(records.BATCH, f"p/{version}", partial(records.batch_to_json, batch))
            for trained in dict.fromkeys(t.task_group_id for t in waiting):
                _close(journal, trained, ClosedReason.TRAINED)
            _publish(journal, version)
            waiting = []
    await journal.append("marks", "", dict)
    await journal.close()
    return run


def _order(name: str) -> TaskGroupOrder:
    return TaskGroupOrder(
        task_group_id=name,
        task=Task(task_id="1", data={"question": "?"}),
        indices=tuple(range(GROUP_SIZE)),
        purpose=Purpose.TRAIN,
        sampling=Sampling(),
    )


def _trajectory(name: str, index: int, version: int, random: np.random.Generator) -> Trajectory:
    length = int(random.integers(200, 401))
    spoken = Segment.policy(
        random.integers(0, 30_000, length, dtype=np.int32), random.normal(-1, 0.3, length).astype(np.float32), version
    )
    segments = (Segment.environment([1, 2, 3]), spoken)
    sequence = Sequence(policy="p", segments=segments, reward=float(index % 2), stop_reason=StopReason.STOP)
    return Trajectory(task_group_id=name, index=index, sequences=(sequence,), reward=float(index % 2))


def _verdict(played: list[Trajectory], fate: GroupFate) -> GroupVerdict:
    members = tuple(
        MemberFate(index=t.index, position=0, num_tokens=t.sequences[0].num_trained_tokens, fate=fate) for t in played
    )
    num_kept = len(played) if fate is GroupFate.KEPT else 0
    return GroupVerdict(
        policy="p", role="agent", attempt=0, num_sequences=len(played), num_kept=num_kept, mean=0.5, std=0.5,
        outcome=fate, members=members,
    )  # fmt: skip


def _batch(played: list[Trajectory], step: int) -> BatchRecord:
    entries = tuple(
        BatchEntry(
            sequence_id=f"{t.task_group_id}/{t.index}/0", minibatch=0, position=position, group_mean=0.5, group_std=0.5,
            group_size=GROUP_SIZE, staleness=0, num_tokens=t.sequences[0].num_tokens,
        )
        for position, t in enumerate(played)
    )  # fmt: skip
    trained = sum(t.sequences[0].num_trained_tokens for t in played)
    totals = (MinibatchTotals(num_sequences=len(played), num_trained_tokens=trained),)
    return BatchRecord(policy="p", training_step=step, entries=entries, minibatches=totals)


def _publish(journal: Journal, number: int) -> None:
    version = WeightVersion(policy="p", number=number, digest="d")
    journal.submit(records.VERSION, f"p/{number}", lambda: records.version_to_json(version, 0, {}))


def _close(journal: Journal, name: str, reason: ClosedReason) -> None:
    record = {"task_group_id": name, "reason": reason.value}
    journal.submit(records.CLOSED, name, lambda: record)


if __name__ == "__main__":
    main()
