"""From the journal back to the ring: what an earlier process acknowledged, applied again in the same order.

Trajectories are parsed only where something may still come of them: those of closed task groups stay on disk, where
recorded batches find them. Slots that were being played belong to their replica for one more lease.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import structlog

from services.common.errors import CorruptDataError
from services.common.fates import GroupFate
from services.orchestrator.batches import read_fresh_groups
from services.orchestrator.groups import AdvantageGroup, GroupBy, TaskGroup
from services.orchestrator.journal import records, rollouts
from services.orchestrator.journal.index import Row
from services.orchestrator.journal.reader import JournalReader
from services.orchestrator.ring import Ring
from services.orchestrator.run_control import RunState

log = structlog.get_logger()


@dataclass(slots=True)
class _Survey:
    """What a first look at the rows alone tells."""

    closed: set[str] = field(default_factory=set)  # task groups
    evaluated: set[str] = field(default_factory=set)  # finished evaluation passes
    judged: dict[str, Row] = field(default_factory=dict)  # verdicts by task group
    observed: set[str] = field(default_factory=set)  # task groups of which the curation was told
    last_state: Row | None = None
    num_rows: int = 0


def recover(ring: Ring, reader: JournalReader) -> None:
    """Apply everything that is in the journal; the ring's journal has not been started yet."""
    survey = _survey(reader.rows())
    if not survey.num_rows:
        return
    ring.pool.resumed = True
    owners: dict[str, tuple[str, str]] = {}  # task group -> (replica, incarnation) that was playing it
    ring.judged_before = survey.judged.keys() - survey.closed
    ring.experience.surplus_before = {
        name: _surplus(record)
        for name in ring.judged_before
        if (record := reader.load(survey.judged[name])) is not None
    }
    for row in reader.rows():
        if row.kind == records.GROUP:
            ring.names.resume_after(row.key)
        if _is_dead(row, survey, ring):
            continue
        record = reader.load(row)
        if record is None:
            ring.counters["journal_records_corrupted"] += 1
            continue
        _apply(ring, row, record, survey, owners)
    if survey.last_state is not None:
        _apply_state(ring, reader.load(survey.last_state))
    ring.judged_before, ring.experience.surplus_before = set(), {}
    _refill_replay(ring, reader)
    _give_back(ring, owners)
    log.info("run.recovered", records=survey.num_rows, task_groups=len(ring.groups), state=ring.control.state.value)


def _survey(rows: Iterator[Row]) -> _Survey:
    survey = _Survey()
    for row in rows:
        survey.num_rows += 1
        if row.kind == records.CLOSED:
            survey.closed.add(row.key)
        elif row.kind == records.VERDICT:
            survey.judged[row.key] = row
        elif row.kind == records.OBSERVATION:
            survey.observed.add(row.key)
        elif row.kind == records.EVALUATION:
            survey.evaluated.add(row.key)
        elif row.kind == records.STATE:
            survey.last_state = row
    return survey


def _surplus(record: dict[str, Any]) -> set[tuple[str, str, int]]:
    """(policy, role, attempt) of the advantage groups that nobody could use."""
    verdicts = records.verdicts_from_json(record)
    return {(v.policy, v.role, v.attempt) for v in verdicts if v.outcome is GroupFate.SURPLUS}


def _is_dead(row: Row, survey: _Survey, ring: Ring) -> bool:
    """Nothing may come of this record any more."""
    if row.kind in (records.TRAJECTORY, records.FAILURE):
        return row.key.rpartition("/")[0] not in ring.groups
    if row.kind == records.ASSIGNMENT:
        return row.key not in ring.groups
    return row.kind in (records.CLOSED, records.STATE, records.RUN, records.VERDICT)


def _apply(ring: Ring, row: Row, record: dict[str, Any], survey: _Survey, owners: dict[str, tuple[str, str]]) -> None:
    if row.kind == records.GROUP:
        _apply_group(ring, record, survey, owners)
    elif row.kind == records.ASSIGNMENT:
        owners[row.key] = (record["replica_id"], record["incarnation"])
        group = ring.groups[row.key]
        group.owners.add(owners[row.key])
        if group.is_training:
            ring.experience.reissued(group, records.born_from_json(record))
    elif row.kind in (records.TRAJECTORY, records.FAILURE):
        is_failure = row.kind == records.FAILURE
        outcome = rollouts.failure_from_json(record) if is_failure else rollouts.trajectory_from_json(record)
        group = ring.groups[outcome.task_group_id]
        if group.resolve(outcome):
            if group.is_training and group.complete and group.id not in survey.observed:
                ring.observe(group)
            ring.apply_resolved(group, outcome)
    elif row.kind == records.OBSERVATION:
        ring.training_orders.curation.observe(record["row"], record["rewards"])
    elif row.kind == records.VERSION:
        version, _, metrics = records.version_from_json(record)
        ring.apply_version(version, metrics)
    elif row.kind == records.BATCH:
        batch = records.batch_from_json(record)
        ring.experience.recover_batch(batch)
        ring.batches[batch.policy].recover(batch)
    elif row.kind == records.EVALUATION_START:
        ring.evaluations.begin(record["evaluation_id"], {v["policy"]: v["number"] for v in record["versions"]})
    elif row.kind == records.EVALUATION:
        ring.evaluations.recover_result(records.evaluation_from_json(record))


def _apply_group(ring: Ring, record: dict[str, Any], survey: _Survey, owners: dict[str, tuple[str, str]]) -> None:
    if not record["evaluation"]:
        ring.training_orders.curriculum.resume_after(record["position"])
    if record["task_group_id"] in survey.closed or record["evaluation"] in survey.evaluated:
        return
    issued = records.group_from_json(record)
    group = TaskGroup(
        order=issued.order, position=issued.position, evaluation=issued.evaluation, born=dict(issued.born)
    )
    ring.groups[group.id] = group
    owners[group.id] = (issued.replica_id, issued.incarnation)
    group.owners.add(owners[group.id])
    if group.is_training:
        ring.experience.issued(group)
    else:
        ring.evaluations.issued_before(group)


def _apply_state(ring: Ring, state: dict[str, Any] | None) -> None:
    if state is None:
        return
    ring.counters.clear()
    ring.counters.update({name: int(value) for name, value in records.from_pairs(state["counters"]).items()})
    ring.timeline.restore(records.from_pairs(state["timeline"]))
    phase = RunState(state["phase"])
    # A run that somebody stopped goes on when it is started again; a finished one stays finished.
    ring.control.phase = phase if phase is not RunState.STOPPED else RunState.STARTING
    ring.control.paused = state["paused"]
    ring.apply_control()


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


def _give_back(ring: Ring, owners: dict[str, tuple[str, str]]) -> None:
    """Open slots stay with the replica that was playing them, as if its stream had just broken."""
    # The newest incarnation of a replica is the one with the newest task group.
    newest = dict(owners.values())
    for name, group in ring.groups.items():
        replica_id, incarnation = owners[name]
        if not replica_id or newest[replica_id] != incarnation:
            ring.dispatcher.orphaned([name])
            continue
        replica = ring.pool.expect(replica_id, incarnation)
        ring.pool.assign(replica, name, group.unresolved, group.order.required_versions)
        replica.assignments[name].issued = True
