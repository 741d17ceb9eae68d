"""A task group's life on a terminal: its events with the time between them, its rollouts, and where the time went."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from services.cli.console import Column, FittingTable, format_seconds, say
from services.cli.inspect.trace.facts import GroupFacts, SlotFacts
from services.cli.inspect.trace.listing import choose, counted, read_groups, show_lines
from services.cli.inspect.trace.reading import read_group
from services.cli.inspect.trace.stages import Event, StageName, events, headline, seconds_in, stages, status
from services.common.records.phases import PhaseKind
from services.common.telemetry.log_events import LogEvent

BAR = 32  # characters of the longest stage

_WAITS = {
    StageName.LOST: "lost {} with a replica that went away",
    StageName.TO_REPLICA: "waited {} for the replica to take it",
    StageName.WAITING_FOR_SLOT: "waited {} for a free slot of the replica",
    StageName.WAITING_FOR_BATCH: "waited {} for a batch",
    StageName.TO_TRAINER: "waited {} for the trainer to begin",
    StageName.WAITING_FOR_EVALUATION: "waited {} for the rest of the evaluation",
}
_LOSSES = ("failed", "reissued", LogEvent.LEASE_LOST, LogEvent.REPLICA_REPLACED, LogEvent.TASK_GROUP_GIVEN_UP)
LONG_S = 0.5  # a wait of at least this is a line of its own


def show(facts: GroupFacts, console: Console, *, with_slots: bool = False) -> None:
    """Print everything that is known of a task group."""
    say(console, f"task group {facts.task_group_id}: {headline(facts)}", "bold")
    for replica, shift in facts.clocks.items():
        how = "behind" if shift > 0 else "ahead"
        say(
            console,
            f"the clock of replica {replica} is at least {format_seconds(abs(shift))} {how}: its times are moved by that",
            "yellow",
        )
    console.print(_timeline(facts, events(facts, with_slots=with_slots)))
    if facts.slots:
        console.print(_rollouts(facts.slots))
    if found := stages(facts):
        longest = max(stage.seconds for stage in found)
        table = Table(title="where the time went", title_justify="left", box=None, show_header=False, pad_edge=False)
        for stage in found:
            bar = "█" * round(BAR * stage.seconds / longest) if longest else ""
            table.add_row(stage.name, format_seconds(stage.seconds), f"[cyan]{bar}[/cyan]")
        console.print(table)


def group_as_json(facts: GroupFacts) -> dict[str, Any]:
    """The same for machines: every fact, every event, every stage."""
    return {
        "status": status(facts),
        **asdict(facts),
        "events": [asdict(event) for event in events(facts, with_slots=True)],
        "stages": [{**asdict(stage), "seconds": stage.seconds} for stage in stages(facts)],
    }


def _timeline(facts: GroupFacts, found: Sequence[Event]) -> Table:
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(no_wrap=True)
    table.add_column(justify="right", no_wrap=True)
    table.add_column(overflow="fold")
    waits = {
        stage.end: _WAITS[stage.name].format(format_seconds(stage.seconds))
        for stage in stages(facts)
        if stage.name in _WAITS and stage.seconds >= LONG_S
    }
    zero = found[0].at if found else 0.0
    for event in found:
        if wait := waits.pop(event.at, ""):
            table.add_row("", "", f"[yellow]  … {wait}[/yellow]")
        clock = datetime.fromtimestamp(event.at).strftime("%H:%M:%S.%f")[:-3]
        style = "red" if event.what in _LOSSES else ""
        text = f"[{style}]{escape(event.text)}[/{style}]" if style else escape(event.text)
        table.add_row(clock, f"+{event.at - zero:.3f} s", text)
    return table


def _rollouts(slots: Sequence[SlotFacts]) -> FittingTable:
    table = FittingTable(
        [
            *(Column("slot"), Column("replica", spare=1), Column("slot wait", "right", 5), Column("played", "right")),
            *(Column("generated", "right"), Column("tokens", "right"), Column("gateway", "right")),
            *(Column("to journal", "right", 4), Column("sends", "right", 7), Column("retries", "right", 6)),
            *(Column("reward", "right"), Column("versions", spare=2)),
        ],
        title="rollouts",
    )
    for slot in slots:
        table.add_row(
            str(slot.index),
            escape(slot.replica_id),
            _between(slot.accepted_at, slot.started_at),
            _between(slot.started_at, slot.finished_at),
            format_seconds(seconds_in(slot, PhaseKind.GENERATE)) if slot.phases else "",
            str(sum(sequence.num_trained_tokens for sequence in slot.sequences) or ""),
            format_seconds(seconds_in(slot, other_than=PhaseKind.GENERATE)) if slot.phases else "",
            _between(slot.finished_at, slot.durable_at),
            str(slot.num_sends or ""),
            str(slot.num_retries or ""),
            _outcome(slot),
            ", ".join(f"{policy} {span}" for policy, span in _versions(slot).items()),
        )
    return table


def _outcome(slot: SlotFacts) -> str:
    if not slot.readable:
        return "collected"  # by the journal's retention
    return f"[red]{escape(slot.failure)}[/red]" if slot.reward is None else f"{slot.reward:g}"


def _versions(slot: SlotFacts) -> dict[str, str]:
    found: dict[str, set[int]] = {}
    for sequence in slot.sequences:
        found.setdefault(sequence.policy, set()).update(sequence.versions)
    return {p: f"{min(v)}–{max(v)}" if len(v) > 1 else str(min(v)) for p, v in found.items() if v}


def _between(begin: float, end: float) -> str:
    return format_seconds(max(0.0, end - begin)) if begin and end else ""


def list_groups(
    run_dir: Path, console: Console, *, order: str, state: str | None, step: int | None, last: int, as_json: bool
) -> None:
    """Raises ``ConfigError`` when the directory has no journal."""
    groups = read_groups(run_dir)
    lines = choose(groups, order=order, state=state, step=step, last=last)
    counts = counted(groups)
    if as_json:
        typer.echo(json.dumps({"task_groups": [asdict(line) for line in lines], "counts": counts}))
        return
    if lines:
        show_lines(lines, console)
    else:
        console.print("no task group matches")
    told = ", ".join(f"{number} {word}" for word, number in sorted(counts.items()))
    say(console, f"{len(groups)} task groups: {told or 'none was issued yet'}")


def show_group(
    run_dir: Path, task_group_id: str, console: Console, *, phases: bool, output: Path | None, as_json: bool
) -> None:
    """Raises ``ConfigError`` for a task group that was never issued."""
    facts = read_group(run_dir, task_group_id)
    if as_json:
        typer.echo(json.dumps(group_as_json(facts)))
    else:
        show(facts, console, with_slots=phases)
    if output is not None:
        from services.cli.inspect.trace.picture import draw

        picture = draw(facts, output)
        if not as_json:
            say(console, f"picture: {picture}")
