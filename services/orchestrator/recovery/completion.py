"""Completes a recovery: state, counters, groups of lost records, replay store, and the slots of running replicas.

The orchestrator journals a state every few seconds, with the counters of that moment; the counts of later records are
lost with the process, so those records are counted again. Counters without records (stalls, lost leases, duplicates) keep
the values of the state.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass
from functools import partial
from typing import Any

import structlog

from services.common.errors import CorruptDataError
from services.common.records import fates
from services.common.records.fates import ClosedReason, RunCount, StepFact
from services.orchestrator.buffer.experience import AdvantageGroup
from services.orchestrator.buffer.recorded import read_fresh_groups
from services.orchestrator.journal import records, rollouts
from services.orchestrator.journal.parsers import StateRecord, state_from_json
from services.orchestrator.journal.reader import JournalReader
from services.orchestrator.journal.storage.segments import Row
from services.orchestrator.journal.survey import Survey, decode
from services.orchestrator.recovery.parts import RecoveryParts
from services.orchestrator.state.groups import GroupBy, TaskGroup
from services.orchestrator.state.run_control import RunState

log = structlog.get_logger()

KINDS = (records.GROUP, records.TRAJECTORY, records.FAILURE)


def recount(row: Row, record: dict[str, Any], counter_of_failure: Callable[[str], str]) -> Counter[str]:
    """Counts of one record of ``KINDS``; raises the errors of an unreadable record."""
    if row.kind == records.GROUP:
        return Counter({RunCount.TASK_GROUPS_ISSUED.value: int(bool(record["replica_id"]))})
    if row.kind == records.TRAJECTORY:
        sequences = rollouts.trajectory_from_json(record).sequences
        return Counter({RunCount.TOKENS_RECORDED.value: sum(sequence.num_trained_tokens for sequence in sequences)})
    reason = str(record["reason"])
    too_old = reason == fates.TOO_OLD
    return Counter({StepFact.SLOTS_CANCELLED.value if too_old else counter_of_failure(reason): 1})


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """``owners``: (replica, incarnation) of each task group. ``in_batches``: live task groups that batches name."""

    parts: RecoveryParts
    reader: JournalReader
    found: Survey
    owners: Mapping[str, tuple[str, str]]
    in_batches: Set[str]

    def run(self) -> None:
        """Call once, after the last record."""
        parts = self.parts
        self._restore_state()
        parts.judged_before.clear()
        parts.experience.surplus_before = {}
        if self.found.unknown.get(records.BATCH, False):  # one more batch may have been recorded
            for policy in parts.batches:
                parts.experience.lose_batch(policy, ())
        for name in [name for name in parts.groups if self._is_over(name)]:
            self._close(parts.groups[name])
        for name in self.found.lost_groups:
            records.close_group(parts.journal, name, ClosedReason.SET_ASIDE)
        for batches in parts.batches.values():
            batches.forget_statistics()
        _refill_replay(parts, self.reader)
        self._give_back()
        parts.aside.write(parts.journal)

    def _is_over(self, name: str) -> bool:
        """Whether an open group was complete before an outcome of the group was lost. Its slots must not run again: a
        part of the group was trained, or the group may have been closed."""
        return name in self.in_batches or (name in self.found.judged and records.CLOSED in self.found.unknown)

    def _close(self, group: TaskGroup) -> None:
        parts = self.parts
        del parts.groups[group.id]
        parts.experience.cancelled(group)
        records.close_group(parts.journal, group.id, ClosedReason.SET_ASIDE)

    def _restore_state(self) -> None:
        """Apply the newest usable state, and count the records after that."""
        for row in self.reader.last_rows(records.STATE):
            state = decode(self.reader, row, self.parts.aside, state_from_json)
            if state is not None:
                _apply_state(self.parts, state)
                self._recount(row.number)
                return
        self._recount(0)

    def _recount(self, since: int) -> None:
        """Count the records after the newest state, so that a kill loses no counts."""
        is_counted = f"r.number > ? AND r.kind IN ({', '.join('?' * len(KINDS))})"
        rows = self.reader.select(is_counted, (since, *KINDS), lambda row: row.number > since and row.kind in KINDS)
        for row in rows:
            counted = partial(recount, row, counter_of_failure=self.parts.ingest.counter_of)
            self.parts.counters.update(decode(self.reader, row, self.parts.aside, counted) or {})

    def _give_back(self) -> None:
        """Leave open slots with their replica, as if its stream had just broken."""
        parts = self.parts
        # The newest incarnation of a replica is the one with the newest task group.
        newest = dict(owner for name, owner in self.owners.items() if name in self.found.groups)
        for name, group in parts.groups.items():
            replica_id, incarnation = self.owners[name]
            if not replica_id or newest[replica_id] != incarnation:
                parts.dispatcher.orphaned([name])
                continue
            replica = parts.pool.expect(replica_id, incarnation)
            required = group.order.required_versions
            parts.pool.assign(replica, name, group.unresolved, required, evaluates=not group.is_training)
            replica.assignments[name].issued = True


def _apply_state(parts: RecoveryParts, state: StateRecord) -> None:
    parts.counters.clear()
    parts.counters.update(state.counters)
    parts.timeline.restore(state.timeline)
    # A stopped run continues after a restart; a finished run stays finished.
    parts.control.phase = state.phase if state.phase is not RunState.STOPPED else RunState.STARTING
    parts.control.paused = state.paused
    parts.events.apply_control()


def _refill_replay(parts: RecoveryParts, reader: JournalReader) -> None:
    """Trained groups that are young enough for a replay; recovery did not parse their closed task groups."""
    for name, batch in parts.batch_configs.items():
        store, newest = parts.experience.replay[name], parts.batches[name].newest_step
        if store.enabled:
            # Step s trained samples of version s - 1 or older.
            first = max(1, store.version - batch.replay.max_staleness + 1)
            steps = range(first, newest + 1)
            fresh = (_fresh_groups(reader, name, step, batch.group_by) for step in steps)
            parts.experience.refill_replay(name, first, fresh)


def _fresh_groups(reader: JournalReader, policy: str, training_step: int, group_by: GroupBy) -> list[AdvantageGroup]:
    try:
        return read_fresh_groups(reader, policy, training_step, group_by)
    except CorruptDataError as error:  # replay is optional: unreadable groups are not drawn again
        log.warning("replay.lost", policy=policy, step=training_step, error=error.message)
        return []
