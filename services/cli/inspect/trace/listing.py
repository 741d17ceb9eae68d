"""Lists all task groups of a run, one line each: result and duration.

Reads the journal's index and its small records, no trajectory and no log, so long runs are quick too.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.markup import escape

from services.cli.console import Column, FittingTable, format_seconds
from services.cli.inspect.trace.facts import GroupFacts
from services.cli.inspect.trace.reading import issued_groups, open_journal
from services.cli.inspect.trace.stages import Stage, first_use, stages, status


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
    """Every task group of a run in order of issue, without the phases of its rollouts. Raises ``ConfigError``: no
    journal."""
    with closing(open_journal(run_dir)) as reader:
        return issued_groups(reader)


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
    return dict(Counter(map(status, groups)))


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
