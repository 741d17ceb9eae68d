"""Checks incoming records, makes them durable, then reports the outcome of their slots.

    sender: owner of the slot, now or before? -> slot open? -> within every bound? -> journal -> answer
            no: refused                          no: duplicate, unknown   no: the slot fails

Invariants: the first durable record of a slot wins. The answer to a record follows after that record, or the record
that it repeats, is durable. Unknown and repeated records, records beyond a bound and records of other senders get a
reason and a count, never an exception. A replica without a lease may still send records of slots that it owned.
Independent of grpc and of later uses of a slot.

Refusals are counted by reason and by sender, logged at intervals, and reported as a stall. Peers choose the names of
senders, so at most ``MOST_SENDERS`` are kept.
"""

from __future__ import annotations

import enum
import re
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import structlog

from services.common.records import fates, masked
from services.common.records.refusals import Refusal, RefusalReason, counter_of
from services.common.records.types import RolloutFailure, Trajectory
from services.common.telemetry.log_events import LogEvent
from services.common.telemetry.logs import Repeats
from services.orchestrator.ingest.bounds import RecordBounds, RecordRefusedError, bounded_failure
from services.orchestrator.journal import records, rollouts
from services.orchestrator.journal.journal import Journal
from services.orchestrator.state.groups import Incarnation, Outcome, TaskGroup
from services.orchestrator.state.versions import VersionLedger

log = structlog.get_logger()

INVALID_RECORD = masked.INVALID_RECORD
OF_A_REPLICA = "REPLICA_"  # prefix of a reason that only the orchestrator gives, when a replica sends that reason
MOST_COUNTERS = 256
_REASON = re.compile(r"[A-Za-z0-9_.:-]{1,64}")

MOST_SENDERS = 1024
MOST_SHOWN = 64  # characters of a peer's word in the log
OTHERS = "others"


@dataclass(slots=True)
class Streak:
    """Refusals of one sender since its last accepted record."""

    number: int
    since: float  # on the caller's clock
    newest: float
    last: Refusal


class Refusals:
    def __init__(self, counters: Counter[str], clock: Callable[[], float] = time.monotonic) -> None:
        """``counters`` are the run's, which outlive the process."""
        self._counters = counters
        self._clock = clock
        self._repeats = Repeats(clock)
        self.streaks: dict[str, Streak] = {}  # by replica id

    def refused(self, replica_id: str, task_group_id: str, index: int, refusal: Refusal) -> None:
        """Count a refused record."""
        self._counters[counter_of(refusal.reason)] += 1
        now = self._clock()
        sender = replica_id[:MOST_SHOWN]
        if sender not in self.streaks and len(self.streaks) >= MOST_SENDERS:
            sender = OTHERS
        streak = self.streaks.setdefault(sender, Streak(0, now, now, refusal))
        streak.number += 1
        streak.newest, streak.last = now, refusal
        if (untold := self._repeats.tell(refusal.reason.value)) is not None:
            log.warning(
                "record.refused",
                reason=refusal.reason.value,
                detail=refusal.detail,
                replica=sender,
                task_group=task_group_id[:MOST_SHOWN],
                index=index,
                **untold,
            )

    def taken(self, replica_id: str) -> None:
        """End the streak of a sender after a good record."""
        self.streaks.pop(replica_id[:MOST_SHOWN], None)


class RecordOutcome(enum.StrEnum):
    ACCEPTED = "accepted"  # durable, and the first for its slot
    DUPLICATE = "duplicate"  # its slot had a record, or its task group is closed
    UNKNOWN = "unknown"  # no such task group or slot
    INVALID = "invalid"  # beyond a bound, or malformed: stored as a failure
    REFUSED = "refused"  # from an unknown sender: dropped, and the slot stays open


@dataclass(frozen=True, slots=True)
class Answer:
    """Answer to the sender of a record; ``refusal`` with INVALID and REFUSED."""

    outcome: RecordOutcome
    refusal: Refusal | None = None


