"""Batches of one policy: assembled once per training step, recorded, then served to any rank at any later time.

    ranks -> get(step) -> [recorded? memory, else journal] or [wait for the buffer -> assemble -> record] -> Batch

Invariant: a batch is served only after its ordered ids are durable. So every later call, with any number of ranks and
after any crash, returns the same batch. Independent of grpc and trainers' leases.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import structlog

from services.common.aio import deadline
from services.common.config.training.policy import BatchConfig
from services.common.errors import (
    BatchLostError,
    CorruptDataError,
    DeadlineError,
    InfrastructureError,
    InvalidRequestError,
)
from services.common.records.fates import StepFact
from services.common.records.types import MinibatchTotals, RankBatch, Sequence, TrainingSequence, Trajectory
from services.common.telemetry.metrics import StepKey
from services.orchestrator.buffer.assembly import assemble, rank_share
from services.orchestrator.buffer.experience import mask_sequence
from services.orchestrator.buffer.late_groups import LateGroups
from services.orchestrator.buffer.pipeline import ExperiencePipeline
from services.orchestrator.journal import records, rollouts
from services.orchestrator.journal.reader import JournalReader
from services.orchestrator.journal.records import BatchEntry, BatchRecord
from services.orchestrator.journal.writer import Journal
from services.orchestrator.state.groups import AdvantageGroup, GroupBy, Member, TaskGroup, group_key, split_sequence_id

log = structlog.get_logger()

KEPT_IN_MEMORY = 2  # the newest batches, for the ranks that ask a little later


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    record: BatchRecord
    sequences: Mapping[str, Sequence]  # by sequence id
    replayed: bool  # recorded before this call

    def share(self, rank: int, num_ranks: int) -> RankBatch:
        """One rank's sequences of every minibatch, ordered by (minibatch, position)."""
        entries = self.record.entries
        chosen = rank_share([e.num_tokens for e in entries], [e.minibatch for e in entries], rank, num_ranks)
        ordered = sorted((entries[p] for p in chosen), key=lambda e: (e.minibatch, e.position))
        return RankBatch(
            policy=self.record.policy,
            training_step=self.record.training_step,
            minibatches=self.record.minibatches,
            sequences=tuple(
                TrainingSequence(
                    sequence_id=e.sequence_id,
                    sequence=self.sequences[e.sequence_id],
                    group_mean=e.group_mean,
                    group_std=e.group_std,
                    group_size=e.group_size,
                    staleness=e.staleness,
                    minibatch=e.minibatch,
                    position=e.position,
                    advantage_scale=e.advantage_scale,
                )
                for e in ordered
            ),
        )


