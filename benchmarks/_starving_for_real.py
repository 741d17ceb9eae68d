"""A case of ``_starving.py`` in real time: the orchestrator as a process, a replica with long tails, a trainer that
pauses.

All facts are observed from outside: lengths and cancellations at the replica, trained rollouts in the pulled batches.
Shared by the scripts of this folder.
"""

from __future__ import annotations

import asyncio
import json
import random
import tempfile
import time
from bisect import bisect_right
from collections import Counter
from pathlib import Path

from benchmarks._peers import Rollouts, ScriptedReplica, ScriptedTrainer
from benchmarks._processes import free_port, kill, orchestrator
from benchmarks._starving import DISTRIBUTIONS, POLICY, TOKENS_PER_S, Case, Fate, Outcomes
from services.common.config.loading import save_resolved, validate
from services.common.pb import pool_pb2, trajectory_pb2, weights_pb2
from services.orchestrator.groups import split_sequence_id

LONGEST_WAIT_S = 180.0  # for one training step
MOST_MORE_STEPS = 400  # after the window, until what was issued in it is decided


class LongTailReplica(ScriptedReplica):
    """Each rollout takes as long as its drawn length; its tokens are of the versions that were held meanwhile."""

    def __init__(self, address: str, case: Case) -> None:
        super().__init__(address, num_slots=case.num_slots, rollouts=Rollouts(num_tokens=1))
        self.case = case
        self.born: dict[str, int] = {}  # task group -> version on which it began
        self.lengths: dict[tuple[str, int], int] = {}
        self.sampled: dict[tuple[str, int], int] = {}
        self.swaps: list[tuple[float, int]] = [(0.0, 0)]  # when each version came
        self._playing: dict[tuple[str, int], tuple[asyncio.Task[None], float]] = {}

    def _swap(self, version: weights_pb2.WeightVersion) -> None:
        super()._swap(version)
        self.swaps.append((time.time(), version.number))

    def _cancel(self, task_group_id: str) -> None:
        super()._cancel(task_group_id)
        self._running.pop(task_group_id, None)
        for key in [key for key in self._playing if key[0] == task_group_id]:
            task, began = self._playing.pop(key)
            task.cancel()
            self.sampled[key] = min(self.lengths[key], int((time.time() - began) * TOKENS_PER_S))

    def _take(self, order: pool_pb2.RunTaskGroup) -> None:
        self.orders.append(order)
        name = order.task_group_id
        self.born.setdefault(name, self.swaps[-1][1])
        for index in order.indices:
            if (name, index) in self.lengths:
                continue
            draw = random.Random(f"{self.case.seed}/{len(self.lengths)}")
            seconds = DISTRIBUTIONS[self.case.distribution](draw) * self.case.mean_s
            self.lengths[name, index] = max(1, round(seconds * TOKENS_PER_S))
            self._running[name] = self._running.get(name, 0) + 1
            self._playing[name, index] = asyncio.create_task(self._slot(order, index)), time.time()

    async def _slot(self, order: pool_pb2.RunTaskGroup, index: int) -> None:
        began, length = time.time(), self.lengths[order.task_group_id, index]
        await asyncio.sleep(length / TOKENS_PER_S)
        key = order.task_group_id, index
        del self._playing[key]
        self.sampled[key] = length
        self._running[key[0]] -= 1
        if not self._running[key[0]]:
            del self._running[key[0]]
        trajectory = trajectory_pb2.Trajectory(task_group_id=key[0], index=index, reward=float(index % 2))
        sequence = trajectory.sequences.add(
            policy=POLICY, role="agent", reward=trajectory.reward, stop_reason=trajectory_pb2.STOP_REASON_STOP
        )
        sequence.segments.add(source=trajectory_pb2.TOKEN_SOURCE_ENVIRONMENT, token_ids=bytes(4), weight_version=-1)
        for version, count in self._counts(began, length):
            sequence.segments.add(
                source=trajectory_pb2.TOKEN_SOURCE_POLICY,
                token_ids=bytes(4 * count),
                logprobs=bytes(4 * count),
                weight_version=version,
            )
        self.put(pool_pb2.NumberedRecord(trajectory=trajectory))

    def _counts(self, began: float, length: int) -> list[tuple[int, int]]:
        """(version, tokens) of a rollout that began then."""
        first = bisect_right(self.swaps, (began, 1 << 60)) - 1
        counts, done = [], 0
        for position in range(max(first, 0), len(self.swaps)):
            is_last = position + 1 == len(self.swaps)
            end = length if is_last else min(length, int((self.swaps[position + 1][0] - began) * TOKENS_PER_S))
            if end > done:
                counts.append((self.swaps[position][1], end - done))
                done = end
        return counts


