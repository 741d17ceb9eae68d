"""``rollmill trace``: a list of task groups, and the life of one on a terminal, as JSON and as a picture."""

from __future__ import annotations

import io
import json
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from services.cli.console import FittingTable, columns, format_seconds, say
from services.cli.inspect.run_model import GroupFacts, Json, SlotFacts
from services.cli.inspect.trace import (
    Event,
    Stage,
    StageName,
    events,
    first_use,
    headline,
    read_group,
    read_groups,
    seconds_in,
    stages,
    status,
)
from services.common.errors import ConfigError
from services.common.records import PhaseKind
from services.common.telemetry.logs import LogEvent


def choose(
    groups: Iterable[GroupFacts],
    *,
    order: str = "newest",
    state: str | None = None,
    step: int | None = None,
    last: int = 20,
) -> list[Json]:
    """One object for each task group that matches: the newest last, or the slowest first."""
    lines = [_line(facts) for facts in groups if step is None or any(use.training_step == step for use in facts.uses)]
    lines = [line for line in lines if state is None or line["status"] == state]
    if order == "slowest":
        return sorted(lines, key=lambda line: line["seconds"], reverse=True)[:last]
    return lines[-last:]


def _line(facts: GroupFacts) -> Json:
    life = stages(facts)
    longest: Stage | None = max(life, key=lambda stage: stage.seconds, default=None)
    use = first_use(facts)
    return {
        "task_group_id": facts.task_group_id,
        "task_id": facts.task_id,
        "status": status(facts),
        "issued_at": facts.assignments[0].at if facts.assignments else 0.0,
        "seconds": life[-1].end - life[0].begin if life else 0.0,  # from its issue to the last that is known of it
        "longest": longest.name if longest else "",  # the stage that took longest
        "longest_s": longest.seconds if longest else 0.0,
        "policy": use.policy if use else "",  # that it was trained by first
        "training_step": use.training_step if use else None,
        "num_slots": facts.num_slots,
        "num_failed": facts.num_failed,
        "num_reissued": max(0, len(facts.assignments) - 1),
    }


def counted(groups: Iterable[GroupFacts]) -> dict[str, int]:
    """Task groups by status."""
    return dict(Counter(map(status, groups)))


_OF_THE_MODEL = ("steps", "rows", "failures", "entries")

PICTURE = 200  # columns of a picture, which has room for all of them
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
        console.print(_rollouts(facts))
        say(console, _LEGEND, "dim", wrap=True)
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
        **{name: value for name, value in asdict(facts).items() if name not in _OF_THE_MODEL},
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


def _rollouts(facts: GroupFacts) -> FittingTable:
    slots = facts.slots
    zero = min((a.at for a in facts.assignments if a.at), default=0.0)
    whole = max(max(slot.durable_at, slot.finished_at) for slot in slots) - zero
    table = FittingTable(
        columns(
            "slot | replica:1 | >slot wait:5 | >played | >generated | >tokens | >gateway | >to journal:4 | >sends:7 | >retries:6 | >reward | versions:2 | time since the issue:3"
        ),
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
            _strip(slot, zero, whole),
        )
    return table


# What fills the time of a rollout -> its sign and its style in a strip.
_SIGNS: dict[str, tuple[str, str]] = {
    "waiting for a slot": ("·", "dim"),
    "between calls": ("─", "dim"),
    PhaseKind.GENERATE: ("█", "blue"),
    PhaseKind.SCORE: ("▚", "cyan"),
    PhaseKind.CREATE_EPISODE: ("▒", "yellow"),
    PhaseKind.STEP: ("▒", "yellow"),
    PhaseKind.CLOSE_EPISODE: ("▒", "yellow"),
    PhaseKind.EXECUTE_CODE: ("▒", "yellow"),
    PhaseKind.COMPUTE_REWARD: ("▓", "magenta"),
    PhaseKind.JUDGE: ("▓", "magenta"),
    PhaseKind.RETRY: ("×", "red"),
    PhaseKind.NOT_RECORDED: ("?", "dim"),
    "to the journal": ("→", "green"),
}
_LEGEND = (
    "· waiting for a slot  ─ between calls  █ generating  ▚ scoring by a teacher  ▒ environment, code  ▓ reward, judge  "
    "× pause before playing again  → to the journal"
)
STRIP = 48  # characters from the issue of the task group to its last record


def _strip(slot: SlotFacts, zero: float, whole: float) -> Text:
    """The time of a rollout as signs, on the axis that all rollouts of its task group share."""
    cells = [(" ", "")] * STRIP
    stretches = [
        ("waiting for a slot", slot.accepted_at, slot.started_at),
        ("between calls", slot.started_at, slot.finished_at),
        *((p.what, slot.started_at + p.begin_s, slot.started_at + p.end_s) for p in slot.phases if slot.started_at),
        ("to the journal", slot.finished_at, slot.durable_at),
    ]
    for what, begin, end in stretches:
        if begin and end > begin >= zero and whole:
            first = min(STRIP - 1, int(STRIP * (begin - zero) / whole))
            last = min(STRIP, max(first + 1, round(STRIP * (end - zero) / whole)))
            cells[first:last] = [_SIGNS.get(what, _SIGNS[PhaseKind.NOT_RECORDED])] * (last - first)
    return Text.assemble(*cells)


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
        typer.echo(json.dumps({"task_groups": lines, "counts": counts}))
        return
    table = FittingTable(
        columns("task group | task:1 | status | step:2 | >took | >longest stage:3 | >failed:4 | >issued again:5")
    )
    for line in lines:
        table.add_row(
            line["task_group_id"],
            escape(line["task_id"]),
            escape(line["status"]),
            f"{line['training_step']} of {line['policy']}" if line["training_step"] is not None else "",
            format_seconds(line["seconds"]),
            f"{line['longest']} {format_seconds(line['longest_s'])}" if line["longest"] else "",
            f"{line['num_failed']} of {line['num_slots']}" if line["num_failed"] else "",
            str(line["num_reissued"] or ""),
        )
    console.print(table if lines else "no task group matches")
    told = ", ".join(f"{number} {word}" for word, number in sorted(counts.items()))
    say(console, f"{len(groups)} task groups: {told or 'none was issued yet'}")


def show_group(
    run_dir: Path, task_group_id: str, console: Console, *, phases: bool, output: Path | None, as_json: bool
) -> None:
    """``output``: an SVG of the same. Raises ``ConfigError`` for a task group that was never issued."""
    if output is not None and output.suffix != ".svg":
        raise ConfigError(f"{output}: a trace is drawn as SVG; name a file that ends in .svg")
    facts = read_group(run_dir, task_group_id)
    if as_json:
        typer.echo(json.dumps(group_as_json(facts)))
    else:
        show(facts, console, with_slots=phases)
    if output is not None:
        page = Console(record=True, width=PICTURE, file=io.StringIO())
        show(facts, page, with_slots=phases)
        svg = page.export_svg(title=f"rollmill trace {task_group_id}")
        output.write_text(re.sub(r"@font-face \{[^}]*+\}", "", svg))  # which other hosts would serve
        if not as_json:
            say(console, f"picture: {output}")
