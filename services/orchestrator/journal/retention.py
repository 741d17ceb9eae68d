"""Deletes records that the run can no longer need: trajectories without a possible replay, and superseded states.

Batches since the oldest kept checkpoint of their policy stay, and so do their trajectories. The journal deletes a
closed segment without needed records, and rewrites one with few of them (``compaction``), a few segments at a time.
Task groups, verdicts, batches, versions, evaluations and failures stay for ever: they are small, and metrics, fates and
traces are made from them (docs/journal.md).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

import structlog

from services.common.errors import CorruptDataError
from services.orchestrator.journal import records, rollouts
from services.orchestrator.journal.reader import JournalReader
from services.orchestrator.journal.storage.scan import DamageReason
from services.orchestrator.journal.storage.segments import Row
from services.orchestrator.journal.writer import Journal
from services.orchestrator.state.groups import split_sequence_id

log = structlog.get_logger()

MOST_REWRITTEN = 2  # segments of one round
LITTLE = 0.5  # share of a segment's bytes: with a smaller needed share the segment is rewritten


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Deletable parts of the closed segments of one kind."""

    kind: str
    remove: tuple[int, ...]  # segments without needed records
    rewrite: Mapping[int, frozenset[int]]  # segment -> numbers of the records that are needed
    num_bytes: int  # that both free


@dataclass(frozen=True, slots=True, kw_only=True)
class Collected:
    removed: list[tuple[str, int]] = field(default_factory=list)  # (kind, segment)
    rewritten: list[tuple[str, int]] = field(default_factory=list)
    num_bytes: int = 0


def collect(
    journal: Journal,
    oldest_checkpoint_steps: Mapping[str, int],
    live_groups: Collection[str],
    *,
    current: Mapping[str, int] | None = None,
    most_rewritten: int = MOST_REWRITTEN,
) -> Collected:
    """Delete unneeded records. Blocking: call from a thread.

    ``oldest_checkpoint_steps``: by policy, the oldest checkpoint that its trainer may start from.

    ``live_groups`` are task groups that are running or have sequences in a buffer; ``current`` are the open segments at
    a moment before the listing of these groups (default: now), so that later records stay.
    """
    if current is None:
        current = journal.current_segments()
    reader = JournalReader(journal.directory)
    try:
        plans = plan(reader, oldest_checkpoint_steps, live_groups, current)
    finally:
        reader.close()
    return carry_out(journal, plans, most_rewritten=most_rewritten)


def plan(
    reader: JournalReader,
    oldest_checkpoint_steps: Mapping[str, int],
    live_groups: Collection[str],
    current: Mapping[str, int],
) -> list[Plan]:
    """``current``: the open segment of each kind; a kind without one is ignored."""
    damaged = {(d.kind, d.segment) for d in reader.damage() if d.reason is not DamageReason.TORN}
    wanted = {records.STATE: list(_newest(reader, records.STATE))}
    needed = needed_trajectories(reader, oldest_checkpoint_steps, live_groups)
    if needed is not None:
        wanted[records.TRAJECTORY] = needed
    return [
        _plan_of(kind, reader, needed, current[kind], damaged) for kind, needed in wanted.items() if kind in current
    ]


def carry_out(journal: Journal, plans: Iterable[Plan], *, most_rewritten: int) -> Collected:
    """Delete and rewrite segments; a damaged one stays."""
    removed: list[tuple[str, int]] = []
    rewritten: list[tuple[str, int]] = []
    num_bytes = 0
    for planned in plans:
        journal.remove_segments(planned.kind, planned.remove)
        removed += [(planned.kind, segment) for segment in planned.remove]
        for segment, keep in list(planned.rewrite.items())[:most_rewritten]:
            try:
                if journal.compact_segment(planned.kind, segment, keep):
                    rewritten.append((planned.kind, segment))
            except CorruptDataError as error:
                log.warning("journal.segment_stays", kind=planned.kind, segment=segment, reason=error.message)
        num_bytes += planned.num_bytes
    return Collected(removed=removed, rewritten=rewritten, num_bytes=num_bytes)


def needed_trajectories(
    reader: JournalReader, oldest_checkpoint_steps: Mapping[str, int], live_groups: Collection[str]
) -> list[Row] | None:
    """Rows of the needed trajectories: of batches after the oldest kept checkpoint, and of live task groups. None while one of these
    batches is unreadable: a failing disk may return the batch later."""
    keys: dict[str, None] = {}
    for row in reader.rows_of(records.BATCH):
        policy, _, step = row.key.rpartition("/")
        if not step.isdecimal() or int(step) <= oldest_checkpoint_steps.get(policy, 0):
            continue
        try:
            batch = records.batch_from_json(reader.load(row) or {})
            slots = [split_sequence_id(entry.sequence_id)[:2] for entry in batch.entries]
        except (CorruptDataError, KeyError, TypeError, ValueError, AttributeError) as error:
            log.warning("journal.nothing_collected", batch=row.key, reason=f"{type(error).__name__}: {error}")
            return None
        keys |= dict.fromkeys(rollouts.trajectory_key(group, index) for group, index in slots)
    rows = {row.number: row for row in reader.find_all_rows(records.TRAJECTORY, keys)}
    for name in live_groups:
        rows |= {row.number: row for row in reader.rows_below(records.TRAJECTORY, f"{name}/")}
    return list(rows.values())


def _newest(reader: JournalReader, kind: str) -> Iterator[Row]:
    """Rows of a kind from the newest back to the first readable one."""
    for row in reader.last_rows(kind):
        yield row
        if reader.load(row) is not None:
            return


def _plan_of(
    kind: str, reader: JournalReader, needed: Iterable[Row], current: int, damaged: Collection[tuple[str, int]]
) -> Plan:
    numbers: dict[int, set[int]] = {}
    sizes: dict[int, int] = {}
    for row in needed:
        numbers.setdefault(row.segment, set()).add(row.number)
        sizes[row.segment] = sizes.get(row.segment, 0) + row.length
    remove: list[int] = []
    rewrite: dict[int, frozenset[int]] = {}
    num_bytes = 0
    for segment, size in sorted(reader.segment_sizes(kind).items()):
        kept = sizes.get(segment, 0)
        if segment >= current or (kind, segment) in damaged or kept > LITTLE * size:
            continue
        num_bytes += size - kept
        if kept:
            rewrite[segment] = frozenset(numbers[segment])
        else:
            remove.append(segment)
    return Plan(kind=kind, remove=tuple(remove), rewrite=rewrite, num_bytes=num_bytes)
