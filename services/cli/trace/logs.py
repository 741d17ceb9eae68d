"""What only the logs say of a task group: repeated records, lost leases, retries, which rank asked for a batch when.

Logs are for people, so whatever is missing or unreadable in them is left out.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from datetime import datetime
from pathlib import Path

from services.cli.rows import Row, parse_rows
from services.cli.trace.facts import GroupFacts, Note, Used

Pulls = Mapping[tuple[str, int], Mapping[int, float]]  # (policy, step) -> rank -> when it first asked

# Events of one task group, by what they mean to a reader.
_OF_GROUP: dict[str, Callable[[Row], str]] = {
    "record.dropped": lambda row: f"{row.get('outcome')} record of slot {row.get('index')} from {row.get('replica')}",
    "task_group.orphaned": lambda row: f"nobody plays it any more; {row.get('open_slots')} slots are open",
    "task_group.given_up": lambda row: f"given up: {row.get('reason')}",
    "task_group.cancelled": lambda row: f"cancelled on its replica: {row.get('reason')}",
    "rollout.retry": lambda row: f"slot {row.get('index')} is played again: {row.get('error')}",
    "rollout.crashed": lambda row: f"slot {row.get('index')} crashed",
    "rollout.lost": lambda row: f"slot {row.get('index')} was lost",
}
_OF_REPLICA: dict[str, Callable[[Row], str]] = {
    "replica.lease_lost": lambda row: f"the lease of replica {row.get('replica')} ran out",
}
_OF_RUN: dict[str, Callable[[Row], str]] = {
    "run.recovered": lambda row: "the orchestrator was started again, and went on from its journal",
}
_PULLED = "batch.pulled"


def read_notes(run_dir: Path, facts: GroupFacts) -> tuple[tuple[Note, ...], Pulls]:
    """Notes in order of time, and when which rank asked for which batch."""
    replicas = {assignment.replica_id for assignment in facts.assignments}
    begin = min((assignment.at for assignment in facts.assignments), default=0.0)
    end = max((slot.durable_at for slot in facts.slots), default=0.0) if facts.complete else float("inf")
    wanted = {(use.policy, use.training_step) for use in facts.uses}
    notes: list[Note] = []
    pulls: dict[tuple[str, int], dict[int, float]] = defaultdict(dict)
    needles = [facts.task_group_id, *_OF_REPLICA, *_OF_RUN, *([_PULLED] if wanted else [])]
    for row in _rows(run_dir, [needle.encode() for needle in needles]):
        event, at = row.get("event", ""), _time(row)
        concerns = begin <= at <= end
        if event in _OF_GROUP and row.get("task_group") == facts.task_group_id:
            notes.append(_note(row, at, _OF_GROUP[event]))
        elif event in _OF_REPLICA and row.get("replica") in replicas and concerns:
            notes.append(_note(row, at, _OF_REPLICA[event]))
        elif event in _OF_RUN and concerns:
            notes.append(_note(row, at, _OF_RUN[event]))
        elif event == _PULLED and (key := (row.get("policy", ""), row.get("step", 0))) in wanted:
            pulls[key].setdefault(row.get("rank", 0), at)
    return tuple(sorted(notes, key=lambda note: note.at)), pulls


def pulls_of(pulls: Pulls, use: Used) -> tuple[tuple[int, float], ...]:
    return tuple(sorted(pulls.get((use.policy, use.training_step), {}).items()))


def _note(row: Row, at: float, text: Callable[[Row], str]) -> Note:
    return Note(at=at, service=row.get("instance", ""), event=row["event"], text=text(row))


def _rows(run_dir: Path, needles: list[bytes]) -> Iterator[Row]:
    """Lines of all logs that hold one of the needles; most lines are not parsed."""
    for path in sorted((run_dir / "logs").glob("*.jsonl")):
        with path.open("rb") as lines:
            yield from parse_rows(line for line in lines if any(needle in line for needle in needles))


def _time(row: Row) -> float:
    try:
        return datetime.fromisoformat(str(row.get("timestamp"))).timestamp()
    except ValueError:
        return 0.0
