"""Selects the journal rows that still matter after a restart, by SQL over the index, without reading a long run.

    task groups that are not closed -> their assignments, outcomes, verdicts
    versions, batches, evaluations  -> all; batches from before the first live task group only for their statistics
    the newest state                -> counters, phase

Rows of closed task groups stay on disk, where recorded batches find them. Changes only the quarantine.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, TypeVar

from services.common.errors import CorruptDataError
from services.common.records.fates import GroupFate, SetAsideReason
from services.orchestrator.journal import records
from services.orchestrator.journal.quarantine import Quarantine
from services.orchestrator.journal.reader import JournalReader
from services.orchestrator.journal.records import GroupRecord
from services.orchestrator.journal.storage.scan import DamageReason
from services.orchestrator.journal.storage.segments import COLLECTED, Row

T = TypeVar("T")

UNREADABLE = (CorruptDataError, KeyError, TypeError, ValueError, AttributeError, IndexError, ArithmeticError)

_CLOSED = f"EXISTS (SELECT 1 FROM records AS c WHERE c.kind = '{records.CLOSED}' AND c.key = r.key)"
_NAMING_GROUPS = (records.GROUP, records.ASSIGNMENT, records.VERDICT, records.CLOSED)
_IN_PARTS = 200  # task groups of one SELECT


def decode(reader: JournalReader, row: Row, aside: Quarantine, parse: Callable[[dict[str, Any]], T]) -> T | None:
    """A record, or None for one that is, or now was, set aside."""
    if row in aside:
        return None
    try:
        record = reader.load(row)
        if record is not None:
            return parse(record)
    except UNREADABLE as error:
        aside.add(row, SetAsideReason.UNREADABLE, f"{type(error).__name__}: {error}")
        return None
    aside.add(row, SetAsideReason.DAMAGED)
    return None


@dataclass(slots=True)
class Survey:
    """Results of a survey, with the task groups that are not closed."""

    num_rows: int
    group_rows: dict[str, Row] = field(default_factory=dict)  # that are not closed
    groups: dict[str, GroupRecord] = field(default_factory=dict)  # of these, those with possible later records
    lost_groups: set[str] = field(default_factory=set)  # of these, those with an unusable record
    last_name: list[str] = field(default_factory=list)  # of task groups, of every kind of record that names one
    positions: dict[str, int] = field(
        default_factory=dict
    )  # last issued ones of the curricula by source, as far as known
    judged: set[str] = field(default_factory=set)  # live task groups with verdicts
    surplus: dict[str, set[tuple[str, str, int]]] = field(default_factory=dict)  # (policy, role, attempt) by task group
    observed: set[str] = field(default_factory=set)  # live task groups of which the curation was told
    evaluated: set[str] = field(default_factory=set)  # finished passes with a readable result
    version_rows: dict[tuple[str, int], int] = field(default_factory=dict)  # (policy, version) -> number of its record
    newest_batch: dict[str, int] = field(default_factory=dict)  # by policy, also where the record is damaged
    lost_rows: list[Row] = field(default_factory=list)  # of records with a damaged header, as far as known
    unknown: dict[str, bool] = field(default_factory=dict)  # kinds with damage of an unknown record: is the damage new?
    first_live: float = math.inf  # number of the first record of a live task group

    def is_settled(self, row: Row) -> bool:
        """Whether a batch was trained before the first issue of a live task group, and hence has no live sequence."""
        policy, _, step = row.key.rpartition("/")
        published = self.version_rows.get((policy, int(step)), math.inf) if step.isdecimal() else math.inf
        return row.number < self.first_live and published < self.first_live


def survey(reader: JournalReader, aside: Quarantine, *, observes: bool, sources: Collection[str] = ("",)) -> Survey:
    """``observes``: whether the run's curation wants observations. ``sources``: names of the sources of training tasks."""
    found = Survey(num_rows=reader.last_number())
    _look_at_damage(reader, aside, found)
    for row in reader.rows_of(records.EVALUATION):
        if decode(reader, row, aside, records.evaluation_from_json) is not None:
            found.evaluated.add(row.key)
    for row in open_groups(reader):
        _look_at_group(reader, row, aside, found)
    _look_at_names(reader, aside, found, sources)
    for row in reader.rows_of(records.VERSION):
        policy, number = numbered(row)
        if number is not None:
            found.version_rows.setdefault((policy, number), row.number)
    for row in reader.rows_of(records.BATCH):
        policy, step = numbered(row)
        found.newest_batch[policy] = max(found.newest_batch.get(policy, 0), step or 0)
    for row in of_groups(reader, records.VERDICT, found.groups):
        verdicts = decode(reader, row, aside, records.verdicts_from_json)
        if verdicts is not None:  # the last record counts: its slots may have been played again
            found.judged.add(row.key)
            found.surplus[row.key] = {(v.policy, v.role, v.attempt) for v in verdicts if v.outcome is GroupFate.SURPLUS}
    if observes:
        found.observed = {row.key for row in of_groups(reader, records.OBSERVATION, found.groups)}
    return found


