"""A run directory with a journal of a given number of trajectories, written fast; shared by the scripts of this folder.

The run is real in its kinds and their order: task groups of 8, an observation and a verdict each, batches of 128
sequences, closed task groups and a version per batch, the orchestrator's state every 50 versions; at its end some task
groups wait in the buffer and some are being played. Trajectories are small (10 prompt tokens, 24 sampled ones). Records
are written by the journal's own segment writer and codec, without its queue; the payload of one kind differs in names
and numbers alone.

    run_dir = Path(folder); write_million(run_dir, num_trajectories=1_000_000, port=free_port())
    python benchmarks/_journal_million.py FOLDER [--trajectories 1000000]
"""

from __future__ import annotations

import argparse
import json
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from services.common.config.loading import save_resolved, validate
from services.common.records import (
    ClosedReason,
    GroupFate,
    MinibatchTotals,
    Purpose,
    Sampling,
    Segment,
    StopReason,
    Task,
    TaskGroupOrder,
    TokenSequence,
    Trajectory,
    WeightVersion,
)
from services.orchestrator.journal import entries as records
from services.orchestrator.journal import entries as rollouts
from services.orchestrator.journal.entries import BatchEntry, BatchRecord, GroupRecord, GroupVerdict, MemberFate
from services.orchestrator.journal.segments import Packer, segment_path, write_header

POLICY = "model0"
RUN_ID = "benchmark"
MARK = "abcdef"
GROUP_SIZE = 8
GROUPS_OF_BATCH = 16
NUM_WAITING = 8  # task groups in the buffer at the end
NUM_PLAYING = 8  # task groups with half of their trajectories
STATE_EVERY = 50  # batches
NUM_TEMPLATES = 64
SEGMENT_BYTES = 64 * 1024 * 1024
_FLUSH_BYTES = 1024 * 1024
_NAME = b"@GROUP@"


