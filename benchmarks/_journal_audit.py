"""Audits a journal: each acknowledged slot has one record, and each record follows from other records.

    acknowledged slots -> a usable record each                          lost
    records of slots, batches, sequences in batches -> one each         twice
    batches 1, 2, 3 ...; versions 0, 1, 2 ..., each after its batch     order
    task groups -> closed, or with an open slot, or in the buffer       open
    counters of the newest state -> records counted again               counters

The audit excuses damage that the journal itself names: such a record is void, and its slot may have another. Reads
only. Needs a journal with ``retention: all``.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from services.common import records as fates
from services.orchestrator.groups import split_sequence_id
from services.orchestrator.journal import entries
from services.orchestrator.journal.reader import JournalReader
from services.orchestrator.journal.segments import Row
from services.orchestrator.recovery import KINDS, recount

_SLOTS = (entries.TRAJECTORY, entries.FAILURE)
_RECOUNTED = (fates.RunCount.TASK_GROUPS_ISSUED, fates.RunCount.TOKENS_RECORDED, fates.StepFact.SLOTS_CANCELLED)


class Rule(StrEnum):
    """Rules of the audit."""

    LOST = "lost"
    TWICE = "twice"
    ORDER = "order"
    OPEN = "open"
    COUNTERS = "counters"


@dataclass(slots=True)
class Findings:
    """Violations that an audit found; empty lists are good."""

    violations: dict[Rule, list[str]] = field(default_factory=lambda: {rule: [] for rule in Rule})
    num_slots: int = 0  # recorded
    num_batches: int = 0
    num_versions: int = 0
    num_void: int = 0  # records that are damaged or were set aside
    num_excused: int = 0  # acknowledged slots with a record that was damaged later

    @property
    def clean(self) -> bool:
        return not any(self.violations.values())

    def add(self, rule: Rule, text: str) -> None:
        self.violations[rule].append(text)


def audit(reader: JournalReader, acknowledged: Collection[str] = (), *, finished: bool = False) -> Findings:
    """Check a journal without a writer.

    ``acknowledged``: slots (``<task group>/<index>``) that replicas noted as durable. ``finished``: the run has taken
    all its steps, so that no task group is open.
    """
    found = Findings()
    journal = _Journal(reader)
    found.num_void = len(journal.void)
    _check_slots(journal, acknowledged, found)
    _check_batches(journal, found)
    _check_versions(journal, found)
    _check_groups(journal, finished, found)
    _check_counters(journal, found)
    return found


class _Journal:
    """The usable records, by kind and in order; loads each kind on first use."""

    def __init__(self, reader: JournalReader) -> None:
        self._reader = reader
        self.rows: dict[str, list[Row]] = defaultdict(list)
        aside = {
            int(record["number"])
            for row in reader.rows_of(entries.SET_ASIDE)
            if (record := reader.load(row)) is not None
        }
        self.void: list[Row] = []
        for row in reader.rows():
            if row.number in aside or reader.load(row) is None:
                self.void.append(row)
            else:
                self.rows[row.kind].append(row)
        # Damaged bytes of which not even the key is known.
        self.num_unknown = sum(
            max(1, span.num_records) for span in reader.damage() if span.kind in _SLOTS and not span.key
        )

    def load(self, kind: str) -> Iterator[tuple[Row, dict[str, Any]]]:
        for row in self.rows[kind]:
            record = self._reader.load(row)
            assert record is not None  # present when the rows were read
            yield row, record


def _check_slots(journal: _Journal, acknowledged: Collection[str], found: Findings) -> None:
    recorded = Counter(row.key for kind in _SLOTS for row in journal.rows[kind])
    found.num_slots = len(recorded)
    for key, count in recorded.items():
        if count > 1:
            found.add(Rule.TWICE, f"slot {key} has {count} records")
    void = {row.key for row in journal.void if row.kind in _SLOTS}
    unknown = journal.num_unknown
    for key in sorted(set(acknowledged) - recorded.keys()):
        if key in void:
            found.num_excused += 1
        elif unknown:
            unknown -= 1
            found.num_excused += 1
        else:
            found.add(Rule.LOST, f"slot {key} was acknowledged and has no record")
    issued = {row.key for row in (*journal.rows[entries.GROUP], *journal.void)}
    for key in recorded:
        if key.rpartition("/")[0] not in issued:
            found.add(Rule.ORDER, f"slot {key} has a record, and its task group was never issued")


def _check_batches(journal: _Journal, found: Findings) -> None:
    slots = {row.key for row in journal.rows[entries.TRAJECTORY]}
    void = {row.key for row in journal.void if row.kind == entries.TRAJECTORY}
    steps: dict[str, list[int]] = defaultdict(list)
    trained: dict[str, int] = {}  # sequence -> step
    for _, record in journal.load(entries.BATCH):
        batch = entries.from_json(entries.BatchRecord, record)
        found.num_batches += 1
        steps[batch.policy].append(batch.training_step)
        for entry in batch.entries:
            before = trained.get(entry.sequence_id)
            if entry.replayed:
                if before is None:
                    found.add(
                        Rule.ORDER, f"{entry.sequence_id} is replayed in step {batch.training_step}, never trained"
                    )
                continue
            if before is not None:
                found.add(
                    Rule.TWICE, f"{entry.sequence_id} is in the batches of steps {before} and {batch.training_step}"
                )
            trained[entry.sequence_id] = batch.training_step
            slot = entry.sequence_id.rpartition("/")[0]
            if slot not in slots and slot not in void and not journal.num_unknown:
                found.add(Rule.LOST, f"{entry.sequence_id} of step {batch.training_step} has no trajectory")
    lost = {row.key for row in journal.void if row.kind == entries.BATCH}
    for policy, taken in steps.items():
        for step, count in Counter(taken).items():
            if count > 1:
                found.add(Rule.TWICE, f"step {step} of {policy} has {count} batches")
        for step in range(1, max(taken) + 1):
            if step not in taken and entries.batch_key(policy, step) not in lost:
                found.add(Rule.ORDER, f"step {step} of {policy} has no batch, and step {max(taken)} has")


def _check_versions(journal: _Journal, found: Findings) -> None:
    digests: dict[tuple[str, int], str] = {}
    newest: dict[str, int] = {}
    batch_at = {row.key: row.number for row in (*journal.rows[entries.BATCH], *journal.void)}
    void = {row.key for row in journal.void if row.kind == entries.VERSION}
    for row, record in journal.load(entries.VERSION):
        version = entries.from_json(entries.VersionRecord, record).version
        known = digests.setdefault((version.policy, version.number), version.digest)
        if known != version.digest:
            found.add(Rule.TWICE, f"version {row.key} has the digests {known} and {version.digest}")
        last = newest.get(version.policy, -1)
        between = [f"{version.policy}/{number}" for number in range(last + 1, version.number)]
        if version.number > last and not all(key in void for key in between):
            found.add(Rule.ORDER, f"version {version.number} of {version.policy} follows version {last}")
        newest[version.policy] = max(last, version.number)
        if version.number > 0 and batch_at.get(row.key, row.number) >= row.number:
            found.add(Rule.ORDER, f"version {row.key} was published before the batch of its step was recorded")
    found.num_versions = len(digests)


def _check_groups(journal: _Journal, finished: bool, found: Findings) -> None:
    """Check that every issued training group is closed, has an open slot during the run, or waits in a buffer."""
    resolved = Counter(row.key.rpartition("/")[0] for kind in _SLOTS for row in journal.rows[kind])
    closed = {row.key: record["reason"] for row, record in journal.load(entries.CLOSED)}
    void = {row.key.rpartition("/")[0] if row.kind in _SLOTS else row.key for row in journal.void}
    trained = {
        split_sequence_id(entry.sequence_id)[0]
        for _, record in journal.load(entries.BATCH)
        for entry in entries.from_json(entries.BatchRecord, record).entries
    }
    kept = {
        row.key
        for row, record in journal.load(entries.VERDICT)
        if any(
            verdict.outcome is fates.GroupFate.KEPT
            for verdict in entries.from_json(entries.Verdicts, record).advantage_groups
        )
    }
    for row, record in journal.load(entries.GROUP):
        if record["evaluation"] or row.key in void:
            continue
        complete = resolved[row.key] >= len(record["indices"])
        if row.key in closed:
            if closed[row.key] == fates.ClosedReason.TRAINED.value and row.key not in trained and not journal.void:
                found.add(Rule.OPEN, f"task group {row.key} is closed as trained and in no batch")
        elif not complete and finished:
            found.add(Rule.OPEN, f"task group {row.key} has open slots though the run has finished")
        elif complete and row.key not in kept:
            found.add(Rule.OPEN, f"task group {row.key} is complete, and neither closed nor kept")
        elif complete and row.key in trained:
            found.add(Rule.OPEN, f"task group {row.key} is in a batch and not closed")


def _check_counters(journal: _Journal, found: Findings) -> None:
    """The counters of the newest state, against the records before the state."""
    states = list(journal.load(entries.STATE))
    if not states or journal.void or journal.num_unknown:
        return  # void records were counted, and cannot be counted again
    last, state = states[-1]
    told = {name: int(value) for name, value in entries.from_pairs(state["counters"]).items()}
    counted: Counter[str] = Counter()
    for kind in KINDS:
        for row, record in journal.load(kind):
            if row.number < last.number:
                counted.update(recount(row, record, lambda reason: ""))
    for name in _RECOUNTED:
        if told.get(name, 0) != counted[name]:
            found.add(
                Rule.COUNTERS,
                f"{name} is {told.get(name, 0)} in the newest state, and the records make {counted[name]}",
            )
