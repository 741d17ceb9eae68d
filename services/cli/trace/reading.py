"""Everything that a run directory says of one task group: the journal first, the logs for what it does not hold.

Works while the run goes on, after it, and after any of its processes was killed. Reads, and changes nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from services.cli.run_state import check_run_directory
from services.cli.trace.clocks import fitted
from services.cli.trace.facts import Assignment, GroupFacts, SequenceFacts, SlotFacts, Used
from services.cli.trace.logs import pulls_of, read_notes
from services.common.errors import ConfigError
from services.common.types import RolloutFailure, Trajectory
from services.orchestrator.groups import split_sequence_id
from services.orchestrator.journal import records, rollouts
from services.orchestrator.journal.index import Row
from services.orchestrator.journal.reader import JournalReader
from services.orchestrator.journal.records import BatchEntry, BatchRecord

Json = dict[str, Any]


def open_journal(run_dir: Path) -> JournalReader:
    """Raises ``ConfigError`` when the directory has no journal."""
    directory = run_dir / "journal"
    if not directory.is_dir():
        check_run_directory(run_dir)
        raise ConfigError(f"{run_dir} has no journal yet: its orchestrator has not begun")
    return JournalReader(directory)


def read_group(run_dir: Path, task_group_id: str) -> GroupFacts:
    """Raises ``ConfigError`` for a task group that was never issued in this run."""
    reader = open_journal(run_dir)
    try:
        facts = _from_journal(reader, task_group_id)
    finally:
        reader.close()
    notes, pulls = read_notes(run_dir, facts)
    uses = tuple(replace(use, pulls=pulls_of(pulls, use)) for use in facts.uses)
    return fitted(replace(facts, notes=notes, uses=uses))


def _from_journal(reader: JournalReader, name: str) -> GroupFacts:
    issue = next(reader.rows_of(records.GROUP, name), None)
    if issue is None:
        raise ConfigError(f"no task group {name!r} in this run: `millrace trace RUN --list` shows which there are")
    record = reader.load(issue) or {}
    facts = GroupFacts(
        task_group_id=name,
        task_id=record.get("task_id", ""),
        purpose=record.get("purpose", "train"),
        evaluation=record.get("evaluation", ""),
        num_slots=record.get("num_slots", 0),
        policies=tuple(record.get("policies", ())),
        assignments=tuple(_assignments(reader, issue, record)),
    )
    facts = replace(facts, slots=tuple(_slots(reader, facts)), uses=tuple(_uses(reader, name, issue.number)))
    if (row := next(reader.rows_of(records.VERDICT, name), None)) and (found := reader.load(row)):
        facts = replace(facts, judged_at=row.written_at, verdicts=tuple(records.verdicts_from_json(found)))
    for row in reader.rows_of(records.CLOSED, name):  # the last word
        facts = replace(facts, closed_at=row.written_at, closed_reason=(reader.load(row) or {}).get("reason", ""))
    if facts.evaluation and (row := next(reader.rows_of(records.EVALUATION, facts.evaluation), None)):
        facts = replace(facts, evaluated_at=row.written_at)
    return facts


def _assignments(reader: JournalReader, issue: Row, record: Json) -> Iterator[Assignment]:
    yield Assignment(at=issue.written_at, replica_id=record.get("replica_id", ""))
    for row in reader.rows_of(records.ASSIGNMENT, issue.key):
        found = reader.load(row) or {}
        yield Assignment(at=row.written_at, replica_id=found.get("replica_id", ""))


def _slots(reader: JournalReader, facts: GroupFacts) -> Iterator[SlotFacts]:
    keys = [rollouts.trajectory_key(facts.task_group_id, index) for index in range(facts.num_slots)]
    rows: dict[str, Row] = {}
    for kind in (records.TRAJECTORY, records.FAILURE):
        for row in reader.find_rows(kind, keys):
            if row.key not in rows or row.number < rows[row.key].number:  # the first record of a slot wins
                rows[row.key] = row
    for index, key in enumerate(keys):
        if key in rows:
            yield _slot(index, rows[key], reader.load(rows[key]))


def _slot(index: int, row: Row, record: Json | None) -> SlotFacts:
    if record is None:
        return SlotFacts(index=index, replica_id="", durable_at=row.written_at, readable=False)
    if row.kind == records.FAILURE:
        failure = rollouts.failure_from_json(record)
        return replace(_common(failure, row), failure=failure.reason, detail=failure.detail)
    trajectory = rollouts.trajectory_from_json(record)
    sequences = tuple(
        SequenceFacts(
            policy=sequence.policy,
            role=sequence.role,
            attempt=sequence.attempt,
            reward=sequence.reward,
            num_tokens=sequence.num_tokens,
            num_trained_tokens=sequence.num_trained_tokens,
            versions=tuple(dict.fromkeys(s.weight_version for s in sequence.segments if s.is_policy and s.num_tokens)),
            stop_reason=sequence.stop_reason.value,
        )
        for sequence in trajectory.sequences
    )
    return replace(_common(trajectory, row), reward=trajectory.reward, sequences=sequences)


def _common(record: Trajectory | RolloutFailure, row: Row) -> SlotFacts:
    timing = record.timing
    return SlotFacts(
        index=record.index,
        replica_id=record.replica_id,
        durable_at=row.written_at,
        accepted_at=timing.accepted_at,
        started_at=record.started_at,
        finished_at=record.finished_at,
        sent_at=timing.sent_at,
        num_sends=timing.num_sends,
        num_retries=timing.num_retries,
        phases=timing.phases,
    )


def _uses(reader: JournalReader, name: str, after: int) -> Iterator[Used]:
    """Batches that hold sequences of the task group; they were recorded after its issue."""
    for row in reader.rows_of(records.BATCH):
        if row.number < after or (record := reader.load(row)) is None:
            continue
        batch = records.batch_from_json(record)
        entries = [entry for entry in batch.entries if split_sequence_id(entry.sequence_id)[0] == name]
        if entries:
            known = version_facts(reader, batch.policy, batch.training_step)
            yield replace(used_in(batch, entries, row.written_at), **known)


def used_in(batch: BatchRecord, entries: Sequence[BatchEntry], assembled_at: float) -> Used:
    """What these entries of one task group in a batch say."""
    return Used(
        policy=batch.policy,
        training_step=batch.training_step,
        assembled_at=assembled_at,
        num_sequences=len(entries),
        batch_size=len(batch.entries),
        minibatches=tuple(sorted({entry.minibatch for entry in entries})),
        staleness_max=max(entry.staleness for entry in entries),
        replayed=any(entry.replayed for entry in entries),
    )


def version_facts(reader: JournalReader, policy: str, training_step: int) -> Json:
    """Fields of ``Used`` that the step's published version tells; empty before it is published."""
    row = next(reader.rows_of(records.VERSION, f"{policy}/{training_step}"), None)
    record = None if row is None else reader.load(row)
    if row is None or record is None:
        return {}
    metrics = records.from_pairs(record["metrics"])
    return {
        "published_at": row.written_at,
        "compute": tuple((stretch["begin"], stretch["end"]) for stretch in record.get("compute", ())),
        "loss": metrics.get("loss"),
        "grad_norm": metrics.get("grad_norm"),
    }
