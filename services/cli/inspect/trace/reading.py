"""Reads all facts of a task group from a run directory: from the journal first, then from the logs.

Works during the run, after its end, and after any process was killed. Reads only.

Replicas on other machines have clocks of their own. A replica cannot accept an order before its record in the journal, nor
send a record after that was durable. Where its times say so they are moved, by the least that fits; where they fit they
are left alone.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

from services.cli.inspect.run_state import check_run_directory, logged_at, parse_rows
from services.cli.inspect.trace.facts import Assignment, GroupFacts, Note, SequenceFacts, SlotFacts, Used
from services.common import run_files
from services.common.errors import ConfigError
from services.common.records.types import Purpose, RolloutFailure, Sampling, Task, TaskGroupOrder, Trajectory
from services.common.telemetry.log_events import LogEvent
from services.common.telemetry.metrics import TrainerKey
from services.orchestrator.journal import records, rollouts
from services.orchestrator.journal.reader import JournalReader
from services.orchestrator.journal.records import BatchEntry, BatchRecord, GroupRecord, GroupVerdict
from services.orchestrator.journal.segments import Row
from services.orchestrator.state.groups import split_sequence_id

Pulls = Mapping[tuple[str, int], Mapping[int, float]]  # (policy, step) -> rank -> when it first asked

# Events of one task group -> their description.
_OF_GROUP: dict[str, Callable[[Json], str]] = {
    LogEvent.RECORD_DROPPED: lambda row: (
        f"{row.get('outcome')} record of slot {row.get('index')} from {row.get('replica')}"
    ),
    LogEvent.TASK_GROUP_ORPHANED: lambda row: f"no replica plays it; {row.get('open_slots')} slots are open",
    LogEvent.TASK_GROUP_GIVEN_UP: lambda row: f"given up: {row.get('reason')}",
    LogEvent.TASK_GROUP_CANCELLED: lambda row: f"cancelled on its replica: {row.get('reason')}",
    LogEvent.ROLLOUT_RETRY: lambda row: f"slot {row.get('index')} is played again: {row.get('error')}",
    LogEvent.ROLLOUT_CRASHED: lambda row: f"slot {row.get('index')} crashed",
    LogEvent.ROLLOUT_LOST: lambda row: f"slot {row.get('index')} was lost",
}
_OF_REPLICA: dict[str, Callable[[Json], str]] = {
    LogEvent.LEASE_LOST: lambda row: f"the lease of replica {row.get('replica')} ran out",
    LogEvent.REPLICA_REPLACED: lambda row: f"replica {row.get('replica')} was started again",
}
_OF_RUN: dict[str, Callable[[Json], str]] = {
    LogEvent.RUN_RECOVERED: lambda row: "the orchestrator was started again, and went on from its journal",
}


def read_notes(run_dir: Path, facts: GroupFacts) -> tuple[tuple[Note, ...], Pulls]:
    """Notes in order of time, and when which rank asked for which batch."""
    replicas = {assignment.replica_id for assignment in facts.assignments}
    begin = min((assignment.at for assignment in facts.assignments), default=0.0)
    end = float("inf")
    if facts.complete:  # without slots: retention has collected their records since
        end = max((slot.durable_at for slot in facts.slots), default=facts.judged_at)
    wanted = {(use.policy, use.training_step) for use in facts.uses}
    notes: list[Note] = []
    pulls: dict[tuple[str, int], dict[int, float]] = defaultdict(dict)
    needles = [facts.task_group_id, *_OF_REPLICA, *_OF_RUN, *([LogEvent.BATCH_PULLED] if wanted else [])]
    for row in _rows(run_dir, [needle.encode() for needle in needles]):
        event, at = str(row.get("event")), logged_at(row)
        concerns = begin <= at <= end
        if event in _OF_GROUP and row.get("task_group") == facts.task_group_id:
            notes.append(_note(row, at, _OF_GROUP[event]))
        elif event in _OF_REPLICA and row.get("replica") in replicas and concerns:
            notes.append(_note(row, at, _OF_REPLICA[event]))
        elif event in _OF_RUN and concerns:
            notes.append(_note(row, at, _OF_RUN[event]))
        elif event == LogEvent.BATCH_PULLED and (key := (row.get("policy", ""), row.get("step", 0))) in wanted:
            pulls[key].setdefault(row.get("rank", 0), at)
    return tuple(sorted(notes, key=lambda note: note.at)), pulls


def pulls_of(pulls: Pulls, use: Used) -> tuple[tuple[int, float], ...]:
    return tuple(sorted(pulls.get((use.policy, use.training_step), {}).items()))


def _note(row: Json, at: float, text: Callable[[Json], str]) -> Note:
    return Note(at=at, service=row.get("instance", ""), event=row["event"], text=text(row))


def _rows(run_dir: Path, needles: list[bytes]) -> Iterator[Json]:
    """Lines of all logs that hold one of the needles; most lines are not parsed."""
    for path in sorted(run_files.logs(run_dir).glob("*.jsonl")):
        with path.open("rb") as lines:
            yield from parse_rows(line for line in lines if any(needle in line for needle in needles))


Json = dict[str, Any]

_TIMES = ("accepted_at", "started_at", "finished_at", "sent_at")


def open_journal(run_dir: Path) -> JournalReader:
    """Raises ``ConfigError`` when the directory has no journal."""
    directory = run_files.journal(run_dir)
    if not directory.is_dir():
        check_run_directory(run_dir)
        raise ConfigError(f"{run_dir} has no journal yet: its orchestrator has not begun")
    return JournalReader(directory)


def read_group(run_dir: Path, task_group_id: str) -> GroupFacts:
    """Raises ``ConfigError`` for a task group that was never issued in this run."""
    with closing(open_journal(run_dir)) as reader:
        found = issued_groups(reader, task_group_id)
        if not found:
            raise ConfigError(
                f"no task group {task_group_id!r} in this run: `rollmill trace RUN --list` shows which there are"
            )
        facts = replace(found[0], slots=tuple(_slots(reader, found[0])))
    notes, pulls = read_notes(run_dir, facts)
    uses = tuple(replace(use, pulls=pulls_of(pulls, use)) for use in facts.uses)
    return fitted(replace(facts, notes=notes, uses=uses))


def issued_groups(reader: JournalReader, name: str | None = None) -> list[GroupFacts]:
    """All task groups in order of issue, or the one of this name, without the content of their slots."""
    issues = list(reader.rows_of(records.GROUP, name))
    assignments: dict[str, list[Assignment]] = defaultdict(list)
    judged: dict[str, tuple[float, tuple[GroupVerdict, ...]]] = {}
    closed: dict[str, tuple[float, str]] = {}
    for row in reader.rows_of(records.ASSIGNMENT, name):
        record = reader.load(row)
        replica = "" if record is None else records.assignment_from_json(record)[0]
        assignments[row.key].append(Assignment(at=row.written_at, replica_id=replica))
    for row in reader.rows_of(records.VERDICT, name):
        if row.key not in judged and (record := reader.load(row)) is not None:
            judged[row.key] = row.written_at, tuple(records.verdicts_from_json(record))
    for row in reader.rows_of(records.CLOSED, name):  # the last word
        record = reader.load(row)
        closed[row.key] = row.written_at, "" if record is None else records.closed_reason(record)
    uses = _uses(reader, name, issues[0].number) if issues else {}
    evaluated = {row.key: row.written_at for row in reader.rows_of(records.EVALUATION)}
    slots = _bare_slots(reader) if name is None else {}
    groups = []
    for row in issues:
        issued = _issued(reader.load(row))
        judged_at, verdicts = judged.get(row.key, (0.0, ()))
        closed_at, reason = closed.get(row.key, (0.0, ""))
        issue = Assignment(at=row.written_at, replica_id=issued.replica_id)
        groups.append(
            GroupFacts(
                task_group_id=row.key,
                task_id=issued.order.task.task_id,
                purpose=issued.order.purpose.value,
                evaluation=issued.evaluation,
                num_slots=len(issued.order.indices),
                policies=issued.order.policies,
                assignments=(issue, *assignments[row.key]),
                slots=tuple(slot for _, slot in sorted(slots.get(row.key, {}).items())),
                verdicts=verdicts,
                judged_at=judged_at,
                uses=tuple(uses.get(row.key, ())),
                closed_at=closed_at,
                closed_reason=reason,
                evaluated_at=evaluated.get(issued.evaluation, 0.0),
            )
        )
    return groups


def _issued(record: Json | None) -> GroupRecord:
    """The record of a task group; an empty one in place of an unreadable one."""
    if record is not None:
        return records.group_from_json(record)
    task = Task(task_id="", data={})
    order = TaskGroupOrder(task_group_id="", task=task, indices=(), purpose=Purpose.TRAIN, sampling=Sampling())
    return GroupRecord(order=order, position=-1, evaluation="", replica_id="", incarnation="")


def _bare_slots(reader: JournalReader) -> dict[str, dict[int, SlotFacts]]:
    """The slots of every task group from the index alone: when each was durable, and whether it failed."""
    slots: dict[str, dict[int, SlotFacts]] = defaultdict(dict)
    for kind in (records.TRAJECTORY, records.FAILURE):
        for row in reader.rows_of(kind):
            name, _, index = row.key.rpartition("/")
            failure = "failed" if kind == records.FAILURE else ""
            slot = SlotFacts(index=int(index), replica_id="", durable_at=row.written_at, failure=failure)
            known = slots[name].get(slot.index)
            if known is None or slot.durable_at < known.durable_at:
                slots[name][slot.index] = slot
    return slots


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


def _uses(reader: JournalReader, name: str | None, after: int) -> dict[str, list[Used]]:
    """The batches that hold sequences of each task group, or of the one of this name; recorded after its issue."""
    uses: dict[str, list[Used]] = defaultdict(list)
    for row in reader.rows_of(records.BATCH):
        if row.number < after or (record := reader.load(row)) is None:
            continue
        batch = records.batch_from_json(record)
        entries: dict[str, list[BatchEntry]] = defaultdict(list)
        for entry in batch.entries:
            group = split_sequence_id(entry.sequence_id)[0]
            if name in (None, group):
                entries[group].append(entry)
        if entries:
            known = _version_facts(reader, batch.policy, batch.training_step)
            for group, found in entries.items():
                uses[group].append(replace(_used_in(batch, found, row.written_at), **known))
    return uses


def _used_in(batch: BatchRecord, entries: Sequence[BatchEntry], assembled_at: float) -> Used:
    """The use of these entries of one task group in a batch."""
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


def _version_facts(reader: JournalReader, policy: str, training_step: int) -> Json:
    """Fields of ``Used`` from the step's published version; empty before the publication."""
    row = next(reader.rows_of(records.VERSION, f"{policy}/{training_step}"), None)
    record = None if row is None else reader.load(row)
    if row is None or record is None:
        return {}
    _, _, metrics = records.version_from_json(record)
    return {
        "published_at": row.written_at,
        "compute": records.compute_from_json(record),
        "loss": metrics.get(TrainerKey.LOSS),
        "grad_norm": metrics.get(TrainerKey.GRAD_NORM),
    }