class Batches:
    def __init__(
        self,
        policy: str,
        config: BatchConfig,
        experience: ExperiencePipeline,
        journal: Journal,
        open_reader: Callable[[], JournalReader],
        may_begin: Callable[[int], bool] = lambda step: True,
        cancel: Callable[[list[TaskGroup]], None] = lambda groups: None,
        fault_of: Callable[[Sequence], str] = lambda sequence: "",
        clock: Callable[[], float] = time.monotonic,
        may_compute: Callable[[bool], bool] = lambda ready: ready,
    ) -> None:
        """``cancel`` ends the open slots of groups whose results could only be dropped; ``fault_of`` returns the reason
        for which the trainer would refuse a sequence. ``may_compute`` is told whether a batch that a rank asks for is ready,
        and returns whether the trainer may compute on it now."""
        self.policy = policy
        self._config = config
        self._experience = experience
        self._journal = journal
        self._open_reader = open_reader
        self._may_begin = may_begin
        self._fault_of = fault_of
        self._may_compute = may_compute
        self._clock = clock
        self.late = LateGroups(policy, config, experience, cancel, clock)
        self._taken_at: tuple[int, float] | None = None  # the newest batch that this process put together: step, when
        self._recent: dict[int, Batch] = {}
        self._changed = asyncio.Event()  # set when a wait may be over
        self._assembly = asyncio.Lock()
        self.newest_step = 0  # the newest recorded batch
        self.newest_version = -1
        self.paused = False
        self._closed = False
        self.num_waiting = 0  # ranks that wait for sequences
        self.staleness_max = 0  # largest ever put into a batch
        self.statistics: dict[int, Mapping[str, float]] = {}  # by step, until the step's version is published

    def recover(self, record: BatchRecord) -> None:
        """Note a batch that an earlier process recorded."""
        self._note(record)
        self._experience.mixtures[self.policy].recover(record.statistics)

    def lose(self, training_step: int) -> None:
        """Note the trained batch of a step whose record is lost."""
        self.newest_step = max(self.newest_step, training_step)

    def forget_statistics(self) -> None:
        """Of batches with a published version: their rows of metrics are written."""
        self.statistics = {step: found for step, found in self.statistics.items() if step > self.newest_version}

    def published(self, version: int) -> None:
        """Note a durable version of a training step."""
        self.newest_version = version
        self.newest_step = max(self.newest_step, version)  # also where the batch's record is lost
        if self._taken_at is not None and self._taken_at[0] == version:
            self.late.step_s = self._clock() - self._taken_at[1]

    @property
    def settled(self) -> bool:
        """Whether every begun batch has its version."""
        return self.newest_version >= self.newest_step and not self._assembly.locked()

    def notify(self) -> None:
        """Wake waiting calls after a change of the buffer, the newest version or the pause."""
        self._changed.set()

    async def get(self, training_step: int, timeout_s: float) -> Batch:
        """The batch of a training step; waits for sequences at most ``timeout_s``.

        Raises:
            DeadlineError: not enough sequences yet, or the version before is not published; ask again.
            InvalidRequestError: the batch of an earlier step was never asked for.
        """
        if training_step < 1:
            raise InvalidRequestError(f"training_step is {training_step}; the first is 1")
        if training_step > self.newest_step + 1:
            raise InvalidRequestError(
                f"training step {training_step} of {self.policy} cannot begin: the newest recorded batch is that of "
                f"step {self.newest_step}"
            )
        wanted = f"{self.policy}: batch of step {training_step} ({self._config.fresh_size} sequences)"
        self.num_waiting += 1
        try:
            async with deadline(timeout_s, wanted):
                while not self._is_granted(training_step):
                    self._changed.clear()
                    # While no batch may begin, the end of a wait for due groups has no effect; a timer would only poll.
                    takes = training_step > self.newest_step and self._may_take(training_step)
                    left_s = self.late.left_s() if takes else None
                    # Not ``asyncio.wait_for``, which drops a cancellation, or this deadline, that comes with the event.
                    with contextlib.suppress(TimeoutError):  # then such a wait is over
                        async with asyncio.timeout(left_s):
                            await self._changed.wait()
        finally:
            self.num_waiting -= 1
        if training_step <= self.newest_step:
            return self._usable(await self._replay(training_step))
        # Shielded: a rank that goes away must not tear an assembly that has taken sequences from the buffer.
        return self._usable(await asyncio.shield(asyncio.ensure_future(self._assemble(training_step))))

    def _usable(self, batch: Batch) -> Batch:
        """The batch without the sequences that the trainer would refuse after each restart.

        Raises:
            BatchLostError: no sequence is left.
        """
        faults = {name: fault for name, found in batch.sequences.items() if (fault := self._fault_of(found))}
        if not faults:
            return batch
        name, fault = next(iter(faults.items()))
        log.error(
            "batch.unusable", policy=self.policy, step=batch.record.training_step, sequences=len(faults), first=name,
            fault=fault, effect="the batch is trained without them", see="millrace journal RUN list",
        )  # fmt: skip
        left = {name: found for name, found in batch.sequences.items() if name not in faults}
        batch = Batch(record=_reduced(batch.record, left), sequences=left, replayed=batch.replayed)
        self._experience.note_lost(len(faults))
        self._remember(batch)
        return batch

    def _is_granted(self, training_step: int) -> bool:
        """Whether the batch can be served, and the trainer may compute on it now."""
        can_serve = self._can_serve(training_step)
        if not can_serve and self._assembly.locked():
            return False  # it is recorded for an earlier call, whose end wakes this one
        return self._may_compute(can_serve)

    def _can_serve(self, training_step: int) -> bool:
        if self._closed:
            raise InfrastructureError(f"the orchestrator is stopping: ask again for step {training_step}")
        if self.newest_step >= training_step:
            return True  # another rank's call assembled the batch
        return self._may_take(training_step) and self.late.settled()

    def _may_take(self, training_step: int) -> bool:
        """Whether only groups that are due may hold the batch back."""
        # A step starts from the previous version, and counts its age from that version: wait for that version too.
        ready = self._experience.buffers[self.policy].ready and self.newest_version == training_step - 1
        return ready and not self.paused and self._may_begin(training_step)

    def close(self) -> None:
        """End all waits: the process is stopping."""
        self._closed = True
        self.notify()

    async def _assemble(self, training_step: int) -> Batch:
        async with self._assembly:
            if training_step <= self.newest_step:  # another rank was first
                return await self._replay(training_step)
            if not self._may_begin(training_step):  # training has ended since the wait for sequences did
                raise DeadlineError(f"{self.policy}: step {training_step} does not begin")
            groups, statistics = self._experience.take_batch(self.policy, training_step)
            statistics |= {StepFact.LATE_WAIT_S.value: self.late.taken()}
            num_fresh = sum(group.size for group in groups)
            replayed = self._experience.draw_replayed(self.policy, training_step, num_fresh)
            record, sequences = assemble(
                self.policy, training_step, groups, self._config.minibatches, statistics, replayed
            )
            key = records.batch_key(self.policy, training_step)
            await self._journal.append(
                records.BATCH,
                key,
                lambda: records.batch_to_json(record),
                apply=lambda: self._experience.batch_recorded(groups),
            )
            self._note(record)
            self._taken_at = (training_step, self._clock())
            self._remember(Batch(record=record, sequences=sequences, replayed=True))
            self.notify()
            log.info("batch.ready", policy=self.policy, step=training_step, sequences=len(record.entries))
            return Batch(record=record, sequences=sequences, replayed=False)

    async def _replay(self, training_step: int) -> Batch:
        recent = self._recent.get(training_step)
        if recent is not None:
            return recent
        batch, lost = await asyncio.to_thread(self._read, training_step)
        if lost:
            self._experience.note_lost(len(lost))
            log.error(
                "batch.incomplete", policy=self.policy, step=training_step, lost=len(lost), first=lost[0],
                effect="the batch is trained without them",
            )  # fmt: skip
        self._remember(batch)
        return batch

    def _read(self, training_step: int) -> tuple[Batch, list[str]]:
        reader = self._open_reader()
        try:
            return read_what_is_left(reader, self.policy, training_step)
        finally:
            reader.close()

    def _note(self, record: BatchRecord) -> None:
        self.newest_step = max(self.newest_step, record.training_step)
        self.statistics[record.training_step] = record.statistics
        self.staleness_max = max(self.staleness_max, int(record.statistics.get(StepKey.STALENESS_MAX, 0)))

    def _remember(self, batch: Batch) -> None:
        self._recent[batch.record.training_step] = batch
        for step in sorted(self._recent)[:-KEPT_IN_MEMORY]:
            if step != batch.record.training_step:
                del self._recent[step]


