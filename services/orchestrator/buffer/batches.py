"""Batches of one policy: assembled once per training step, recorded, then served to any rank at any later time.

    ranks -> get(step) -> [recorded? memory, else journal] or [wait for the buffer -> assemble -> record] -> Batch

Invariant: a batch is served only after its ordered ids are durable. So every later call, with any number of ranks and
after any crash, returns the same batch. Independent of grpc and trainers' leases.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Mapping

import structlog

from services.common.aio import called, deadline
from services.common.config.training.policy import BatchConfig
from services.common.errors import (
    DeadlineError,
    InfrastructureError,
    InvalidRequestError,
)
from services.common.records.fates import StepFact
from services.common.records.types import Sequence
from services.common.telemetry.metrics import StepKey
from services.orchestrator.buffer.assembly import MOST_AT_ONCE, Batch, assemble
from services.orchestrator.buffer.pipeline import ExperiencePipeline
from services.orchestrator.buffer.recorded import read_what_is_left, reduced
from services.orchestrator.journal import records
from services.orchestrator.journal.journal import Journal
from services.orchestrator.journal.reader import JournalReader
from services.orchestrator.journal.records import BatchRecord
from services.orchestrator.state.groups import TaskGroup

log = structlog.get_logger()

KEPT_IN_MEMORY = 2  # the newest batches, for the ranks that ask a little later
WAIT_SHARE = 0.25  # of the time that the training step before took, where the recipe does not say


class LateGroups:
    """Decides about groups that only a policy's next batch can train, and that still run.

        keep, mask   no action: their members are trained on arrival, old tokens masked with `mask`
        wait         the batch waits for them, once and for a share of the duration of the previous step
        drop         their open slots are cancelled, so that their finished members get into this batch

    The caller asks when the buffer has a full batch.
    """

    def __init__(
        self,
        policy: str,
        config: BatchConfig,
        experience: ExperiencePipeline,
        cancel: Callable[[list[TaskGroup]], None],
        clock: Callable[[], float],
    ) -> None:
        """``cancel`` ends the open slots of groups; the calls repeat until the groups are finished."""
        self._policy = policy
        self._late = config.late_rule
        self._wait_share = config.late_wait_share or WAIT_SHARE
        self._experience = experience
        self._cancel = cancel
        self._clock = clock
        self._waited: set[str] = set()  # task groups that a batch has waited for
        self._began: float | None = None  # when the wait began that is going on
        self.step_s: float | None = None  # how long the newest training step took
        self.num_waited_for = 0  # task groups that the next batch waits for

    def settled(self) -> bool:
        """Whether unfinished groups allow the batch to be assembled now."""
        if self._late == "drop":
            return self._all_cancelled()
        return self._late != "wait" or self._all_here()

    def left_s(self) -> float | None:
        """Remaining seconds of the present wait; None without one."""
        if self._began is None or self.step_s is None:
            return None
        return max(0.0, self._began + self._wait_share * self.step_s - self._clock())

    def taken(self) -> float:
        """Record that the batch was assembled; returns the seconds of its wait for these groups."""
        waited_s = 0.0 if self._began is None else self._clock() - self._began
        if self._late == "wait":
            due = {group.id for group in self._experience.due(self._policy)}
            self._waited = due if self._began is not None else self._waited & due
        self._began = None
        self.num_waited_for = 0
        return waited_s

    def _all_cancelled(self) -> bool:
        # A group that another policy can still train continues; its members of this policy become too old.
        due = [g for g in self._experience.due(self._policy) if self._experience.is_due_everywhere(g)]
        if due:
            self._cancel(due)
        return not due

    def _all_here(self) -> bool:
        due = [g for g in self._experience.due(self._policy) if g.id not in self._waited]
        self.num_waited_for = len(due)
        if not due or self.step_s is None:
            return True
        if self._began is None:
            self._began = self._clock()
        left_s = self.left_s()
        return left_s is not None and left_s <= 0.0


class Batches:
    def __init__(
        self,
        policy: str,
        config: BatchConfig,
        experience: ExperiencePipeline,
        journal: Journal,
        open_reader: Callable[[], JournalReader],
        may_begin: Callable[[int], bool] | None = None,
        cancel: Callable[[list[TaskGroup]], None] = lambda groups: None,
        fault_of: Callable[[Sequence], str] = lambda sequence: "",
        clock: Callable[[], float] = time.monotonic,
        may_compute: Callable[[bool], bool] | None = None,
    ) -> None:
        """``may_begin``: whether lockstep and threshold, where the run has one, let a step begin. ``cancel`` ends the open
        slots of groups whose results could only be dropped; ``fault_of`` returns the reason for which the trainer would refuse
        a sequence. ``may_compute``, of a shared device, is told whether a batch that a rank asks for is ready, and returns
        whether the trainer may compute on it now."""
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
        num_sequences = self._experience.buffers[self.policy].batch_size
        wanted = f"{self.policy}: batch of step {training_step} ({num_sequences} sequences)"
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
            return await self._usable(await self._replay(training_step))
        # Shielded: a rank that goes away must not tear an assembly that has taken sequences from the buffer.
        return await self._usable(await asyncio.shield(asyncio.ensure_future(self._assemble(training_step))))

    async def _usable(self, batch: Batch) -> Batch:
        """The batch without the sequences that the trainer would refuse after each restart.

        Raises:
            BatchLostError: no sequence is left.
        """
        faults = await called(self._faults, batch, in_thread=len(batch.sequences) > MOST_AT_ONCE)
        if not faults:
            return batch
        recent = self._recent.get(batch.record.training_step)
        if recent is not None and recent.sequences.keys().isdisjoint(faults):  # found by the call of another rank
            return Batch(record=recent.record, sequences=recent.sequences, replayed=batch.replayed)
        name, fault = next(iter(faults.items()))
        log.error(
            "batch.unusable", policy=self.policy, step=batch.record.training_step, sequences=len(faults), first=name,
            fault=fault, effect="the batch is trained without them", see="rollmill journal RUN list",
        )  # fmt: skip
        left = {name: found for name, found in batch.sequences.items() if name not in faults}
        batch = Batch(record=reduced(batch.record, left), sequences=left, replayed=batch.replayed)
        self._experience.note_lost(len(faults))
        self._remember(batch)
        return batch

    def _faults(self, batch: Batch) -> dict[str, str]:
        return {name: fault for name, found in batch.sequences.items() if (fault := self._fault_of(found))}

    def _is_granted(self, training_step: int) -> bool:
        """Whether the batch can be served, and the trainer may compute on it now."""
        can_serve = self._can_serve(training_step)
        if not can_serve and self._assembly.locked():
            return False  # it is recorded for an earlier call, whose end wakes this one
        return can_serve if self._may_compute is None else self._may_compute(can_serve)

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
        return ready and not self.paused and self._begins(training_step)

    def _begins(self, training_step: int) -> bool:
        return self._may_begin is None or self._may_begin(training_step)

    def close(self) -> None:
        """End all waits: the process is stopping."""
        self._closed = True
        self.notify()

    async def _assemble(self, training_step: int) -> Batch:
        async with self._assembly:
            if training_step <= self.newest_step:  # another rank was first
                return await self._replay(training_step)
            if not self._begins(training_step):  # training has ended since the wait for sequences did
                raise DeadlineError(f"{self.policy}: step {training_step} does not begin")
            groups, statistics = self._experience.take_batch(self.policy, training_step)
            statistics |= {StepFact.LATE_WAIT_S.value: self.late.taken()}
            num_fresh = sum(group.size for group in groups)
            replayed = self._experience.draw_replayed(self.policy, training_step, num_fresh)
            record, sequences = await called(
                assemble,
                *(self.policy, training_step, groups, self._config.minibatches, statistics, replayed),
                in_thread=num_fresh > MOST_AT_ONCE,
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
