"""Restores the orchestrator from the journal: applies the acknowledged records of earlier processes in their order.

Reads only rows that still matter, which SQL over the index selects without reading a long run:

    task groups that are not closed -> their assignments, outcomes, verdicts
    versions, batches, evaluations  -> all; batches from before the first live task group only for their statistics
    the newest state                -> counters, phase

Rows of closed task groups stay on disk, where recorded batches find them. A damaged, unreadable or unusable record is
set aside alone, and the run continues as docs/journal.md says for its kind. Running slots belong to their replica for
one more lease.

The orchestrator journals a state every few seconds, with the counters of that moment; the counts of later records are
lost with the process, so those records are counted again. Counters without records (stalls, lost leases, duplicates) keep
the values of the state.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import islice
from typing import Any

import structlog

from services.common import records as fates
from services.common.errors import ConfigError, CorruptDataError, RollmillError, UnknownPolicyError
from services.common.records import (
    ClosedReason,
    GroupFate,
    RolloutFailure,
    RunCount,
    SetAsideReason,
    StepFact,
    Trajectory,
    WeightVersion,
)
from services.common.telemetry.logs import LogEvent
from services.orchestrator.buffer.assembly import read_fresh_groups, read_what_is_left
from services.orchestrator.buffer.buffer import AdvantageGroup
from services.orchestrator.evaluation import step_of
from services.orchestrator.groups import Outcome, RunState, TaskGroup, split_sequence_id
from services.orchestrator.journal import entries
from services.orchestrator.journal.entries import (
    Assignment,
    BatchRecord,
    EvaluationResult,
    EvaluationStart,
    GroupRecord,
    Observation,
    VersionRecord,
    settled_batch_from_json,
)
from services.orchestrator.journal.reader import UNREADABLE, JournalReader, Quarantine, decode, numbered, open_groups
from services.orchestrator.journal.segments import DamageReason, Row
from services.orchestrator.orchestrator import OrchestratorCore

log = structlog.get_logger()

MOST_TRIES = 1000
OUTCOMES = (entries.TRAJECTORY, entries.FAILURE)
KINDS = (entries.GROUP, *OUTCOMES)  # that are counted again
_NAMING_GROUPS = (entries.GROUP, entries.ASSIGNMENT, entries.VERDICT, entries.CLOSED)


class UnusableRecordError(Exception):
    """A readable record that cannot be applied. The orchestrator that applied a part of it is void: recover again without
    the record."""

    def __init__(self, row: Row, detail: str) -> None:
        super().__init__(f"{row.kind} {row.key}: {detail}")
        self.row = row
        self.detail = detail


def recovered(build: Callable[[Quarantine], OrchestratorCore], reader: JournalReader) -> OrchestratorCore:
    """A built orchestrator with all usable records of the journal.

    ``build`` makes an empty one, with the set-aside records and a journal that is not started.

    Raises:
        ConfigError: recovery set aside as many unusable records as allowed, and found another.
    """
    aside, num_rows = Quarantine.of(reader), reader.last_number()
    for _ in range(MOST_TRIES):
        core = build(aside)
        if not num_rows:
            return core
        core.pool.resumed = True
        recovery = Recovery(core, reader)
        try:
            recovery.look()
            for row in recovery.rows_that_matter():
                recovery.apply(row)
            recovery.complete()
        except UnusableRecordError as error:
            log.warning("run.recovers_again", without=str(error))
            core.withdraw()
            aside.add(error.row, SetAsideReason.REFUSED, error.detail)
            if error.row.kind in OUTCOMES:
                # An outcome takes its task group along: a failed computation of statistics does not tell the one at fault.
                for row in reader.rows_of(entries.GROUP, error.row.key.rpartition("/")[0]):
                    aside.add(row, SetAsideReason.REFUSED, f"one of its outcomes cannot be applied: {error.detail}")
            continue
        log.info(
            LogEvent.RUN_RECOVERED,
            records=num_rows,
            task_groups=len(core.groups),
            state=core.control.state.value,
            set_aside=len(core.aside),
        )
        return core
    run_dir = core.journal.directory.parent
    raise ConfigError(
        f"{MOST_TRIES} records of the journal in {run_dir} cannot be applied, one after another: look at them with "
        f"`rollmill journal {run_dir} list --content`, and begin another run from `rollmill export {run_dir}`"
    )


def recount(row: Row, record: dict[str, Any], counter_of_failure: Callable[[str], str]) -> Counter[str]:
    """Counts of one record of ``KINDS``; raises the errors of an unreadable record."""
    if row.kind == entries.GROUP:
        return Counter({RunCount.TASK_GROUPS_ISSUED.value: int(bool(record["replica_id"]))})
    if row.kind == entries.TRAJECTORY:
        sequences = entries.from_json(Trajectory, record).sequences
        return Counter({RunCount.TOKENS_RECORDED.value: sum(sequence.num_trained_tokens for sequence in sequences)})
    reason = str(record["reason"])
    too_old = reason == fates.TOO_OLD
    return Counter({StepFact.SLOTS_CANCELLED.value if too_old else counter_of_failure(reason): 1})


def first_facts(reader: JournalReader) -> tuple[str, float]:
    """The mark in the names of task groups and when the first record was written, where the record of the run's begin is
    lost; ("", 0) in an empty journal."""
    mark = next((row.key.rpartition("-")[0] for row in reader.rows_of(entries.GROUP)), "")
    return mark, next((row.written_at for row in reader.rows()), 0.0)


class Recovery:
    """One attempt: ``look``, then ``apply`` for each of ``rows_that_matter``, then ``complete``."""

    def __init__(self, core: OrchestratorCore, reader: JournalReader) -> None:
        self.core = core
        self.reader = reader
        self.group_rows: dict[str, Row] = {}  # of task groups that are not closed
        self.groups: dict[str, GroupRecord] = {}  # of these, those with possible later records
        self.lost_groups: set[str] = set()  # of these, those with an unusable record
        self.judged: set[str] = set()  # live task groups with verdicts
        self.surplus: dict[str, set[tuple[str, str, int]]] = {}  # (policy, role, attempt) by task group
        self.observed: set[str] = set()  # live task groups of which the curation was told
        self.version_rows: dict[tuple[str, int], int] = {}  # (policy, version) -> number of its record
        self.newest_batch: dict[str, int] = {}  # by policy, also where the record is damaged
        self.lost_rows: list[Row] = []  # of records with a damaged header, as far as known
        self.unknown: dict[str, bool] = {}  # kinds with damage of an unknown record: is the damage new?
        self.first_live = math.inf  # number of the first record of a live task group
        self.owners: dict[str, tuple[str, str]] = {}  # group -> (replica, incarnation)
        self.in_batches: set[str] = set()  # live task groups that batches name

    # --- what matters ------------------------------------------------------------------------------------------------

    def look(self) -> None:
        """Find the live task groups, and the names and positions after which the run goes on."""
        core, reader = self.core, self.reader
        self._look_at_damage()
        evaluated = {row.key for row in reader.rows_of(entries.EVALUATION) if self._decode(row) is not None}
        for row in open_groups(reader):
            group = self._decode(row)
            if group is None:
                self.lost_groups.add(row.key)
            elif group.evaluation in evaluated:
                continue
            else:
                self.groups[row.key] = group
                self.first_live = min(self.first_live, row.number)
            self.group_rows[row.key] = row
        self._look_at_names()
        for row in reader.rows_of(entries.VERSION):
            policy, number = numbered(row)
            if number is not None:
                self.version_rows.setdefault((policy, number), row.number)
        for row in reader.rows_of(entries.BATCH):
            policy, step = numbered(row)
            self.newest_batch[policy] = max(self.newest_batch.get(policy, 0), step or 0)
        for row in reader.find_rows(entries.VERDICT, self.groups):
            verdicts = self._decode(row)
            if verdicts is not None:  # the last record counts: its slots may have been played again
                self.judged.add(row.key)
                self.surplus[row.key] = {
                    (v.policy, v.role, v.attempt) for v in verdicts.advantage_groups if v.outcome is GroupFate.SURPLUS
                }
        if core.training_orders.observes:
            self.observed = {row.key for row in reader.find_rows(entries.OBSERVATION, self.groups)}
        core.judged_before.update(self.judged)
        core.experience.surplus_before = self.surplus

    def rows_that_matter(self) -> Iterator[Row]:
        """The rows to apply, in the order in which they were submitted."""
        reader = self.reader
        live = [row for name, row in self.group_rows.items() if name in self.groups or name in self.lost_groups]
        live += reader.find_rows(entries.ASSIGNMENT, self.groups)
        for name in (*self.groups, *self.lost_groups):
            live += [row for kind in OUTCOMES for row in reader.rows_below(kind, f"{name}/")]
        live += self.lost_rows
        live.sort(key=lambda row: row.number)
        kinds = [entries.VERSION, entries.BATCH, entries.EVALUATION_START, entries.EVALUATION]
        if self.core.training_orders.observes:
            kinds.append(entries.OBSERVATION)
        return heapq.merge(iter(live), *map(reader.rows_of, kinds), key=lambda row: row.number)

    def is_settled(self, row: Row) -> bool:
        """Whether a batch was trained before the first issue of a live task group, and hence has no live sequence."""
        policy, step = numbered(row)
        published = self.version_rows.get((policy, step), math.inf) if step is not None else math.inf
        return row.number < self.first_live and published < self.first_live

    def _decode(self, row: Row, parse: Callable[[dict[str, Any]], Any] | None = None) -> Any:
        return decode(self.reader, row, self.core.aside, parse or partial(entries.read, row.kind))

    def _look_at_damage(self) -> None:
        """Spans of the segments that tell no row of the index."""
        for span in self.reader.damage():
            # A torn end was never acknowledged: a process died during the write.
            harmless = span.reason in (DamageReason.REPEATED, DamageReason.TORN)
            if harmless or span.kind == entries.SET_ASIDE:
                continue
            row = self.core.aside.add_span(span)
            if row.number and row.key:
                self.lost_rows.append(row)
            else:
                self.unknown[span.kind] = self.unknown.get(span.kind, False) or self.core.aside.is_new(row)
        lost = {row.key for row in self.lost_rows if row.kind == entries.GROUP}
        self.lost_groups |= lost - {row.key for row in self.reader.find_rows(entries.CLOSED, lost)}

    def _look_at_names(self) -> None:
        """Let names and curricula go on behind the last task group that any record speaks of."""
        names, orders = self.core.names, self.core.training_orders
        for kind in _NAMING_GROUPS:
            for row in (*(row for row in self.lost_rows if row.kind == kind), *islice(self.reader.last_rows(kind), 1)):
                names.resume_after(row.key)
        for kind in OUTCOMES:
            for row in islice(self.reader.last_rows(kind), 1):
                names.resume_after(row.key.rpartition("/")[0])
        # Names that no record tells: those of damaged records of task groups.
        spans = (span for span in self.reader.damage() if span.kind == entries.GROUP and not span.key)
        names.skip(sum(max(1, span.num_records) for span in spans))
        num_lost = 0
        positions: dict[str, int] = {}
        for row in self.reader.last_rows(entries.GROUP):
            group = self._decode(row)
            if group is None:
                num_lost += 1  # each took a position of some source at least
            elif not group.evaluation:
                positions.setdefault(group.order.source, group.position + num_lost)
                if positions.keys() >= set(orders.streams):
                    break
        for source in orders.streams:
            orders.resume_after(source, positions.get(source, num_lost - 1))

    # --- records -----------------------------------------------------------------------------------------------------

    def apply(self, row: Row) -> None:
        """Apply a record, or the consequences of its loss."""
        if row.kind == entries.GROUP:
            value: Any = self.groups.get(row.key)
        elif row.kind in OUTCOMES:
            value = self._read_outcome(row)
        else:
            is_settled = row.kind == entries.BATCH and self.is_settled(row)
            value = self._decode(row, settled_batch_from_json if is_settled else None)
        if value is None:
            self._lost(row)
            return
        try:
            self._apply(row, value)
        except (*UNREADABLE, AssertionError, RollmillError) as error:
            raise UnusableRecordError(row, f"{type(error).__name__}: {error}") from error

    def _read_outcome(self, row: Row) -> Outcome | None:
        name, _, index = row.key.rpartition("/")
        if name in self.lost_groups:
            self.core.aside.add(row, SetAsideReason.ORPHANED)
            return None
        if name not in self.core.groups:  # complete: a later record of one of its slots
            return None
        outcome: Outcome | None = self._decode(row)
        if outcome is None:
            return None
        if (outcome.task_group_id, str(outcome.index)) != (name, index):
            self.core.aside.add(row, SetAsideReason.UNREADABLE, "the record belongs to another slot than its key")
            return None
        if not 0 <= outcome.index < len(self.core.groups[name].order.indices):
            self.core.aside.add(row, SetAsideReason.REFUSED, f"its task group has no slot {outcome.index}")
            return None
        return outcome

    def _apply(self, row: Row, value: Any) -> None:
        core = self.core
        match value:
            case GroupRecord():
                self._apply_group(value)
            case Assignment():
                self.owners[row.key] = (value.replica_id, value.incarnation)
                group = core.groups.get(row.key)
                if group is not None:
                    group.owners.add(self.owners[row.key])
                if group is not None and group.is_training:
                    group.born = dict(value.born)
            case Trajectory() | RolloutFailure():
                group = core.groups[value.task_group_id]
                if group.resolve(value):
                    if group.is_training and group.complete and group.id not in self.observed:
                        core.observe(group)
                    core.apply_resolved(group, value)
            case Observation():
                core.training_orders.observe(value.source, value.row, value.rewards)
            case VersionRecord():
                self._apply_version(row, value.version, value.metrics)
            case BatchRecord():
                policy, step = numbered(row)
                if step is not None and (policy, step) not in self.version_rows:
                    read_what_is_left(self.reader, policy, step)  # one without a trajectory is set aside and made again
                self._apply_batch(row, value)
            case EvaluationStart():
                if unknown := value.versions.keys() - core.ledgers.keys():
                    raise UnknownPolicyError(f"no policy {', '.join(sorted(unknown))} in this run")
                if step_of(
                    value.evaluation_id
                ):  # one of them runs at a time: earlier ones without a result were forgotten
                    core.evaluations.skip(lambda p: True)
                core.evaluations.begin(value.evaluation_id, value.versions)
            case EvaluationResult():
                core.evaluations.recover_result(value)

    def _apply_group(self, issued: GroupRecord) -> None:
        core = self.core
        group = TaskGroup(
            order=issued.order, position=issued.position, evaluation=issued.evaluation, born=dict(issued.born)
        )
        if not group.is_training and group.evaluation not in core.evaluations.passes:
            return  # the record of the evaluation's start is lost: no caller asks for this evaluation
        if not issued.evaluation:
            core.training_orders.resume_after(issued.order.source, issued.position)
        core.groups[group.id] = group
        self.owners[group.id] = (issued.replica_id, issued.incarnation)
        group.owners.add(self.owners[group.id])
        if group.is_training:
            core.experience.issued(group)
        else:
            core.evaluations.issued_before(group)

    def _apply_version(self, row: Row, version: WeightVersion, metrics: Mapping[str, float]) -> None:
        core, ledger = self.core, self.core.ledgers[version.policy]
        for missing in range(ledger.newest_number + 1, version.number):
            core.lose_version(version.policy, missing)
        batches = core.batches.get(version.policy)
        if batches is not None and batches.newest_step < version.number and entries.BATCH in self.unknown:
            self._lose_batch(version.policy, version.number, row)
        core.apply_version(version, metrics)

    def _apply_batch(self, row: Row, batch: BatchRecord) -> None:
        core, batches, ledger = self.core, self.core.batches[batch.policy], self.core.ledgers[batch.policy]
        for missing in range(ledger.newest_number + 1, batch.training_step):  # a step begins from the previous version
            core.lose_version(batch.policy, missing)
        for missing in range(batches.newest_step + 1, batch.training_step):
            self._lose_batch(batch.policy, missing, row)
        if not self.is_settled(row):
            groups = {split_sequence_id(entry.sequence_id)[0] for entry in batch.entries}
            self.in_batches |= groups & self.groups.keys()
            core.experience.recover_batch(batch)
        batches.recover(batch)
        core.experience.mixtures[batch.policy].recover(batch.statistics)

    # --- lost records ------------------------------------------------------------------------------------------------

    def _lost(self, row: Row) -> None:
        core = self.core
        policy, number = numbered(row)
        if row.kind in OUTCOMES:
            name = row.key.rpartition("/")[0]
            if name in core.groups:  # its slot is open again, so its group is judged again
                core.judged_before.discard(name)
                self.surplus.pop(name, None)
        elif row.kind == entries.ASSIGNMENT:
            self.owners[row.key] = ("", "")  # its replica reports the group, or the dispatcher issues the group again
            if row.key in core.groups:
                core.groups[row.key].lacks_owner = True
        elif row.kind == entries.VERSION and policy in core.ledgers and number is not None:
            core.lose_version(policy, number)
        elif row.kind == entries.BATCH and policy in core.batches and number is not None:
            self._lose_batch(policy, number, row)

    def _lose_batch(self, policy: str, training_step: int, row: Row) -> None:
        """Handle an unusable batch record. If its version is published, only a replay lacks the batch; else the batch
        is assembled again from other sequences, as the old ones may have been trained."""
        named: set[str] = set()  # sequences of later batches
        for other in self.reader.rows_of(entries.BATCH):
            if other.number >= row.number and numbered(other)[0] == policy:
                batch = self._decode(other)
                named.update(entry.sequence_id for entry in (batch.entries if batch is not None else ()))
        self.core.experience.lose_batch(policy, named)
        if (policy, training_step) in self.version_rows or self.newest_batch.get(policy, 0) > training_step:
            batches = self.core.batches[policy]
            batches.newest_step = max(batches.newest_step, training_step)

    # --- the end -----------------------------------------------------------------------------------------------------

    def complete(self) -> None:
        """Restore state and counters, close the groups of lost records, refill the replay store, and leave running slots
        to their replicas."""
        core = self.core
        self._restore_state()
        core.judged_before.clear()
        core.experience.surplus_before = {}
        if self.unknown.get(entries.BATCH, False):  # one more batch may have been recorded
            for policy in core.batches:
                core.experience.lose_batch(policy, ())
        # Open groups that were complete before an outcome was lost. Their slots must not run again: a part of the group
        # was trained, or the group may have been closed.
        closed_unknown = self.judged if entries.CLOSED in self.unknown else set()
        for name in [name for name in core.groups if name in self.in_batches or name in closed_unknown]:
            core.experience.cancelled(core.groups.pop(name))
            core.close_group(name, ClosedReason.SET_ASIDE)
        for name in self.lost_groups:
            core.close_group(name, ClosedReason.SET_ASIDE)
        for batches in core.batches.values():
            # Of batches with a published version the rows of metrics are written.
            batches.statistics = {s: found for s, found in batches.statistics.items() if s > batches.newest_version}
        self._refill_replay()
        self._give_back()
        for noted in core.aside.take_new():
            core.journal.submit(entries.SET_ASIDE, f"{noted.kind}/{noted.segment}/{noted.offset}", noted)

    def _restore_state(self) -> None:
        """Apply the newest usable state, and count the records after that, so that a kill loses no counts."""
        core, since = self.core, 0
        for row in self.reader.last_rows(entries.STATE):
            state = self._decode(row)
            if state is None:
                continue
            since = row.number
            core.counters.clear()
            core.counters.update({name: int(value) for name, value in state.counters.items()})
            core.timeline.restore(state.timeline)
            # A stopped run continues after a restart; a finished run stays finished.
            core.control.phase = state.phase if state.phase is not RunState.STOPPED else RunState.STARTING
            core.control.paused = state.paused
            core.apply_control()
            break
        is_counted = f"r.number > ? AND r.kind IN ({', '.join('?' * len(KINDS))})"
        for row in self.reader.select(is_counted, (since, *KINDS)):
            counted = partial(recount, row, counter_of_failure=core.ingest.counter_of)
            core.counters.update(self._decode(row, counted) or {})

    def _refill_replay(self) -> None:
        """Trained groups that are young enough for a replay; recovery did not parse their closed task groups."""
        core = self.core
        for name, batches in core.batches.items():
            batch, store = core.recipe.policies[name].batch, core.experience.replay.get(name)
            if store is None:
                continue
            # Step s trained samples of version s - 1 or older.
            first = max(1, store.version - batch.replay.max_staleness + 1)
            found: list[list[AdvantageGroup]] = []
            for step in range(first, batches.newest_step + 1):
                try:
                    found.append(read_fresh_groups(self.reader, name, step, batch.group_by))
                except CorruptDataError as error:  # replay is optional: unreadable groups are not drawn again
                    log.warning("replay.lost", policy=name, step=step, error=error.message)
                    found.append([])
            core.experience.refill_replay(name, first, found)

    def _give_back(self) -> None:
        """Leave open slots with their replica, as if its stream had just broken."""
        core = self.core
        # The newest incarnation of a replica is the one with the newest task group.
        newest = dict(owner for name, owner in self.owners.items() if name in self.groups)
        for name, group in core.groups.items():
            replica_id, incarnation = self.owners[name]
            if not replica_id or newest[replica_id] != incarnation:
                core.dispatcher.orphaned([name])
                continue
            replica = core.pool.expect(replica_id, incarnation)
            core.pool.assign(replica, group)
            replica.assignments[name].issued = True
