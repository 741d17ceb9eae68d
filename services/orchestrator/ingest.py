"""Records coming in: checked, made durable, and only then counted as there.

Invariants: the first durable record of a slot wins; a record is answered only when it, or the one that it repeats, is
durable; what is unknown, repeated or malformed is answered and counted, never raised. Knows nothing about grpc, about
who plays a slot, or what becomes of it afterwards.
"""

from __future__ import annotations

import enum
import math
import re
from collections import Counter
from collections.abc import Callable, Collection, Mapping

import numpy as np
import structlog

from services.common import fates, kept_tokens
from services.common.types import Purpose, RolloutFailure, Sampling, Segment, TaskGroupOrder, Trajectory
from services.orchestrator.groups import Outcome, TaskGroup
from services.orchestrator.journal import records, rollouts
from services.orchestrator.journal.writer import Journal
from services.orchestrator.versions import VersionLedger

log = structlog.get_logger()

INVALID_RECORD = "INVALID_RECORD"
MOST_COUNTERS = 256
_REASON = re.compile(r"[A-Za-z0-9_.:-]{1,64}")


class RecordOutcome(enum.StrEnum):
    ACCEPTED = "accepted"  # durable, and the first for its slot
    DUPLICATE = "duplicate"  # its slot had a record, or its task group is closed
    UNKNOWN = "unknown"  # no such task group or slot
    INVALID = "invalid"  # malformed: stored as a failure


class Ingest:
    def __init__(
        self,
        groups: Mapping[str, TaskGroup],
        was_issued: Callable[[str], bool],
        ledgers: Mapping[str, VersionLedger],
        journal: Journal,
        counters: Counter[str],
        on_resolved: Callable[[TaskGroup, Outcome], None],
        taught: Collection[str] = (),
    ) -> None:
        """``groups`` are the live ones; ``was_issued`` tells closed groups from unknown ones; ``taught`` are the policies whose
        tokens a teacher scores."""
        self._taught = taught
        self._groups = groups
        self._was_issued = was_issued
        self._ledgers = ledgers
        self._journal = journal
        self._counters = counters
        self._on_resolved = on_resolved
        # Slots whose first record is on its way to the disk, with those who wait to hear that theirs is a duplicate.
        self._pending: dict[tuple[str, int], list[Callable[[RecordOutcome], None]]] = {}
        self.failures_in_a_row = 0  # since the last trajectory
        self.last_failure = ""
        self.num_durable = 0  # records that this process made durable

    def submit(self, record: Outcome, answer: Callable[[RecordOutcome], None]) -> None:
        """Take a record in; ``answer`` is called once, when its outcome is certain."""
        group = self._groups.get(record.task_group_id)
        slot = (record.task_group_id, record.index)
        if group is None or not group.has_slot(record.index):
            issued = group is None and self._was_issued(record.task_group_id)
            self._drop(record, RecordOutcome.DUPLICATE if issued else RecordOutcome.UNKNOWN)
            answer(RecordOutcome.DUPLICATE if issued else RecordOutcome.UNKNOWN)
        elif record.index in group.outcomes:
            self._drop(record, RecordOutcome.DUPLICATE)
            answer(RecordOutcome.DUPLICATE)
        elif slot in self._pending:
            self._drop(record, RecordOutcome.DUPLICATE)
            self._pending[slot].append(answer)
        else:
            self._store(group, record, answer)

    def fail(self, group: TaskGroup, index: int, reason: str, detail: str) -> None:
        """Resolve a slot that nobody will play any more."""
        failure = RolloutFailure(task_group_id=group.id, index=index, reason=reason, detail=detail)
        self.submit(failure, lambda outcome: None)

    def _store(self, group: TaskGroup, record: Outcome, answer: Callable[[RecordOutcome], None]) -> None:
        outcome = RecordOutcome.ACCEPTED
        if isinstance(record, Trajectory):
            fault = find_fault(record, self._ledgers, group.order, self._taught)
            if fault:
                outcome = RecordOutcome.INVALID
                self._drop(record, outcome, fault)
                record = RolloutFailure(
                    task_group_id=record.task_group_id,
                    index=record.index,
                    reason=INVALID_RECORD,
                    detail=fault,
                    replica_id=record.replica_id,
                )
        slot = (record.task_group_id, record.index)
        self._pending[slot] = []

        def durable() -> None:
            waiting = self._pending.pop(slot)
            self.num_durable += 1
            # A task group that was cancelled meanwhile wants nothing more.
            if group.id in self._groups and group.resolve(record):
                self._on_resolved(group, record)
            answer(outcome)
            for repeat in waiting:
                repeat(RecordOutcome.DUPLICATE)

        key = rollouts.trajectory_key(*slot)
        if isinstance(record, Trajectory):
            self.failures_in_a_row = 0
            trajectory = record
            self._counters["tokens_recorded"] += sum(s.num_trained_tokens for s in trajectory.sequences)
            self._journal.submit(records.TRAJECTORY, key, lambda: rollouts.trajectory_to_json(trajectory), durable)
        else:
            failure = record
            if failure.reason == fates.TOO_OLD:  # nothing failed: it was cancelled
                self._counters["slots_cancelled"] += 1
            else:
                self._counters[self.counter_of(failure.reason)] += 1
                self.failures_in_a_row += 1
                self.last_failure = f"{failure.reason}: {failure.detail}"
            self._journal.submit(records.FAILURE, key, lambda: rollouts.failure_to_json(failure), durable)

    def counter_of(self, reason: str) -> str:
        """Reasons are words of replicas: what is no short name, or one too many, is counted with others."""
        name = f"failures_{reason.lower()}"
        known = name in self._counters or len(self._counters) < MOST_COUNTERS
        return name if known and _REASON.fullmatch(reason) else "failures_other"

    def _drop(self, record: Outcome, outcome: RecordOutcome, detail: str = "") -> None:
        self._counters[f"records_{outcome.value}"] += 1
        log.warning(
            "record.dropped",
            outcome=outcome.value,
            task_group=record.task_group_id,
            index=record.index,
            replica=record.replica_id,
            detail=detail,
        )


