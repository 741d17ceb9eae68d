"""``rollmill trace``: a list of task groups, and the life of one on a terminal, as JSON and as a picture."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from services.cli.console import FittingTable, columns, format_seconds, pyplot, say
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


def show_lines(lines: Sequence[Json], console: Console) -> None:
    """A table."""
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
    console.print(table)


def counted(groups: Iterable[GroupFacts]) -> dict[str, int]:
    """Task groups by status."""
    return dict(Counter(map(status, groups)))


_OF_THE_MODEL = ("steps", "rows", "failures", "entries")

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


def _rollouts(slots: Sequence[SlotFacts]) -> FittingTable:
    table = FittingTable(
        columns(
            "slot | replica:1 | >slot wait:5 | >played | >generated | >tokens | >gateway | >to journal:4 | >sends:7 | >retries:6 | >reward | versions:2"
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
        typer.echo(json.dumps({"task_groups": lines, "counts": counts}))
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
        picture = draw(facts, output)
        if not as_json:
            say(console, f"picture: {picture}")


COLORS: dict[str, str] = {
    PhaseKind.GENERATE: "#4477aa",
    PhaseKind.SCORE: "#66ccee",
    PhaseKind.CREATE_EPISODE: "#ccbb44",
    PhaseKind.STEP: "#ee7733",
    PhaseKind.CLOSE_EPISODE: "#ccbb44",
    PhaseKind.EXECUTE_CODE: "#ee7733",
    PhaseKind.COMPUTE_REWARD: "#aa3377",
    PhaseKind.JUDGE: "#aa3377",
    PhaseKind.RETRY: "#cc3311",
    PhaseKind.NOT_RECORDED: "#777777",
}
LABELS: dict[str, str] = {
    PhaseKind.GENERATE: "generating",
    PhaseKind.SCORE: "scoring by a teacher",
    PhaseKind.CREATE_EPISODE: "opening, closing an episode",
    PhaseKind.CLOSE_EPISODE: "opening, closing an episode",
    PhaseKind.STEP: "environment, code",
    PhaseKind.EXECUTE_CODE: "environment, code",
    PhaseKind.COMPUTE_REWARD: "reward, judge",
    PhaseKind.JUDGE: "reward, judge",
    PhaseKind.RETRY: "pause before playing again",
    PhaseKind.NOT_RECORDED: "not recorded one by one",
}
FOR_SLOT, BETWEEN, TO_JOURNAL, WITH_REPLICA = (
    "waiting for a slot",
    "between calls",
    "to the journal",
    "lost with its replica",
)
_ORDER = [WITH_REPLICA, FOR_SLOT, *dict.fromkeys(LABELS.values()), BETWEEN, TO_JOURNAL]
WAIT, PLAY, JOURNAL, LOST = "#dddddd", "#bbccee", "#66aa55", "#f4b6a6"
STAGE_COLORS: dict[str, str] = {
    StageName.LOST: LOST,
    StageName.TO_REPLICA: "#eeeeee",
    StageName.WAITING_FOR_SLOT: WAIT,
    StageName.PLAYING: "#4477aa",
    StageName.TO_JOURNAL: JOURNAL,
    StageName.WAITING_FOR_BATCH: "#cccccc",
    StageName.TO_TRAINER: "#ddcc77",
    StageName.TRAINING: "#228833",
    StageName.PUBLISHING: "#66ccee",
}
LABEL = 0.125  # of the axis: room for a name below the bar
NARROW = 0.09  # of the axis: a stage narrower than this is named below its bar


def draw(facts: GroupFacts, output: Path) -> Path:
    """Write a PNG. Raises ``ConfigError`` for a task group with no known event but its issue."""
    life = stages(facts)
    if facts.complete and not facts.slots:
        raise ConfigError(
            f"task group {facts.task_group_id}: its trajectories were collected, as orchestrator.retention: needed does "
            "with those that were not trained: nothing to draw"
        )
    if not facts.slots or not life:
        raise ConfigError(f"task group {facts.task_group_id} has no finished rollout yet: nothing to draw")
    height = 1.9 + 0.34 * len(facts.slots) + 1.7
    plt = pyplot()
    figure, (rows, bar) = plt.subplots(
        2, 1, figsize=(13, height), height_ratios=[0.6 + 0.34 * len(facts.slots), 1.5], layout="constrained"
    )
    figure.suptitle(
        f"task group {facts.task_group_id}: {headline(facts)}", fontsize=11, x=0.01, ha="left", parse_math=False
    )
    _draw_rollouts(rows, facts, life[0].begin)
    _draw_life(bar, facts, life)
    figure.savefig(output, dpi=120)
    plt.close(figure)
    return output


def _draw_rollouts(axes: Any, facts: GroupFacts, zero: float) -> None:
    legend: dict[str, Any] = {}

    def block(row: int, begin: float, end: float, color: str, label: str, size: float = 0.62) -> None:
        if end > begin:
            drawn = axes.barh(row, end - begin, left=begin - zero, height=size, color=color, linewidth=0)
            legend.setdefault(label, drawn)

    for row, slot in enumerate(facts.slots):
        for begin, end in _lost(facts, slot):
            block(row, begin, end, LOST, WITH_REPLICA)
        block(row, slot.accepted_at, slot.started_at, WAIT, FOR_SLOT)
        block(row, slot.started_at, slot.finished_at, PLAY, BETWEEN, 0.3)
        for phase in slot.phases:
            begin = slot.started_at + phase.begin_s
            block(
                row,
                begin,
                begin + phase.seconds,
                COLORS.get(phase.what, COLORS[PhaseKind.NOT_RECORDED]),
                LABELS.get(phase.what, LABELS[PhaseKind.NOT_RECORDED]),
            )
        block(row, slot.finished_at, slot.durable_at, JOURNAL, TO_JOURNAL)
        end = max(slot.durable_at, slot.finished_at)
        mark = slot.failure or ("" if slot.reward is None else f"reward {slot.reward:g}")
        color = "#cc3311" if slot.failure else "#333333"
        axes.annotate(
            mark,
            (end - zero, row),
            xytext=(4, 0),
            textcoords="offset points",
            va="center",
            fontsize=8,
            color=color,
            parse_math=False,
        )
    axes.set_yticks(range(len(facts.slots)), [_name(facts, slot) for slot in facts.slots], fontsize=8, parse_math=False)
    axes.invert_yaxis()
    last = max(max(slot.durable_at, slot.finished_at) for slot in facts.slots)
    axes.set_xlim(0, (last - zero) * (1.1 + 0.006 * max(len(slot.failure) for slot in facts.slots)) or 1)
    axes.set_xlabel("seconds since the issue", fontsize=8)
    axes.tick_params(axis="x", labelsize=8)
    axes.grid(axis="x", alpha=0.3)
    axes.set_axisbelow(True)
    named = sorted(legend, key=_ORDER.index)
    axes.legend(
        [legend[name] for name in named], named, fontsize=8, loc="lower left", bbox_to_anchor=(-0.01, 1.0),
        ncols=len(named), frameon=False,
    )  # fmt: skip


def _draw_life(axes: Any, facts: GroupFacts, life: Iterable[Stage]) -> None:
    stretches = list(life)
    zero, whole = stretches[0].begin, stretches[-1].end - stretches[0].begin
    narrow = [stage for stage in stretches if whole and 0 < stage.seconds / whole < NARROW]
    places = _spread([(stage.begin - zero + stage.seconds / 2) / whole for stage in narrow])
    for stage in stretches:
        begin, seconds = stage.begin - zero, stage.seconds
        axes.barh(0, seconds, left=begin, height=0.7, color=STAGE_COLORS.get(stage.name, "#bbbbbb"), linewidth=0)
        text = f"{stage.name}\n{format_seconds(seconds)}"
        if whole and seconds / whole >= NARROW:
            dark = stage.name in (StageName.PLAYING, StageName.TRAINING)
            color = "white" if dark else "black"
            axes.text(begin + seconds / 2, 0, text, ha="center", va="center", fontsize=8, color=color)
        elif stage in narrow:
            place = places[narrow.index(stage)]
            axes.annotate(
                text, (begin + seconds / 2, 0.36), xytext=(place, -0.22), textcoords="axes fraction", fontsize=8,
                va="top", ha="center", arrowprops={"arrowstyle": "-", "color": "#888888", "linewidth": 0.6},
            )  # fmt: skip
    axes.set_ylim(0.45, -0.45)
    axes.set_xlim(0, whole or 1)
    use = first_use(facts)
    name = f"until version {use.training_step} of {use.policy}" if use and use.published_at else "the whole life"
    axes.set_yticks([0], [f"from prompt\n{name}" if use else name], fontsize=8)
    axes.xaxis.tick_top()
    axes.tick_params(axis="x", labelsize=8)
    for side in ("right", "bottom", "left"):
        axes.spines[side].set_visible(False)


def _spread(centers: list[float]) -> list[float]:
    """Places for labels near these centers, in order, so that none covers another; shares of the axis."""
    places: list[float] = []
    for center in centers:
        places.append(max(center, places[-1] + LABEL if places else 0.03))
    most = 0.97
    for number in reversed(range(len(places))):
        places[number] = min(places[number], most)
        most = places[number] - LABEL
    return places


def _lost(facts: GroupFacts, slot: SlotFacts) -> Iterable[tuple[float, float]]:
    """Times at a replica that did not return the rollout."""
    times = [assignment.at for assignment in facts.assignments if assignment.at]
    start = slot.accepted_at or slot.started_at
    for begin, end in pairwise(times):
        if end <= start:  # a slot that was brought before its group's re-issue was not lost
            yield begin, end


def _name(facts: GroupFacts, slot: SlotFacts) -> str:
    several = len({other.replica_id for other in facts.slots}) > 1
    return f"slot {slot.index} on {slot.replica_id}" if several else f"slot {slot.index}"
