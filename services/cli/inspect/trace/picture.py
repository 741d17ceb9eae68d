"""A task group's life as a picture: a row per rollout, and below them the way from prompt to gradient as one bar."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path
from typing import Any

from services.cli.console import format_seconds
from services.cli.console import pyplot as load_pyplot
from services.cli.inspect.trace.facts import GroupFacts, SlotFacts
from services.cli.inspect.trace.stages import Stage, StageName, first_use, headline, stages
from services.common.errors import ConfigError
from services.common.records.phases import PhaseKind

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
    pyplot = load_pyplot()
    figure, (rows, bar) = pyplot.subplots(
        2, 1, figsize=(13, height), height_ratios=[0.6 + 0.34 * len(facts.slots), 1.5], layout="constrained"
    )
    figure.suptitle(
        f"task group {facts.task_group_id}: {headline(facts)}", fontsize=11, x=0.01, ha="left", parse_math=False
    )
    _draw_rollouts(rows, facts, life[0].begin)
    _draw_life(bar, facts, life)
    figure.savefig(output, dpi=120)
    pyplot.close(figure)
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
