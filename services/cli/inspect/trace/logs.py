"""Reads from the logs the facts of a task group that the journal lacks: repeated records, lost leases, retries, pulls
of ranks.

Lines that are missing or cannot be parsed are skipped.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from datetime import datetime
from pathlib import Path

from services.cli.inspect.rows import Row, parse_rows
from services.cli.inspect.trace.facts import GroupFacts, Note, Used
from services.common import run_files
from services.common.telemetry.log_events import LogEvent

Pulls = Mapping[tuple[str, int], Mapping[int, float]]  # (policy, step) -> rank -> when it first asked

# Events of one task group -> their description.
_OF_GROUP: dict[LogEvent, Callable[[Row], str]] = {
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
_OF_REPLICA: dict[LogEvent, Callable[[Row], str]] = {
    LogEvent.LEASE_LOST: lambda row: f"the lease of replica {row.get('replica')} ran out",
}
_OF_RUN: dict[LogEvent, Callable[[Row], str]] = {
    LogEvent.RUN_RECOVERED: lambda row: "the orchestrator was started again, and went on from its journal",
}
_EVENTS = frozenset(LogEvent)


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
        event, at = _event(row), _time(row)
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


def _event(row: Row) -> LogEvent | None:
    name = row.get("event")
    return LogEvent(name) if isinstance(name, str) and name in _EVENTS else None


def _note(row: Row, at: float, text: Callable[[Row], str]) -> Note:
    return Note(at=at, service=row.get("instance", ""), event=row["event"], text=text(row))


def _rows(run_dir: Path, needles: list[bytes]) -> Iterator[Row]:
    """Lines of all logs that hold one of the needles; most lines are not parsed."""
    for path in sorted(run_files.logs(run_dir).glob("*.jsonl")):
        with path.open("rb") as lines:
            yield from parse_rows(line for line in lines if any(needle in line for needle in needles))


def _time(row: Row) -> float:
    try:
        return datetime.fromisoformat(str(row.get("timestamp"))).timestamp()
    except ValueError:
        return 0.0