def find_fault(
    trajectory: Trajectory, ledgers: Mapping[str, VersionLedger], order: TaskGroupOrder, taught: Collection[str] = ()
) -> str:
    """What is wrong with a trajectory of this task group; empty when nothing is."""
    if not math.isfinite(trajectory.reward):
        return f"the reward is {trajectory.reward}"
    for sequence in trajectory.sequences:
        ledger = ledgers.get(sequence.policy)
        if ledger is None:
            return f"unknown policy {sequence.policy!r}"
        if order.policies and sequence.policy not in order.policies:
            return f"a sequence of {sequence.policy} in a task group of {', '.join(order.policies)}"
        if not math.isfinite(sequence.reward):
            return f"the reward of a sequence of {sequence.policy} is {sequence.reward}"
        newest = ledger.newest_number
        required = order.required_versions.get(sequence.policy)
        for segment in sequence.segments:
            if not segment.is_policy:
                continue
            if segment.weight_version > newest:
                return (
                    f"version {segment.weight_version} of {sequence.policy} is from the future: the newest is {newest}"
                )
            if required is not None and segment.num_tokens and segment.weight_version != required:
                return f"sampled from version {segment.weight_version} of {sequence.policy}, not {required}"
            if not np.isfinite(segment.logprobs).all():
                return f"a log-probability of {sequence.policy} is not finite"
            if order.purpose is Purpose.TRAIN and (fault := _fault_of_distribution(segment, order.sampling)):
                return f"a segment of {sequence.policy}: {fault}"
            if not np.isfinite(segment.teacher_logprobs).all():
                return f"a log-probability of the teacher of {sequence.policy} is not finite"
            is_scored = len(segment.teacher_logprobs) == segment.num_tokens
            if order.purpose is Purpose.TRAIN and sequence.policy in taught and not is_scored:
                return f"a segment of {sequence.policy} lacks the log-probabilities of its teacher"
    return ""


def _fault_of_distribution(segment: Segment, sampling: Sampling) -> str:
    """Why log-probabilities of these tokens could not be taken under the distribution that they were drawn from."""
    if segment.temperature is not None and not 0 < segment.temperature < math.inf:
        return f"its temperature is {segment.temperature}"
    if sampling.is_truncated and segment.num_tokens and not segment.kept:
        return "it does not say which tokens top_k, top_p and min_p kept: the engine of its replica does not tell them"
    try:
        kept_tokens.check(segment.kept, segment.token_ids)
    except ValueError as error:
        return str(error)
    return ""