class FastWriter:
    """Records into segments, without queue or acknowledgement."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir(parents=True)
        self.num_records = 0
        self._directory = directory
        self._packer = Packer()
        self._waiting: dict[str, list[bytes]] = {}
        self._sizes: dict[str, int] = {}
        self._segments: Counter[str] = Counter()  # the open one of each kind, from 0
        self._time = time.time() - 86_400.0

    def line(self, kind: str, key: str, line: bytes) -> None:
        self.num_records += 1
        self._time += 1e-4
        payload = self._packer.pack(line)
        data = write_header(self.num_records, self._time, key, payload) + payload
        self._waiting.setdefault(kind, []).append(data)
        self._sizes[kind] = self._sizes.get(kind, 0) + len(data)
        if self._sizes[kind] >= _FLUSH_BYTES:
            self._flush(kind)

    def record(self, kind: str, key: str, record: Mapping[str, Any]) -> None:
        self.line(kind, key, orjson.dumps(record, option=orjson.OPT_APPEND_NEWLINE))

    def close(self) -> None:
        for kind in list(self._waiting):
            self._flush(kind)

    def _flush(self, kind: str) -> None:
        path = segment_path(self._directory, kind, self._segments[kind] + 1)
        with path.open("ab") as file:
            file.write(b"".join(self._waiting.pop(kind, [])))
            self._segments[kind] += file.tell() >= SEGMENT_BYTES
        self._sizes[kind] = 0


def write_million(run_dir: Path, num_trajectories: int, port: int, seed: int = 7) -> int:
    """The run directory, with its recipe; returns how many records of all kinds there are."""
    run_dir.mkdir(parents=True, exist_ok=True)
    _write_recipe(run_dir, port)
    writer = FastWriter(run_dir / "journal")
    run = _Run(writer, np.random.default_rng(seed))
    num_groups = num_trajectories // GROUP_SIZE
    num_trained = max(0, num_groups - NUM_WAITING - NUM_PLAYING)
    run.begin()
    for number in range(1, num_groups + 1):
        playing = number > num_groups - NUM_PLAYING
        run.play(number, GROUP_SIZE // 2 if playing else GROUP_SIZE)
        if number <= num_trained - num_trained % GROUPS_OF_BATCH and number % GROUPS_OF_BATCH == 0:
            run.train(range(number - GROUPS_OF_BATCH + 1, number + 1))
    writer.close()
    return writer.num_records


class _Run:
    def __init__(self, writer: FastWriter, random: np.random.Generator) -> None:
        self._writer = writer
        self._step = 0
        name = _NAME.decode()
        # [index][template]
        self._trajectories = [
            [_dump(rollouts.to_json(_trajectory(name, index, random))) for _ in range(NUM_TEMPLATES)]
            for index in range(GROUP_SIZE)
        ]
        self._verdict = _dump(records.to_json(records.Verdicts(task_group_id=name, advantage_groups=(_verdict(),))))

    def begin(self) -> None:
        self._writer.record(records.RUN, "", {"run_id": RUN_ID, "mark": MARK, "started_at": time.time()})
        self._publish(0)

    def play(self, number: int, num_done: int) -> None:
        """Issue a task group, and bring its first trajectories."""
        name = _name(number)
        order = TaskGroupOrder(
            task_group_id=name, task=Task(task_id=str(number % 1000), data={"question": f"question {number % 1000}"}),
            indices=tuple(range(GROUP_SIZE)), purpose=Purpose.TRAIN, sampling=Sampling(max_new_tokens=64),
            policies=(POLICY,), seed=number, timeout_s=60.0,
        )  # fmt: skip
        issued = GroupRecord(
            order=order, position=number - 1, evaluation="", replica_id="a", incarnation="1", born={POLICY: self._step}
        )
        self._writer.record(records.GROUP, name, records.to_json(issued))
        for index in range(num_done):
            line = self._trajectories[index][number % NUM_TEMPLATES].replace(_NAME, name.encode())
            line = line.replace(b'"weight_version":0', b'"weight_version":%d' % self._step)
            self._writer.line(records.TRAJECTORY, rollouts.trajectory_key(name, index), line)
        if num_done == GROUP_SIZE:
            observed = {"task_group_id": name, "row": (number - 1) % 1000, "rewards": [0.0, 1.0] * (GROUP_SIZE // 2)}
            self._writer.record(records.OBSERVATION, name, observed)
            self._writer.line(records.VERDICT, name, self._verdict.replace(_NAME, name.encode()))

    def train(self, numbers: range) -> None:
        """A batch of these task groups, and its version."""
        self._step += 1
        batch = _batch([f"{_name(number)}/{index}/0" for number in numbers for index in range(GROUP_SIZE)], self._step)
        self._writer.record(records.BATCH, records.batch_key(POLICY, self._step), records.to_json(batch))
        for number in numbers:
            closed = {"task_group_id": _name(number), "reason": ClosedReason.TRAINED.value}
            self._writer.record(records.CLOSED, _name(number), closed)
        self._publish(self._step)
        if self._step % STATE_EVERY == 0:
            state = {"phase": "training", "paused": False, "counters": [], "timeline": []}
            self._writer.record(records.STATE, "", state)

    def _publish(self, number: int) -> None:
        version = WeightVersion(policy=POLICY, number=number, digest=f"{number:032x}")
        record = records.to_json(records.VersionRecord(version=version, metrics={"loss": 0.5} if number else {}))
        self._writer.record(records.VERSION, f"{POLICY}/{number}", record)


def _write_recipe(run_dir: Path, port: int) -> None:
    data = run_dir / "tasks.jsonl"
    data.write_text("".join(json.dumps({"question": f"question {row}", "answer": row}) + "\n" for row in range(1000)))
    tree = {
        "name": "journal-million",
        "run": {"id": RUN_ID, "steps": 1_000_000},
        "policies": {POLICY: {"model": {"path": "none"}, "batch": {"size": GROUPS_OF_BATCH * GROUP_SIZE}}},
        "data": {"train": {"path": str(data)}, "curation": "filter_solved"},
        "evaluation": {"at_start": False, "at_end": False},
        "rollout": {"group_size": GROUP_SIZE},
        "orchestrator": {"port": port},
        "inference": {"a": {"engine": "scripted", "port": 0}},
        "envgateway": None,
    }
    save_resolved(validate(tree, source="benchmark"), run_dir)


def _name(number: int) -> str:
    return f"{MARK}-{number:08d}"


def _dump(record: Mapping[str, Any]) -> bytes:
    return orjson.dumps(record, option=orjson.OPT_APPEND_NEWLINE)


def _trajectory(name: str, index: int, random: np.random.Generator) -> Trajectory:
    prompt, length = random.integers(0, 30_000, 10), 24
    spoken = Segment.policy(
        random.integers(0, 30_000, length),
        np.minimum(random.normal(-1, 0.3, length), 0).astype(np.float32),
        weight_version=0,
    )
    sequence = TokenSequence(
        policy=POLICY, segments=(Segment.environment(prompt.tolist()), spoken), reward=float(index % 2),
        stop_reason=StopReason.STOP,
    )  # fmt: skip
    return Trajectory(task_group_id=name, index=index, sequences=(sequence,), reward=float(index % 2), replica_id="a")


def _verdict() -> GroupVerdict:
    members = tuple(
        MemberFate(index=index, position=0, num_tokens=24, fate=GroupFate.KEPT) for index in range(GROUP_SIZE)
    )
    return GroupVerdict(
        policy=POLICY, role="agent", attempt=0, num_sequences=GROUP_SIZE, num_kept=GROUP_SIZE, mean=0.5, std=0.5,
        outcome=GroupFate.KEPT, members=members,
    )  # fmt: skip


def _batch(names: list[str], step: int) -> BatchRecord:
    entries = tuple(
        BatchEntry(
            sequence_id=name, minibatch=0, position=position, group_mean=0.5, group_std=0.5, group_size=GROUP_SIZE,
            staleness=0, num_tokens=34,
        )
        for position, name in enumerate(names)
    )  # fmt: skip
    totals = (MinibatchTotals(num_sequences=len(names), num_trained_tokens=24 * len(names)),)
    return BatchRecord(policy=POLICY, training_step=step, entries=entries, minibatches=totals)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--trajectories", type=int, default=1_000_000)
    parser.add_argument("--port", type=int, default=50_051)
    options = parser.parse_args()
    began = time.perf_counter()
    count = write_million(options.folder, options.trajectories, options.port)
    size_mb = sum(path.stat().st_size for path in (options.folder / "journal").iterdir()) / 1e6
    print(f"{count} records, {size_mb:.0f} MB, {time.perf_counter() - began:.1f} s")


if __name__ == "__main__":
    main()