def rows_that_matter(reader: JournalReader, found: Survey, *, observes: bool) -> Iterator[Row]:
    """The rows to apply, in the order in which they were submitted."""
    live = [row for name, row in found.group_rows.items() if name in found.groups or name in found.lost_groups]
    live += of_groups(reader, records.ASSIGNMENT, found.groups)
    names = [*found.groups, *found.lost_groups]
    live += [row for kind in (records.TRAJECTORY, records.FAILURE) for row in slots_of(reader, kind, names)]
    live += found.lost_rows
    live.sort(key=lambda row: row.number)
    kinds = [records.VERSION, records.BATCH, records.EVALUATION_START, records.EVALUATION]
    streams = [reader.rows_of(kind) for kind in (*kinds, *([records.OBSERVATION] if observes else []))]
    return heapq.merge(iter(live), *streams, key=lambda row: row.number)


def first_facts(reader: JournalReader) -> tuple[str, float]:
    """The mark in the names of task groups and when the first record was written, where the record of the run's begin is
    lost; ("", 0) in an empty journal."""
    mark = next((row.key.rpartition("-")[0] for row in reader.rows_of(records.GROUP)), "")
    return mark, next((row.written_at for row in reader.rows()), 0.0)


def numbered(row: Row) -> tuple[str, int | None]:
    """Policy and number of the key of a version or batch; None for a key without them."""
    policy, _, number = row.key.rpartition("/")
    return policy, int(number) if number.isdecimal() else None


def open_groups(reader: JournalReader) -> list[Row]:
    """Task groups that no record closes."""
    is_group = f"r.kind = '{records.GROUP}' AND NOT {_CLOSED}"
    rows = list(reader.select(is_group, (), lambda row: row.kind == records.GROUP))
    closed = {row.key for row in of_groups(reader, records.CLOSED, [row.key for row in rows])}
    return [row for row in rows if row.key not in closed]


def of_groups(reader: JournalReader, kind: str, names: Iterable[str]) -> list[Row]:
    """Rows whose key is the name of one of these task groups, in order."""
    rows: list[Row] = []
    for part in _parts(names):
        rows += _of_part(reader, kind, part)
    return sorted(rows, key=lambda row: row.number)


def slots_of(reader: JournalReader, kind: str, names: Iterable[str]) -> list[Row]:
    """Rows of the slots of these task groups, whose keys are ``<task group>/<index>``."""
    rows: list[Row] = []
    for name in names:
        rows += reader.rows_below(kind, f"{name}/")
    return rows


def _of_part(reader: JournalReader, kind: str, names: list[str]) -> Iterator[Row]:
    wanted = set(names)
    marks = ",".join("?" * len(names))
    return reader.select(
        f"r.kind = ? AND r.key IN ({marks})", (kind, *names), lambda row: row.kind == kind and row.key in wanted
    )


def _look_at_group(reader: JournalReader, row: Row, aside: Quarantine, found: Survey) -> None:
    group = decode(reader, row, aside, records.group_from_json)
    if group is None:
        found.lost_groups.add(row.key)
    elif group.evaluation in found.evaluated:
        return
    else:
        found.groups[row.key] = group
        found.first_live = min(found.first_live, row.number)
    found.group_rows[row.key] = row


def _look_at_damage(reader: JournalReader, aside: Quarantine, found: Survey) -> None:
    """Spans of the segments that tell no row of the index."""
    for span in reader.damage():
        # A torn end was never acknowledged: a process died during the write.
        harmless = span.reason in (DamageReason.REPEATED, DamageReason.TORN)
        if harmless or span.kind in (records.SET_ASIDE, COLLECTED):
            continue
        row = aside.add_span(span)
        if row.number and row.key:
            found.lost_rows.append(row)
        else:
            found.unknown[span.kind] = found.unknown.get(span.kind, False) or aside.is_new(row)
    lost = [row.key for row in found.lost_rows if row.kind == records.GROUP]
    found.lost_groups.update(set(lost) - {row.key for row in of_groups(reader, records.CLOSED, lost)})


def _look_at_names(reader: JournalReader, aside: Quarantine, found: Survey, sources: Collection[str]) -> None:
    """Where names and curricula go on: behind the last task group that any record speaks of."""
    for kind in _NAMING_GROUPS:
        found.last_name += [row.key for row in found.lost_rows if row.kind == kind]
        found.last_name += [row.key for row in islice(reader.last_rows(kind), 1)]
    for kind in (records.TRAJECTORY, records.FAILURE):
        found.last_name += [row.key.rpartition("/")[0] for row in islice(reader.last_rows(kind), 1)]
    num_lost = 0
    for row in reader.last_rows(records.GROUP):
        group = decode(reader, row, aside, records.group_from_json)
        if group is None:
            num_lost += 1  # each took a position of some source at least
        elif not group.evaluation:
            found.positions.setdefault(group.order.source, group.position + num_lost)
            if found.positions.keys() >= set(sources):
                return
    for source in sources:
        found.positions.setdefault(source, num_lost - 1)


def spare_names(reader: JournalReader) -> int:
    """How many names of task groups may have been given that no record tells: those of damaged records of task groups."""
    return sum(max(1, span.num_records) for span in reader.damage() if span.kind == records.GROUP and not span.key)


def _parts(names: Iterable[str]) -> Iterator[list[str]]:
    listed = list(names)
    for start in range(0, len(listed), _IN_PARTS):
        yield listed[start : start + _IN_PARTS]