async def play(case: Case) -> tuple[Outcomes, int]:
    """The outcomes, and how many rollouts of the window were not decided when the run was ended.

    Not for ``mask``: whether a left-out sequence would still be trained cannot be observed from outside.
    """
    if case.late == "mask":
        raise ValueError("late: mask is played in virtual time only")
    with tempfile.TemporaryDirectory(prefix="rollmill-starving-") as folder:
        port = free_port()
        _write_recipe(Path(folder), port, case)
        process = orchestrator(folder)
        replica = LongTailReplica(f"127.0.0.1:{port}", case)
        trainer = ScriptedTrainer(f"127.0.0.1:{port}", train_s=case.train_s)
        replica.start()
        try:
            return await _train(case, replica, trainer)
        finally:
            await trainer.close()
            await replica.close()
            kill([process])


async def _train(case: Case, replica: LongTailReplica, trainer: ScriptedTrainer) -> tuple[Outcomes, int]:
    async with asyncio.timeout(60):
        await trainer.join()
        await trainer.publish(0)
    published = [time.time()]
    trained: dict[tuple[str, int], int] = {}
    ages: Counter[int] = Counter()
    last = case.warm_up + case.window
    open_slots: list[tuple[str, int]] = []
    for step in range(1, last + MOST_MORE_STEPS + 1):
        async with asyncio.timeout(LONGEST_WAIT_S):
            await trainer.train([step])
        published.append(time.time())
        for item in trainer.pulled.pop(step).sequences:
            name, index, _ = split_sequence_id(item.sequence_id)
            segments = [s for s in item.sequence.segments if s.source == trajectory_pb2.TOKEN_SOURCE_POLICY]
            trained[name, index] = sum(len(s.token_ids) // 4 for s in segments)
            if case.warm_up <= replica.born[name] < last:
                for segment in segments:
                    ages[step - 1 - segment.weight_version] += len(segment.token_ids) // 4
        window = [key for key in replica.lengths if case.warm_up <= replica.born[key[0]] < last]
        open_slots = [key for key in window if key not in trained and not _lost(case, replica, key, step)]
        if step >= last and not open_slots:
            break
    fates = [
        Fate(length=replica.lengths[key], num_sampled=replica.sampled.get(key, 0), num_trained=trained.get(key, 0))
        for key in window
    ]
    step_s = (published[last] - published[case.warm_up]) / case.window
    return Outcomes(fates=fates, ages=ages, step_s=step_s), len(open_slots)


def _lost(case: Case, replica: LongTailReplica, key: tuple[str, int], version: int) -> bool:
    """No token of the rollout can be trained any more, by the rule of its mode."""
    return case.late == "drop" and version - replica.born[key[0]] > case.max_staleness


def _write_recipe(folder: Path, port: int, case: Case) -> None:
    data = folder / "tasks.jsonl"
    data.write_text("".join(json.dumps({"question": f"question {row}", "answer": row}) + "\n" for row in range(1000)))
    tree = {
        "name": "starvation",
        "run": {"id": "benchmark", "steps": 1_000_000},
        "policies": {POLICY: {"model": {"path": "none"}, "batch": case.config().model_dump()}},
        "data": {"train": {"path": str(data)}},
        "evaluation": {"at_start": False, "at_end": False},
        "rollout": {"group_size": case.group_size},
        "orchestrator": {"port": port},
        "inference": {"a": {"engine": "scripted", "port": 0}},
        "envgateway": None,
    }
    save_resolved(validate(tree, source="benchmark"), folder)