def read_batch(reader: JournalReader, policy: str, training_step: int) -> Batch:
    """A recorded batch from the journal, also without an orchestrator; ``CorruptDataError`` for an incomplete one."""
    record, sequences = _read(reader, policy, training_step)
    missing = [entry.sequence_id for entry in record.entries if entry.sequence_id not in sequences]
    if missing:
        lost = sorted({name.rpartition("/")[0] for name in missing})
        raise CorruptDataError(
            f"the batch of step {training_step} of {policy} lacks trajectories {', '.join(lost[:5])}: they are damaged "
            "(`millrace journal RUN verify`), or were collected, as orchestrator.retention: needed does with those from "
            "before the oldest kept checkpoint"
        )
    return Batch(record=record, sequences=sequences, replayed=True)


def read_what_is_left(reader: JournalReader, policy: str, training_step: int) -> tuple[Batch, list[str]]:
    """A recorded batch without its lost sequences, and the ids of those.

    Raises:
        BatchLostError: no sequence of the batch is usable.
    """
    record, sequences = _read(reader, policy, training_step)
    lost = [entry.sequence_id for entry in record.entries if entry.sequence_id not in sequences]
    if lost:
        record = _reduced(record, sequences)
    return Batch(record=record, sequences=sequences, replayed=True), lost


