"""From the journal back to the ring: what an earlier process acknowledged, applied again in the same order.

Only rows that still matter are read (``survey``). A record that is damaged, unreadable or cannot be applied costs itself:
it is set aside, and the run goes on as docs/journal.md says for its kind. Slots that were being played belong to their
replica for one more lease.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import structlog

from services.common.errors import ConfigError, CorruptDataError, MillraceError, UnknownPolicyError
from services.common.fates import ClosedReason, SetAsideReason
from services.common.refusals import RefusalReason
from services.common.types import Trajectory, WeightVersion
from services.orchestrator.batches import read_fresh_groups
from services.orchestrator.curation import AcceptAll
from services.orchestrator.groups import AdvantageGroup, GroupBy, Outcome, TaskGroup, split_sequence_id
from services.orchestrator.journal import records, rollouts
from services.orchestrator.journal.index import Row
from services.orchestrator.journal.reader import JournalReader
from services.orchestrator.journal.records import BatchRecord, EvaluationResult
from services.orchestrator.quarantine import Quarantine
from services.orchestrator.record_facts import RecordRefusedError, refuse
from services.orchestrator.recount import KINDS, recount
from services.orchestrator.ring import Ring
from services.orchestrator.run_control import RunState
from services.orchestrator.survey import UNREADABLE, Survey, decode, numbered, rows_that_matter, spare_names, survey

log = structlog.get_logger()

MOST_TRIES = 1000

_OUTCOMES = (records.TRAJECTORY, records.FAILURE)


class UnusableRecordError(Exception):
    """A record that can be read and cannot be applied. What it has touched is void: recover again, without it."""

    def __init__(self, row: Row, detail: str) -> None:
        super().__init__(f"{row.kind} {row.key}: {detail}")
        self.row = row
        self.detail = detail


def recovered(build: Callable[[], Ring], reader: JournalReader) -> Ring:
    """A ring with everything in the journal that can be used; ``build`` makes an empty one, whose journal is not started.

    Raises:
        ConfigError: records that cannot be applied were set aside again and again, and the next one cannot be either.
    """
    aside = Quarantine.of(reader)
    for _ in range(MOST_TRIES):
        ring = build()
        try:
            recover(ring, reader, aside)
            return ring
        except UnusableRecordError as error:
            log.warning("run.recovers_again", without=str(error))
            ring.metrics.close()
            ring.journal.withdraw()
            _refuse(reader, error, aside)
    raise ConfigError(
        f"{MOST_TRIES} records of the journal in {ring.run_dir} cannot be applied, one after another: look at them with "
        f"`millrace journal {ring.run_dir} list --set-aside`, then `millrace journal {ring.run_dir} repair`"
    )


def _refuse(reader: JournalReader, error: UnusableRecordError, aside: Quarantine) -> None:
    """Set aside what cannot be applied. An outcome takes its task group along: which of its outcomes is at fault is not
    known when their statistics cannot be computed."""
    aside.add(error.row, SetAsideReason.REFUSED, error.detail)
    if error.row.kind in _OUTCOMES:
        name = error.row.key.rpartition("/")[0]
        for row in reader.rows_of(records.GROUP, name):
            aside.add(row, SetAsideReason.REFUSED, f"an outcome of it cannot be applied: {error.detail}")


def recover(ring: Ring, reader: JournalReader, aside: Quarantine | None = None) -> None:
    """Apply everything that is in the journal; the ring's journal has not been started yet.

    Raises:
        UnusableRecordError: the ring is void; ``recovered`` tries again without the record.
    """
    ring.aside = Quarantine.of(reader) if aside is None else aside
    observes = not isinstance(ring.training_orders.curation, AcceptAll)
    found = survey(reader, ring.aside, observes=observes)
    if not found.num_rows:
        return
    ring.pool.resumed = True
    recovery = _Recovery(ring, reader, found, observes=observes)
    for row in rows_that_matter(reader, found, observes=observes):
        recovery.apply(row)
    recovery.finish()
    log.info(
        "run.recovered",
        records=found.num_rows,
        task_groups=len(ring.groups),
        state=ring.control.state.value,
        set_aside=len(ring.aside),
    )


@dataclass(slots=True)
class _Recovery:
    """One recovery on its way."""

    ring: Ring
    reader: JournalReader
    found: Survey
    observes: bool
    owners: dict[str, tuple[str, str]] = field(default_factory=dict)  # task group -> (replica, incarnation) playing it
    in_batches: set[str] = field(default_factory=set)  # live task groups that batches name

    def __post_init__(self) -> None:
        ring, found = self.ring, self.found
        ring.judged_before = set(found.judged)
        ring.experience.surplus_before = found.surplus
        for name in found.last_name:
            ring.names.resume_after(name)
        ring.names.skip(spare_names(self.reader))
        ring.training_orders.curriculum.resume_after(found.position)

    def apply(self, row: Row) -> None:
        """Apply a record, or what its loss means."""
        value = self._read(row)
        if value is None:
            self._lost(row)
            return
        try:
            self._apply(row, value)
        except (*UNREADABLE, AssertionError, MillraceError) as error:
            raise UnusableRecordError(row, f"{type(error).__name__}: {error}") from error

    def _read(self, row: Row) -> Any:
        if row.kind == records.GROUP:
            return self.found.groups.get(row.key)
        if row.kind in _OUTCOMES:
            return self._read_outcome(row)
        is_settled = row.kind == records.BATCH and self.found.is_settled(row)
        return decode(self.reader, row, self.ring.aside, _settled_batch if is_settled else _PARSERS[row.kind])

    def _read_outcome(self, row: Row) -> Outcome | None:
        name, _, index = row.key.rpartition("/")
        if name in self.found.lost_groups:
            self.ring.aside.add(row, SetAsideReason.ORPHANED)
            return None
        if name not in self.ring.groups:  # complete: a later record of one of its slots
            return None
        outcome: Outcome | None = decode(self.reader, row, self.ring.aside, _PARSERS[row.kind])
        if outcome is not None and (outcome.task_group_id, str(outcome.index)) != (name, index):
            self.ring.aside.add(row, SetAsideReason.UNREADABLE, "it is of another slot than its key says")
            return None
        return None if outcome is None or self._is_refused(row, outcome) else outcome

    def _is_refused(self, row: Row, outcome: Outcome) -> bool:
        """Set aside what ingestion would refuse today, and an earlier release took in."""
        group = self.ring.groups[outcome.task_group_id]
        try:
            if not group.has_slot(outcome.index):
                refuse(RefusalReason.NUMBER, f"its task group has no slot {outcome.index}")
            if isinstance(outcome, Trajectory):  # versions are not compared: records of some may be lost
                self.ring.bounds.check(outcome, group.order, lambda policy: sys.maxsize)
        except RecordRefusedError as error:
            self.ring.aside.add(row, SetAsideReason.REFUSED, str(error))
            return True
        return False

    def _apply(self, row: Row, value: Any) -> None:
        ring = self.ring
        if row.kind == records.GROUP:
            self._apply_group(value)
        elif row.kind == records.ASSIGNMENT:
            self.owners[row.key] = value[:2]
            group = ring.groups.get(row.key)
            if group is not None:
                group.owners.add(self.owners[row.key])
            if group is not None and group.is_training:
                ring.experience.reissued(group, value[2])
        elif row.kind in _OUTCOMES:
            self._apply_outcome(value)
        elif row.kind == records.OBSERVATION:
            ring.training_orders.curation.observe(*value)
        elif row.kind == records.VERSION:
            self._apply_version(row, *value)
        elif row.kind == records.BATCH:
            self._apply_batch(row, value)
        elif row.kind == records.EVALUATION_START:
            self._apply_evaluation_start(*value)
        elif row.kind == records.EVALUATION:
            ring.evaluations.recover_result(value)

    def _apply_group(self, issued: records.GroupRecord) -> None:
        ring = self.ring
        group = TaskGroup(
            order=issued.order, position=issued.position, evaluation=issued.evaluation, born=dict(issued.born)
        )
        if not group.is_training and not ring.evaluations.is_running(group.evaluation):
            return  # the record of its evaluation's start is lost: nobody asks for it
        if not issued.evaluation:
            ring.training_orders.curriculum.resume_after(issued.position)
        ring.groups[group.id] = group
        self.owners[group.id] = (issued.replica_id, issued.incarnation)
        group.owners.add(self.owners[group.id])
        if group.is_training:
            ring.experience.issued(group)
        else:
            ring.evaluations.issued_before(group)

    def _apply_outcome(self, outcome: Outcome) -> None:
        ring = self.ring
        group = ring.groups[outcome.task_group_id]
        if group.resolve(outcome):
            if group.is_training and group.complete and group.id not in self.found.observed:
                ring.observe(group)
            ring.apply_resolved(group, outcome)

    def _apply_evaluation_start(self, evaluation_id: str, versions: Mapping[str, int]) -> None:
        if unknown := versions.keys() - self.ring.ledgers.keys():
            raise UnknownPolicyError(f"no policy {', '.join(sorted(unknown))} in this run")
        self.ring.evaluations.begin(evaluation_id, versions)

    def _apply_version(self, row: Row, version: WeightVersion, metrics: Mapping[str, float]) -> None:
        ledger = self.ring.ledgers[version.policy]
        for missing in range(ledger.newest_number + 1, version.number):
            self.ring.lose_version(version.policy, missing)
        batches = self.ring.batches.get(version.policy)
        if batches is not None and batches.newest_step < version.number and records.BATCH in self.found.unknown:
            self._lose_batch(version.policy, version.number, row)
        self.ring.apply_version(version, metrics)

    def _apply_batch(self, row: Row, batch: BatchRecord) -> None:
        batches, ledger = self.ring.batches[batch.policy], self.ring.ledgers[batch.policy]
        for missing in range(ledger.newest_number + 1, batch.training_step):  # a step begins from the version before it
            self.ring.lose_version(batch.policy, missing)
        for missing in range(batches.newest_step + 1, batch.training_step):
            self._lose_batch(batch.policy, missing, row)
        if not self.found.is_settled(row):
            groups = {split_sequence_id(entry.sequence_id)[0] for entry in batch.entries}
            self.in_batches |= groups & self.found.groups.keys()
            self.ring.experience.recover_batch(batch)
        batches.recover(batch)

    # --- what a loss means -------------------------------------------------------------------------------------------

    def _lost(self, row: Row) -> None:
        ring = self.ring
        policy, number = numbered(row)
        if row.kind in _OUTCOMES:
            name = row.key.rpartition("/")[0]
            if name in ring.groups:  # its slot is open again, so its group is judged again
                ring.judged_before.discard(name)
                self.found.surplus.pop(name, None)
        elif row.kind == records.ASSIGNMENT:
            self.owners[row.key] = ("", "")  # the replica that plays it says so, or it is issued again
            if row.key in ring.groups:
                ring.groups[row.key].lacks_owner = True
        elif row.kind == records.VERSION and policy in ring.ledgers and number is not None:
            ring.lose_version(policy, number)
        elif row.kind == records.BATCH and policy in ring.batches and number is not None:
            self._lose_batch(policy, number, row)

    def _lose_batch(self, policy: str, training_step: int, row: Row) -> None:
        """The record of a batch cannot be used. Where its version is published only a replay misses it; else it is put
        together again, of other sequences: what it had may have been trained."""
        self.ring.experience.lose_batch(policy, self._named_after(policy, row.number))
        if (policy, training_step) in self.found.version_rows or self.found.newest_batch.get(policy, 0) > training_step:
            self.ring.batches[policy].lose(training_step)

    def _named_after(self, policy: str, number: int) -> set[str]:
        """Sequences in batches of a policy that were recorded later."""
        named: set[str] = set()
        for row in self.reader.rows_of(records.BATCH):
            if row.number >= number and numbered(row)[0] == policy:
                batch = decode(self.reader, row, self.ring.aside, records.batch_from_json)
                named.update(entry.sequence_id for entry in (batch.entries if batch is not None else ()))
        return named

    # --- the end -----------------------------------------------------------------------------------------------------

    def finish(self) -> None:
        ring = self.ring
        self._restore_state()
        ring.judged_before, ring.experience.surplus_before = set(), {}
        if self.found.unknown.get(records.BATCH, False):  # one more batch may have been recorded
            for policy in ring.batches:
                ring.experience.lose_batch(policy, ())
        for name in [name for name in ring.groups if self._is_over(name)]:
            self._close(ring.groups[name])
        for name in self.found.lost_groups:
            ring.close_group(name, ClosedReason.SET_ASIDE)
        for batches in ring.batches.values():
            batches.forget_statistics()
        _refill_replay(ring, self.reader)
        self._give_back()
        ring.aside.write(ring.journal)

    def _is_over(self, name: str) -> bool:
        """Whether an open group was complete once, and an outcome of it is lost since, so that its slots must not be played
        again: a part of it was trained, or it may have been closed."""
        return name in self.in_batches or (name in self.found.judged and records.CLOSED in self.found.unknown)

    def _close(self, group: TaskGroup) -> None:
        ring = self.ring
        del ring.groups[group.id]
        ring.experience.cancelled(group)
        ring.close_group(group.id, ClosedReason.SET_ASIDE)

    def _restore_state(self) -> None:
        """Of the newest state that can be used."""
        for row in self.reader.last_rows(records.STATE):
            state = decode(self.reader, row, self.ring.aside, _state)
            if state is not None:
                _apply_state(self.ring, state)
                self._recount(row.number)
                return
        self._recount(0)

    def _recount(self, since: int) -> None:
        """Count what records behind the newest state tell, so that a kill takes nothing from the counters."""
        is_counted = f"r.number > ? AND r.kind IN ({', '.join('?' * len(KINDS))})"
        rows = self.reader.select(is_counted, (since, *KINDS), lambda row: row.number > since and row.kind in KINDS)
        for row in rows:
            counted = partial(recount, row, counter_of_failure=self.ring.ingest.counter_of)
            self.ring.counters.update(decode(self.reader, row, self.ring.aside, counted) or {})

    def _give_back(self) -> None:
        """Open slots stay with the replica that was playing them, as if its stream had just broken."""
        ring = self.ring
        # The newest incarnation of a replica is the one with the newest task group.
        newest = dict(owner for name, owner in self.owners.items() if name in self.found.groups)
        for name, group in ring.groups.items():
            replica_id, incarnation = self.owners[name]
            if not replica_id or newest[replica_id] != incarnation:
                ring.dispatcher.orphaned([name])
                continue
            replica = ring.pool.expect(replica_id, incarnation)
            ring.pool.assign(replica, name, group.unresolved, group.order.required_versions)
            replica.assignments[name].issued = True


@dataclass(frozen=True, slots=True, kw_only=True)
class _State:
    phase: RunState
    paused: bool
    counters: Mapping[str, int]
    timeline: Mapping[str, float]


def _state(record: dict[str, Any]) -> _State:
    return _State(
        phase=RunState(record["phase"]),
        paused=bool(record["paused"]),
        counters={name: int(value) for name, value in records.from_pairs(record["counters"]).items()},
        timeline=records.from_pairs(record["timeline"]),
    )


def _apply_state(ring: Ring, state: _State) -> None:
    ring.counters.clear()
    ring.counters.update(state.counters)
    ring.timeline.restore(state.timeline)
    # A run that somebody stopped goes on when it is started again; a finished one stays finished.
    ring.control.phase = state.phase if state.phase is not RunState.STOPPED else RunState.STARTING
    ring.control.paused = state.paused
    ring.apply_control()


def _assignment(record: dict[str, Any]) -> tuple[str, str, dict[str, int]]:
    return record["replica_id"], record["incarnation"], records.born_from_json(record)


def _observation(record: dict[str, Any]) -> tuple[int, list[float]]:
    return int(record["row"]), [float(reward) for reward in record["rewards"]]


def _version(record: dict[str, Any]) -> tuple[WeightVersion, dict[str, float]]:
    version, _, metrics = records.version_from_json(record)
    return version, metrics


def _settled_batch(record: dict[str, Any]) -> BatchRecord:
    """Without its sequences: all of them were trained long ago."""
    return BatchRecord(
        policy=record["policy"],
        training_step=record["training_step"],
        entries=(),
        minibatches=(),
        statistics=records.from_pairs(record["statistics"]),
    )


def _evaluation_start(record: dict[str, Any]) -> tuple[str, dict[str, int]]:
    return record["evaluation_id"], {v["policy"]: v["number"] for v in record["versions"]}


def _evaluation(record: dict[str, Any]) -> EvaluationResult:
    return records.evaluation_from_json(record)


_PARSERS: Mapping[str, Callable[[dict[str, Any]], Any]] = {
    records.ASSIGNMENT: _assignment,
    records.TRAJECTORY: rollouts.trajectory_from_json,
    records.FAILURE: rollouts.failure_from_json,
    records.OBSERVATION: _observation,
    records.VERSION: _version,
    records.BATCH: records.batch_from_json,
    records.EVALUATION_START: _evaluation_start,
    records.EVALUATION: _evaluation,
}


def parser_of(kind: str) -> Callable[[dict[str, Any]], Any]:
    """What reads a record of a kind; a kind that recovery does not read needs no more than its JSON."""
    others = {
        records.GROUP: records.group_from_json,
        records.VERDICT: records.verdicts_from_json,
        records.STATE: _state,
    }
    return _PARSERS.get(kind) or others.get(kind) or (lambda record: record)


def _refill_replay(ring: Ring, reader: JournalReader) -> None:
    """Trained groups that are young enough to be trained again; their task groups are closed, so nobody parsed them."""
    for name, policy in ring.recipe.trained_policies.items():
        store, newest = ring.experience.replay[name], ring.batches[name].newest_step
        if store.enabled:
            # Step s trained what was sampled from version s - 1 or before.
            first = max(1, store.version - policy.batch.replay.max_staleness + 1)
            steps = range(first, newest + 1)
            fresh = (_fresh_groups(reader, name, step, policy.batch.group_by) for step in steps)
            ring.experience.refill_replay(name, first, fresh)


def _fresh_groups(reader: JournalReader, policy: str, training_step: int, group_by: GroupBy) -> list[AdvantageGroup]:
    try:
        return read_fresh_groups(reader, policy, training_step, group_by)
    except CorruptDataError as error:  # replay is a supplement: what cannot be read is not drawn again
        log.warning("replay.lost", policy=policy, step=training_step, error=error.message)
        return []
