"""All task groups of a run in a line each: what became of them and how long that took.

Reads the journal's index and its small records, no trajectory and no log, so it is quick also on long runs.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from rich.console import Console
from rich.markup import escape

from services.cli.tables import Column, FittingTable
from services.cli.trace.facts import Assignment, GroupFacts, SlotFacts, Used
from services.cli.trace.reading import open_journal, used_in, version_facts
from services.cli.trace.stages import Stage, first_use, stages, status
from services.cli.units import format_seconds
from services.orchestrator.groups import split_sequence_id
from services.orchestrator.journal import records
from services.orchestrator.journal.reader import JournalReader

ORDERS = ("newest", "slowest")


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    task_group_id: str
    task_id: str
    status: str
    issued_at: float
    seconds: float  # from its issue to the last that is known of it
    longest: str  # the stage that took longest
    longest_s: float
    policy: str  # that it was trained by first
    training_step: int | None
    num_slots: int
    num_failed: int
    num_reissued: int


def read_groups(run_dir: Path) -> list[GroupFacts]:
    """Every task group of a run in order of issue, without what its rollouts did. Raises ``ConfigError``: no journal."""
    reader = open_journal(run_dir)
    try:
        return _read(reader)
    finally:
        reader.close()


def _read(reader: JournalReader) -> list[GroupFacts]:
    assignments: dict[str, list[Assignment]] = defaultdict(list)
    slots: dict[str, dict[int, SlotFacts]] = defaultdict(dict)
    judged: dict[str, tuple[float, tuple[records.Verdict, ...]]] = {}
    closed: dict[str, tuple[float, str]] = {}
    uses: dict[str, list[Used]] = defaultdict(list)
    evaluated = {row.key: row.written_at for row in reader.rows_of(records.EVALUATION)}
    for row in reader.rows_of(records.ASSIGNMENT):
        assignments[row.key].append(Assignment(at=row.written_at, replica_id=""))
    for kind in (records.TRAJECTORY, records.FAILURE):
        for row in reader.rows_of(kind):
            name, _, index = row.key.rpartition("/")
            failure = "failed" if kind == records.FAILURE else ""
            slot = SlotFacts(index=int(index), replica_id="", durable_at=row.written_at, failure=failure)
            known = slots[name].get(slot.index)
            if known is None or slot.durable_at < known.durable_at:
                slots[name][slot.index] = slot
    for row in reader.rows_of(records.VERDICT):
        if row.key not in judged and (record := reader.load(row)) is not None:
            judged[row.key] = row.written_at, tuple(records.verdicts_from_json(record))
    for row in reader.rows_of(records.CLOSED):
        closed[row.key] = row.written_at, (reader.load(row) or {}).get("reason", "")
    for row in reader.rows_of(records.BATCH):
        if (record := reader.load(row)) is not None:
            batch = records.batch_from_json(record)
            told = version_facts(reader, batch.policy, batch.training_step)
            for name, use in _uses(batch, row.written_at):
                uses[name].append(replace(use, **told))
    groups = []
    for row in reader.rows_of(records.GROUP):
        record, name = reader.load(row) or {}, row.key
        issue = Assignment(at=row.written_at, replica_id=record.get("replica_id", ""))
        judged_at, verdicts = judged.get(name, (0.0, ()))
        closed_at, reason = closed.get(name, (0.0, ""))
        groups.append(
            GroupFacts(
                task_group_id=name,
                task_id=record.get("task_id", ""),
                purpose=record.get("purpose", "train"),
                evaluation=record.get("evaluation", ""),
                num_slots=record.get("num_slots", 0),
                policies=tuple(record.get("policies", ())),
                assignments=(issue, *assignments[name]),
                slots=tuple(slot for _, slot in sorted(slots[name].items())),
                verdicts=verdicts,
                judged_at=judged_at,
                uses=tuple(uses[name]),
                closed_at=closed_at,
                closed_reason=reason,
                evaluated_at=evaluated.get(record.get("evaluation", ""), 0.0),
            )
        )
    return groups


def _uses(batch: records.BatchRecord, assembled_at: float) -> Iterable[tuple[str, Used]]:
    entries: dict[str, list[records.BatchEntry]] = defaultdict(list)
    for entry in batch.entries:
        entries[split_sequence_id(entry.sequence_id)[0]].append(entry)
    for name, found in entries.items():
        yield name, used_in(batch, found, assembled_at)


def choose(
    groups: Iterable[GroupFacts],
    *,
    order: str = "newest",
    state: str | None = None,
    step: int | None = None,
    last: int = 20,
) -> list[Line]:
    """Lines of those that match: the newest last, or the slowest first."""
    lines = [_line(facts) for facts in groups if step is None or any(use.training_step == step for use in facts.uses)]
    lines = [line for line in lines if state is None or line.status == state]
    if order == "slowest":
        return sorted(lines, key=lambda line: line.seconds, reverse=True)[:last]
    return lines[-last:]


def show_lines(lines: Sequence[Line], console: Console) -> None:
    """A table."""
    table = FittingTable(
        [
            *(Column("task group"), Column("task", spare=1), Column("status"), Column("step", spare=2)),
            *(Column("took", "right"), Column("longest stage", "right", 3)),
            *(Column("failed", "right", 4), Column("issued again", "right", 5)),
        ]
    )
    for line in lines:
        table.add_row(
            line.task_group_id,
            escape(line.task_id),
            escape(line.status),
            f"{line.training_step} of {line.policy}" if line.training_step is not None else "",
            format_seconds(line.seconds),
            f"{line.longest} {format_seconds(line.longest_s)}" if line.longest else "",
            f"{line.num_failed} of {line.num_slots}" if line.num_failed else "",
            str(line.num_reissued or ""),
        )
    console.print(table)


def counted(groups: Iterable[GroupFacts]) -> dict[str, int]:
    """Task groups by status."""
    counts: dict[str, int] = defaultdict(int)
    for facts in groups:
        counts[status(facts)] += 1
    return dict(counts)


def _line(facts: GroupFacts) -> Line:
    life = stages(facts)
    longest: Stage | None = max(life, key=lambda stage: stage.seconds, default=None)
    use = first_use(facts)
    return Line(
        task_group_id=facts.task_group_id,
        task_id=facts.task_id,
        status=status(facts),
        issued_at=facts.assignments[0].at if facts.assignments else 0.0,
        seconds=life[-1].end - life[0].begin if life else 0.0,
        longest=longest.name if longest else "",
        longest_s=longest.seconds if longest else 0.0,
        policy=use.policy if use else "",
        training_step=use.training_step if use else None,
        num_slots=facts.num_slots,
        num_failed=facts.num_failed,
        num_reissued=max(0, len(facts.assignments) - 1),
    )