def _reduced(record: BatchRecord, sequences: Mapping[str, Sequence]) -> BatchRecord:
    """The batch reduced to these of its sequences; raises ``BatchLostError`` without any."""
    left = tuple(entry for entry in record.entries if entry.sequence_id in sequences)
    if not left:
        raise BatchLostError(
            f"no trajectory of the batch of step {record.training_step} of {record.policy} can be used any more: "
            "`millrace journal RUN repair` lets the run put together another one, if its version is not published"
        )
    return replace(record, entries=left, minibatches=_totals(left, sequences, len(record.minibatches)))


def _totals(
    entries: Iterable[BatchEntry], sequences: Mapping[str, Sequence], num_minibatches: int
) -> tuple[MinibatchTotals, ...]:
    counts = [[0, 0] for _ in range(num_minibatches)]
    for entry in entries:
        counts[entry.minibatch][0] += 1
        counts[entry.minibatch][1] += sequences[entry.sequence_id].num_trained_tokens
    return tuple(MinibatchTotals(num_sequences=n, num_trained_tokens=t) for n, t in counts)


def read_fresh_groups(
    reader: JournalReader, policy: str, training_step: int, group_by: GroupBy
) -> list[AdvantageGroup]:
    """The groups that a recorded batch trained first, in its order, without incomplete groups."""
    record, sequences = _read(reader, policy, training_step)
    found: dict[tuple[str, str, str, int], list[BatchEntry]] = {}
    lost: set[str] = set()  # task groups
    for entry in record.entries:
        task_group_id = split_sequence_id(entry.sequence_id)[0]
        sequence = sequences.get(entry.sequence_id)
        if sequence is None:
            lost.add(task_group_id)
        elif not entry.replayed:
            found.setdefault((task_group_id, *group_key(sequence, group_by)), []).append(entry)
    return [
        AdvantageGroup(
            task_group_id=task_group_id, policy=policy, role=role, attempt=attempt,
            members=tuple(
                Member(
                    sequence_id=e.sequence_id, sequence=sequences[e.sequence_id],
                    trained_from=e.trained_from, num_masked_tokens=e.num_masked_tokens,
                )
                for e in entries
            ),
            mean=entries[0].group_mean, std=entries[0].group_std, num_compared=entries[0].group_size, group_by=group_by,
            advantage_scale=entries[0].advantage_scale,
        )
        for (task_group_id, _, role, attempt), entries in found.items()
        if task_group_id not in lost
    ]  # fmt: skip


def _read(reader: JournalReader, policy: str, training_step: int) -> tuple[BatchRecord, dict[str, Sequence]]:
    """A recorded batch with its readable sequences."""
    key = records.batch_key(policy, training_step)
    found = reader.find(records.BATCH, [key]).get(key)
    if found is None:
        raise BatchLostError(f"the batch of step {training_step} of {policy} is not in the journal")
    record = records.batch_from_json(found)
    places = [split_sequence_id(entry.sequence_id) for entry in record.entries]
    keys = [rollouts.trajectory_key(group, index) for group, index, _ in places]
    readable = ((key, _trajectory(value)) for key, value in reader.find(records.TRAJECTORY, keys).items())
    trajectories = {key: trajectory for key, trajectory in readable if trajectory is not None}
    sequences = {
        entry.sequence_id: _as_trained(trajectories[key].sequences[position], entry)
        for entry, key, (_, _, position) in zip(record.entries, keys, places, strict=True)
        if key in trajectories
    }
    return record, sequences


def _trajectory(record: dict[str, Any]) -> Trajectory | None:
    """None for a record that is no trajectory."""
    try:
        return rollouts.trajectory_from_json(record)
    except (CorruptDataError, KeyError, TypeError, ValueError, AttributeError):
        return None


def _as_trained(sequence: Sequence, entry: BatchEntry) -> Sequence:
    if entry.trained_from:
        sequence = mask_sequence(sequence, entry.trained_from)
    return sequence if entry.reward is None else replace(sequence, reward=entry.reward)