class Ingest:
    def __init__(
        self,
        groups: Mapping[str, TaskGroup],
        was_issued: Callable[[str], bool],
        ledgers: Mapping[str, VersionLedger],
        journal: Journal,
        counters: Counter[str],
        on_resolved: Callable[[TaskGroup, Outcome], None],
        *,
        bounds: RecordBounds,
        refusals: Refusals,
        is_member: Callable[[Incarnation], bool],
    ) -> None:
        """``groups`` are the live ones; ``was_issued`` tells closed groups from unknown ones; ``is_member`` whether an
        incarnation of a replica has ever joined."""
        self._groups = groups
        self._was_issued = was_issued
        self._ledgers = ledgers
        self._bounds = bounds
        self._is_member = is_member
        self.refusals = refusals
        self._repeats = Repeats()
        self._journal = journal
        self._counters = counters
        self._on_resolved = on_resolved
        # Slots whose first record is being written, with the answers to later records, which become duplicates.
        self._pending: dict[tuple[str, int], list[Callable[[Answer], None]]] = {}
        self.failures_in_a_row = 0  # since the last trajectory
        self.last_failure = ""
        self.num_durable = 0  # records that this process made durable

    def submit(
        self,
        record: Outcome,
        answer: Callable[[Answer], None],
        sender: Incarnation | None = None,
        fault: Refusal | None = None,
    ) -> None:
        """Take a record in; calls ``answer`` once, when the outcome is certain.

        Args:
            sender: the sending replica; None is the orchestrator itself.
            fault: reason for which the record is unreadable; ``record`` then holds the known facts of its slot.
        """
        group = self._groups.get(record.task_group_id)
        slot = (record.task_group_id, record.index)
        if sender is not None and (refusal := self._refusal_of(record.task_group_id, sender)) is not None:
            self.refusals.refused(sender[0], *slot, refusal)
            self._drop(record, RecordOutcome.REFUSED)
            answer(Answer(RecordOutcome.REFUSED, refusal))
        elif group is None or not group.has_slot(record.index):
            issued = group is None and self._was_issued(record.task_group_id)
            outcome = RecordOutcome.DUPLICATE if issued else RecordOutcome.UNKNOWN
            self._drop(record, outcome)
            answer(Answer(outcome))
        elif record.index in group.outcomes:
            self._drop(record, RecordOutcome.DUPLICATE)
            answer(Answer(RecordOutcome.DUPLICATE))
        elif slot in self._pending:
            self._drop(record, RecordOutcome.DUPLICATE)
            self._pending[slot].append(answer)
        else:
            fault = fault or self._fault(group, record)
            self._store(group, self._bounded(record, fault, sender), answer, fault)
            if sender is not None and fault is None:
                self.refusals.taken(sender[0])

    def _refusal_of(self, task_group_id: str, sender: Incarnation) -> Refusal | None:
        """Reason to refuse a sender's records of this task group; None for an accepted sender."""
        group = self._groups.get(task_group_id)
        if group is None and self._was_issued(task_group_id):
            return None  # closed: its record is a duplicate, from any sender
        if group is not None and all(sender) and group.was_given_to(sender):
            return None  # also before a new join after a restart
        replica_id, incarnation = sender
        named = f"replica {replica_id[:64]!r}, incarnation {incarnation[:64]!r},"
        if not all(sender) or not self._is_member(sender):
            return Refusal(reason=RefusalReason.NOT_A_MEMBER, detail=f"{named} has not joined the pool: join first")
        if group is None:
            return None
        return Refusal(reason=RefusalReason.NOT_THE_OWNER, detail=f"{named} was never given task group {task_group_id}")

    def _fault(self, group: TaskGroup, record: Outcome) -> Refusal | None:
        """The bound of its slot that a record violates; None for a valid record."""
        if not isinstance(record, Trajectory):
            return None
        try:
            self._bounds.check(record, group.order, lambda policy: self._ledgers[policy].newest_number)
        except RecordRefusedError as error:
            return error.refusal
        return None

    def _bounded(self, record: Outcome, fault: Refusal | None, sender: Incarnation | None) -> Outcome:
        """The record to store: for a record with a fault, a failure of its slot."""
        if fault is not None:
            replica_id = record.replica_id if sender is None else sender[0]
            self.refusals.refused(replica_id, record.task_group_id, record.index, fault)
            self._drop(record, RecordOutcome.INVALID)
            return RolloutFailure(
                task_group_id=record.task_group_id,
                index=record.index,
                reason=INVALID_RECORD,
                detail=f"{fault.reason.value}: {fault.detail}",
                replica_id=record.replica_id,
            )
        if isinstance(record, Trajectory):
            return record
        if sender is not None and record.reason in (fates.TOO_OLD, fates.VERSION_GONE, INVALID_RECORD):
            record = replace(record, reason=f"{OF_A_REPLICA}{record.reason}")
        return bounded_failure(record)

    def fail(self, group: TaskGroup, index: int, reason: str, detail: str) -> None:
        """Resolve a slot that no replica will run."""
        failure = RolloutFailure(task_group_id=group.id, index=index, reason=reason, detail=detail)
        self.submit(failure, lambda answer: None)

    def _store(
        self, group: TaskGroup, record: Outcome, answer: Callable[[Answer], None], fault: Refusal | None
    ) -> None:
        answered = Answer(RecordOutcome.ACCEPTED if fault is None else RecordOutcome.INVALID, fault)
        slot = (record.task_group_id, record.index)
        self._pending[slot] = []

        def durable() -> None:
            waiting = self._pending.pop(slot)
            self.num_durable += 1
            # A cancelled task group needs no outcome.
            if group.id in self._groups and group.resolve(record):
                self._on_resolved(group, record)
            answer(answered)
            for repeat in waiting:
                repeat(Answer(RecordOutcome.DUPLICATE))

        key = rollouts.trajectory_key(*slot)
        if isinstance(record, Trajectory):
            self.failures_in_a_row = 0
            trajectory = record
            self._counters[fates.RunCount.TOKENS_RECORDED.value] += sum(
                s.num_trained_tokens for s in trajectory.sequences
            )
            self._journal.submit(records.TRAJECTORY, key, lambda: rollouts.trajectory_to_json(trajectory), durable)
        else:
            failure = record
            if failure.reason == fates.TOO_OLD:  # no failure: the slot was cancelled
                self._counters[fates.StepFact.SLOTS_CANCELLED.value] += 1
            else:
                self._counters[self.counter_of(failure.reason)] += 1
                if failure.reason != fates.VERSION_GONE:  # which tells nothing about other rollouts
                    self.failures_in_a_row += 1
                    self.last_failure = f"{failure.reason}: {failure.detail}"
            self._journal.submit(records.FAILURE, key, lambda: rollouts.failure_to_json(failure), durable)

    def counter_of(self, reason: str) -> str:
        """The counter of a reason. Replicas send reasons: invalid names and names beyond the limit share one counter."""
        name = f"{fates.FAILURES_PREFIX}{reason.lower()}"
        known = name in self._counters or len(self._counters) < MOST_COUNTERS
        return name if known and _REASON.fullmatch(reason) else f"{fates.FAILURES_PREFIX}other"

    def _drop(self, record: Outcome, outcome: RecordOutcome) -> None:
        self._counters[f"records_{outcome.value}"] += 1
        if outcome in (RecordOutcome.INVALID, RecordOutcome.REFUSED):
            return  # ``Refusals`` logs the reason
        if (untold := self._repeats.tell(outcome.value)) is not None:
            # A duplicate is expected: of a group that was closed or cancelled, or sent again after a broken stream.
            tell = log.info if outcome is RecordOutcome.DUPLICATE else log.warning
            tell(
                LogEvent.RECORD_DROPPED,
                outcome=outcome.value,
                task_group=record.task_group_id[:64],
                index=record.index,
                replica=record.replica_id[:64],
                **untold,
            )
