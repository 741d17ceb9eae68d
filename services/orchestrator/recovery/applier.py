"""Applies the records of the journal to the parts of the orchestrator, and the consequences of lost records."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from services.common.errors import RollmillError, UnknownPolicyError
from services.common.records.fates import SetAsideReason
from services.common.records.refusals import RefusalReason
from services.common.records.types import Trajectory, WeightVersion
from services.orchestrator.buffer.recorded import read_what_is_left
from services.orchestrator.dispatch.threshold import step_of
from services.orchestrator.ingest.bounds import RecordRefusedError, refuse
from services.orchestrator.journal import records
from services.orchestrator.journal.parsers import PARSERS, settled_batch_from_json
from services.orchestrator.journal.reader import JournalReader
from services.orchestrator.journal.records import BatchRecord
from services.orchestrator.journal.storage.segments import Row
from services.orchestrator.journal.survey import UNREADABLE, Survey, decode, numbered, spare_names
from services.orchestrator.recovery.parts import RecoveryParts
from services.orchestrator.state.groups import Outcome, TaskGroup, split_sequence_id

OUTCOMES = (records.TRAJECTORY, records.FAILURE)


class UnusableRecordError(Exception):
    """A readable record that cannot be applied. The parts that applied a part of it are void: recover again without
    the record."""

    def __init__(self, row: Row, detail: str) -> None:
        super().__init__(f"{row.kind} {row.key}: {detail}")
        self.row = row
        self.detail = detail


@dataclass(slots=True)
class RecordApplier:
    """State of one recovery."""

    parts: RecoveryParts
    reader: JournalReader
    found: Survey
    owners: dict[str, tuple[str, str]] = field(default_factory=dict)  # group -> (replica, incarnation)
    in_batches: set[str] = field(default_factory=set)  # live task groups that batches name

    def __post_init__(self) -> None:
        parts, found = self.parts, self.found
        parts.judged_before.update(found.judged)
        parts.experience.surplus_before = found.surplus
        for name in found.last_name:
            parts.names.resume_after(name)
        parts.names.skip(spare_names(self.reader))
        for source, position in found.positions.items():
            parts.training_orders.resume_after(source, position)

    def apply(self, row: Row) -> None:
        """Apply a record, or the consequences of its loss."""
        value = self._read(row)
        if value is None:
            self._lost(row)
            return
        try:
            self._apply(row, value)
        except (*UNREADABLE, AssertionError, RollmillError) as error:
            raise UnusableRecordError(row, f"{type(error).__name__}: {error}") from error

    def _read(self, row: Row) -> Any:
        if row.kind == records.GROUP:
            return self.found.groups.get(row.key)
        if row.kind in OUTCOMES:
            return self._read_outcome(row)
        is_settled = row.kind == records.BATCH and self.found.is_settled(row)
        return decode(self.reader, row, self.parts.aside, settled_batch_from_json if is_settled else PARSERS[row.kind])

    def _read_outcome(self, row: Row) -> Outcome | None:
        name, _, index = row.key.rpartition("/")
        if name in self.found.lost_groups:
            self.parts.aside.add(row, SetAsideReason.ORPHANED)
            return None
        if name not in self.parts.groups:  # complete: a later record of one of its slots
            return None
        outcome: Outcome | None = decode(self.reader, row, self.parts.aside, PARSERS[row.kind])
        if outcome is not None and (outcome.task_group_id, str(outcome.index)) != (name, index):
            self.parts.aside.add(row, SetAsideReason.UNREADABLE, "the record belongs to another slot than its key")
            return None
        return None if outcome is None or self._is_refused(row, outcome) else outcome

    def _is_refused(self, row: Row, outcome: Outcome) -> bool:
        """Set aside outcomes that ingestion refuses today, and an earlier release accepted."""
        group = self.parts.groups[outcome.task_group_id]
        try:
            if not group.has_slot(outcome.index):
                refuse(RefusalReason.NUMBER, f"its task group has no slot {outcome.index}")
            if isinstance(outcome, Trajectory):  # versions are not compared: records of some may be lost
                self.parts.bounds.check(outcome, group.order, lambda policy: sys.maxsize)
        except RecordRefusedError as error:
            self.parts.aside.add(row, SetAsideReason.REFUSED, str(error))
            return True
        return False

    def _apply(self, row: Row, value: Any) -> None:
        parts = self.parts
        if row.kind == records.GROUP:
            self._apply_group(value)
        elif row.kind == records.ASSIGNMENT:
            self.owners[row.key] = value[:2]
            group = parts.groups.get(row.key)
            if group is not None:
                group.owners.add(self.owners[row.key])
            if group is not None and group.is_training:
                parts.experience.reissued(group, value[2])
        elif row.kind in OUTCOMES:
            self._apply_outcome(value)
        elif row.kind == records.OBSERVATION:
            parts.training_orders.observe(*value)
        elif row.kind == records.VERSION:
            self._apply_version(row, *value)
        elif row.kind == records.BATCH:
            policy, step = numbered(row)
            if step is not None and (policy, step) not in self.found.version_rows:
                read_what_is_left(self.reader, policy, step)  # one without a trajectory is set aside and made again
            self._apply_batch(row, value)
        elif row.kind == records.EVALUATION_START:
            self._apply_evaluation_start(*value)
        elif row.kind == records.EVALUATION:
            parts.evaluations.recover_result(value)

    def _apply_group(self, issued: records.GroupRecord) -> None:
        parts = self.parts
        group = TaskGroup(
            order=issued.order, position=issued.position, evaluation=issued.evaluation, born=dict(issued.born)
        )
        if not group.is_training and not parts.evaluations.is_running(group.evaluation):
            return  # the record of the evaluation's start is lost: no caller asks for this evaluation
        if not issued.evaluation:
            parts.training_orders.resume_after(issued.order.source, issued.position)
        parts.groups[group.id] = group
        self.owners[group.id] = (issued.replica_id, issued.incarnation)
        group.owners.add(self.owners[group.id])
        if group.is_training:
            parts.experience.issued(group)
        else:
            parts.evaluations.issued_before(group)

    def _apply_outcome(self, outcome: Outcome) -> None:
        parts = self.parts
        group = parts.groups[outcome.task_group_id]
        if group.resolve(outcome):
            if group.is_training and group.complete and group.id not in self.found.observed:
                parts.events.observe(group)
            parts.events.apply_resolved(group, outcome)

    def _apply_evaluation_start(self, evaluation_id: str, versions: Mapping[str, int]) -> None:
        if unknown := versions.keys() - self.parts.ledgers.keys():
            raise UnknownPolicyError(f"no policy {', '.join(sorted(unknown))} in this run")
        if step_of(evaluation_id):  # one of them runs at a time: earlier ones without a result were forgotten
            self.parts.evaluations.skip(lambda p: True)
        self.parts.evaluations.begin(evaluation_id, versions)

    def _apply_version(self, row: Row, version: WeightVersion, metrics: Mapping[str, float]) -> None:
        ledger = self.parts.ledgers[version.policy]
        for missing in range(ledger.newest_number + 1, version.number):
            self.parts.versions.lose(version.policy, missing)
        batches = self.parts.batches.get(version.policy)
        if batches is not None and batches.newest_step < version.number and records.BATCH in self.found.unknown:
            self._lose_batch(version.policy, version.number, row)
        self.parts.versions.apply(version, metrics)

    def _apply_batch(self, row: Row, batch: BatchRecord) -> None:
        batches, ledger = self.parts.batches[batch.policy], self.parts.ledgers[batch.policy]
        for missing in range(ledger.newest_number + 1, batch.training_step):  # a step begins from the previous version
            self.parts.versions.lose(batch.policy, missing)
        for missing in range(batches.newest_step + 1, batch.training_step):
            self._lose_batch(batch.policy, missing, row)
        if not self.found.is_settled(row):
            groups = {split_sequence_id(entry.sequence_id)[0] for entry in batch.entries}
            self.in_batches |= groups & self.found.groups.keys()
            self.parts.experience.recover_batch(batch)
        batches.recover(batch)

    # --- lost records ------------------------------------------------------------------------------------------------

    def _lost(self, row: Row) -> None:
        parts = self.parts
        policy, number = numbered(row)
        if row.kind in OUTCOMES:
            name = row.key.rpartition("/")[0]
            if name in parts.groups:  # its slot is open again, so its group is judged again
                parts.judged_before.discard(name)
                self.found.surplus.pop(name, None)
        elif row.kind == records.ASSIGNMENT:
            self.owners[row.key] = ("", "")  # its replica reports the group, or the dispatcher issues the group again
            if row.key in parts.groups:
                parts.groups[row.key].lacks_owner = True
        elif row.kind == records.VERSION and policy in parts.ledgers and number is not None:
            parts.versions.lose(policy, number)
        elif row.kind == records.BATCH and policy in parts.batches and number is not None:
            self._lose_batch(policy, number, row)

    def _lose_batch(self, policy: str, training_step: int, row: Row) -> None:
        """Handle an unusable batch record. If its version is published, only a replay lacks the batch; else the batch
        is assembled again from other sequences, as the old ones may have been trained."""
        self.parts.experience.lose_batch(policy, self._named_after(policy, row.number))
        if (policy, training_step) in self.found.version_rows or self.found.newest_batch.get(policy, 0) > training_step:
            self.parts.batches[policy].lose(training_step)

    def _named_after(self, policy: str, number: int) -> set[str]:
        """Ids of the sequences in later recorded batches of a policy."""
        named: set[str] = set()
        for row in self.reader.rows_of(records.BATCH):
            if row.number >= number and numbered(row)[0] == policy:
                batch = decode(self.reader, row, self.parts.aside, records.batch_from_json)
                named.update(entry.sequence_id for entry in (batch.entries if batch is not None else ()))
        return named