def fitted(facts: GroupFacts) -> GroupFacts:
    """The same facts with the times of every replica moved to the orchestrator's clock, as far as they allow it."""
    slots: dict[str, list[SlotFacts]] = defaultdict(list)
    for slot in facts.slots:
        slots[slot.replica_id].append(slot)
    shifts = {replica: _shift(replica, found, facts.assignments) for replica, found in slots.items()}
    moved = tuple(_moved(slot, shifts[slot.replica_id]) for slot in facts.slots)
    return replace(facts, slots=moved, clocks={replica: shift for replica, shift in shifts.items() if shift})


def _shift(replica_id: str, slots: Iterable[SlotFacts], assignments: Iterable[Assignment]) -> float:
    """Seconds to add to a replica's times; 0 when they fit, or when no shift fits."""
    issued = min((a.at for a in assignments if a.replica_id == replica_id and a.at), default=0.0)
    least, most = float("-inf"), float("inf")
    for slot in slots:
        first = next((at for at in (slot.accepted_at, slot.started_at) if at), 0.0)
        last = next((at for at in (slot.sent_at, slot.finished_at) if at), 0.0)
        if first and issued:
            least = max(least, issued - first)
        if last and slot.durable_at:
            most = min(most, slot.durable_at - last)
    if least > most:
        return 0.0
    return min(max(0.0, least), most)


def _moved(slot: SlotFacts, shift: float) -> SlotFacts:
    if not shift:
        return slot
    return replace(slot, **{name: at + shift for name in _TIMES if (at := getattr(slot, name))})
