"""The life of one task group: its facts from the journal and the logs, its stages, and its events in order of time.

Invariants, also with missing facts: stages touch each other and none has a negative length, so they sum to the time
from the first to the last; events are in order of time, and those of one instant in order of cause.

Replicas on other machines have clocks of their own. A replica cannot accept an order before its record in the journal, nor
send a record after that was durable. Where its times say so they are moved, by the least that fits; where they fit they
are left alone.
"""

from __future__ import annotations

import enum
import io
import json
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from contextlib import closing
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import NamedTuple

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from services.cli.console import FittingTable, columns, format_seconds, say
from services.cli.inspect.run_model import GroupFacts, Json, Note, RunModel, SequenceFacts, SlotFacts, Used
from services.cli.inspect.run_state import logged_at, parse_rows
from services.common import run_files
from services.common.errors import ConfigError
from services.common.records import GroupFate, PhaseKind, RolloutFailure, Trajectory
from services.common.telemetry.logs import LogEvent
from services.orchestrator.journal import entries

OUTCOMES = {
    GroupFate.KEPT: "queued for a batch",
    GroupFate.EQUAL_REWARDS: "filtered: all rewards are equal, so they give no gradient",
    GroupFate.RESAMPLED_AWAY: "filtered: resampling left too few",
    GroupFate.SURPLUS: "dropped: the policy had enough sequences of this age",
    GroupFate.EXPIRED: "expired: too old when the group was complete",
}


class StageName(enum.StrEnum):
    """Stages of a task group's life, in their order."""

    ISSUED = "issued"
    LOST = "lost with a replica"
    TO_REPLICA = "to the replica"
    WAITING_FOR_SLOT = "waiting for a slot"
    PLAYING = "playing"
    TO_JOURNAL = "to the journal"
    WAITING_FOR_BATCH = "waiting for a batch"
    TO_TRAINER = "to the trainer"
    TRAINING = "training"
    PUBLISHING = "publishing"
    WAITING_FOR_EVALUATION = "waiting for the evaluation's end"
    UNTIL_CLOSED = "until it was closed"


class Stage(NamedTuple):
    """A part of a task group's life."""

    name: StageName
    begin: float
    end: float

    @property
    def seconds(self) -> float:
        return self.end - self.begin


class Event(NamedTuple):
    at: float
    what: str  # short and countable
    text: str
    slot: int | None = None


def status(facts: GroupFacts) -> str:
    """The state of a group in a word or two; `running`, `waiting for a batch`, `in a batch` and `training` may still
    change."""
    fresh = [use for use in facts.uses if not use.replayed]
    if facts.purpose == "evaluation":
        return "evaluated" if facts.evaluated_at or facts.complete else "running"
    if fresh:
        if all(use.published_at for use in fresh):
            return "trained"
        return "training" if any(use.pulls or use.compute for use in fresh) else "in a batch"
    if not facts.complete:
        return "cancelled" if facts.closed_at else "running"
    if facts.num_failed == facts.num_slots and facts.all_known:
        return "failed"
    outcomes = {verdict.outcome for verdict in facts.verdicts}
    if outcomes and GroupFate.KEPT not in outcomes:
        return next((o.value for o in (GroupFate.SURPLUS, GroupFate.EXPIRED) if o in outcomes), "filtered")
    return facts.closed_reason or StageName.WAITING_FOR_BATCH.value


def first_use(facts: GroupFacts) -> Used | None:
    """The first batch that trained the sequence; replays come later."""
    fresh = [use for use in facts.uses if not use.replayed] or facts.uses
    return min(fresh, key=lambda use: use.assembled_at, default=None)


def stages(facts: GroupFacts) -> list[Stage]:
    """Its life, as far as known; a stage without a known end is merged with the next."""
    found: list[Stage] = []
    at = 0.0
    for name, end in _marks(facts):
        if at and end:
            found.append(Stage(name, at, max(at, end)))
        at = max(at, end)
    return found


def _marks(facts: GroupFacts) -> Iterator[tuple[StageName, float]]:
    """(stage, time of its end), in order of cause; 0 if unknown."""
    slots, use = facts.slots.values(), first_use(facts)
    yield StageName.ISSUED, _least(assignment.at for assignment in facts.assignments)
    accepted = _least(slot.accepted_at or slot.started_at or slot.durable_at for slot in slots)
    again = [assignment.at for assignment in facts.assignments[1:] if assignment.at <= accepted]
    yield StageName.LOST, max(again, default=0.0)
    yield StageName.TO_REPLICA, _least(slot.accepted_at for slot in slots)
    yield StageName.WAITING_FOR_SLOT, _least(slot.started_at for slot in slots)
    if not facts.complete:
        yield StageName.PLAYING, facts.closed_at
        return
    finished = max((slot.finished_at for slot in slots), default=0.0)
    yield StageName.PLAYING, finished
    yield StageName.TO_JOURNAL if finished else StageName.PLAYING, max((slot.durable_at for slot in slots), default=0.0)
    if use is None:
        yield StageName.WAITING_FOR_EVALUATION, facts.evaluated_at
        yield StageName.UNTIL_CLOSED, facts.closed_at
        return
    yield StageName.WAITING_FOR_BATCH, use.assembled_at
    yield StageName.TO_TRAINER, _least(begin for begin, _ in use.compute)
    yield StageName.TRAINING, max((end for _, end in use.compute), default=0.0)
    yield StageName.PUBLISHING, use.published_at


def events(facts: GroupFacts, *, with_slots: bool = False) -> list[Event]:
    """The events of the group; ``with_slots`` also every phase of every rollout."""
    found = [*_played(facts, with_slots), *_trained(facts)]
    found += [Event(note.at, note.event, f"{note.text} ({note.service})") for note in facts.notes]
    return sorted((event for event in found if event.at), key=lambda event: event.at)


def _played(facts: GroupFacts, with_slots: bool) -> Iterator[Event]:
    """From the issue until every slot is durable."""
    for number, assignment in enumerate(facts.assignments):
        replica = f"replica {assignment.replica_id}" if assignment.replica_id else "no replica"
        if number:
            yield Event(assignment.at, "reissued", f"open slots issued again, to {replica}")
        else:
            of = f" of {', '.join(facts.policies)}" if facts.policies else ""
            told = f"task {facts.task_id} issued to {replica}: {facts.num_slots} slots{of}"
            yield Event(assignment.at, "issued", told)
    slots = facts.slots.values()
    for slot in slots if with_slots else ():
        index = slot.index
        yield Event(slot.started_at, "slot_started", f"slot {index} starts", index)
        for phase in slot.phases:
            tokens = f" {phase.num_tokens} tokens of {phase.policy}" if phase.policy else ""
            detail = f" ({phase.detail})" if phase.detail else ""
            told = f"slot {index}: {phase.what}{tokens}{detail} in {phase.seconds:.3f} s"
            yield Event(slot.started_at + phase.begin_s, phase.what, told, index)
        yield Event(slot.finished_at, "slot_finished", f"slot {index} ends", index)
        again = f", for the {slot.num_sends}. time" if slot.num_sends > 1 else ""
        yield Event(slot.sent_at, "slot_sent", f"slot {index} is sent{again}", index)
        yield Event(slot.durable_at, "slot_durable", f"slot {index} is durable", index)
    for replica in dict.fromkeys(slot.replica_id for slot in slots if slot.accepted_at):
        accepted = _least(slot.accepted_at for slot in slots if slot.replica_id == replica)
        yield Event(accepted, "accepted", f"accepted by replica {replica}")
    yield Event(_least(slot.started_at for slot in slots), "started", "the first rollout starts")
    for slot in slots:
        if slot.failure:
            text = f"slot {slot.index} failed: {slot.failure}" + (f": {slot.detail}" if slot.detail else "")
            yield Event(slot.finished_at or slot.durable_at, "failed", text, slot.index)
    if facts.all_known:
        yield Event(max(slot.finished_at for slot in slots), "finished", "the last rollout ends")
        came = f"{facts.num_slots - facts.num_failed} trajectories, {facts.num_failed} failures"
        yield Event(max(slot.durable_at for slot in slots), "complete", f"complete, all durable: {came}")


def _trained(facts: GroupFacts) -> Iterator[Event]:
    """From the verdict to the published version, or to another end."""
    for verdict in facts.verdicts:
        name = "/".join(part for part in (verdict.policy, verdict.role, str(verdict.attempt)) if part)
        text = (
            f"advantage group {name}: {verdict.num_sequences} sequences, reward {verdict.mean:.3g} ± {verdict.std:.3g}"
        )
        text += f", {OUTCOMES[verdict.outcome]}"
        if 0 < verdict.num_kept < verdict.num_sequences:
            text += f" ({verdict.num_kept} of them)"
        yield Event(facts.judged_at, f"advantage_group_{verdict.outcome}", text)
    for use in facts.uses:
        again, cuts, step = "again " if use.replayed else "", ", ".join(map(str, use.minibatches)), use.training_step
        text = f"{again}in the batch of step {step} of {use.policy}: {use.num_sequences} of its {use.batch_size}"
        text += f" sequences, minibatch {cuts}, staleness at most {use.staleness_max}"
        yield Event(use.assembled_at, "batch", text)
        for rank, at in use.pulls:
            yield Event(at, "pulled", f"batch of step {step} pulled by rank {rank}")
        for begin, end in use.compute:
            yield Event(begin, "training", f"training step {step} of {use.policy} begins")
            text = f"training step {step} done: {end - begin:.3f} s"
            text += f", loss {use.loss:.4g}" if use.loss is not None else ""
            text += f", gradient norm {use.grad_norm:.4g}" if use.grad_norm is not None else ""
            yield Event(end, "trained", text)
        yield Event(use.published_at, "published", f"version {step} of {use.policy} published")
    if facts.closed_reason != "trained":
        yield Event(facts.closed_at, "closed", f"closed: {facts.closed_reason}")
    yield Event(facts.evaluated_at, "evaluated", f"evaluation {facts.evaluation} is finished")


def seconds_in(slot: SlotFacts, what: PhaseKind | None = None, *, other_than: PhaseKind | None = None) -> float:
    """Seconds of a rollout in phases of a kind, or of all other kinds; phases at the same time count once."""
    total, until = 0.0, 0.0
    for phase in sorted(slot.phases, key=lambda phase: phase.begin_s):
        if what in (None, phase.what) and phase.what not in (other_than, PhaseKind.NOT_RECORDED):
            total += max(0.0, phase.end_s - max(phase.begin_s, until))
            until = max(until, phase.end_s)
    return total


def _least(times: Iterable[float]) -> float:
    return min((at for at in times if at), default=0.0)


def headline(facts: GroupFacts) -> str:
    """One line: the task, the purpose, and the result."""
    use, word, life = first_use(facts), status(facts), stages(facts)
    parts = [
        f"task {facts.task_id}" if facts.task_id else "",
        f"evaluation {facts.evaluation}" if facts.evaluation else facts.purpose,
        f"{word} in step {use.training_step} of {use.policy}" if use and word == "trained" else word,
        f"{format_seconds(life[-1].end - life[0].begin)} in all" if life else "",
    ]
    return ", ".join(part for part in parts if part)


# --- facts of the logs, and of the records of slots

# Events of a log -> their description, with keys of the line; whom they concern: one task group, a replica of its, or the run.
_OF_GROUP: dict[str, str] = {
    LogEvent.RECORD_DROPPED: "{outcome} record of slot {index} from {replica}",
    LogEvent.TASK_GROUP_ORPHANED: "no replica plays it; {open_slots} slots are open",
    LogEvent.TASK_GROUP_GIVEN_UP: "given up: {reason}",
    LogEvent.TASK_GROUP_CANCELLED: "cancelled on its replica: {reason}",
    LogEvent.ROLLOUT_RETRY: "slot {index} is played again: {error}",
    LogEvent.ROLLOUT_CRASHED: "slot {index} crashed",
    LogEvent.ROLLOUT_LOST: "slot {index} was lost",
}
_OF_REPLICA: dict[str, str] = {
    LogEvent.LEASE_LOST: "the lease of replica {replica} ran out",
    LogEvent.REPLICA_REPLACED: "replica {replica} was started again",
}
_OF_RUN: dict[str, str] = {LogEvent.RUN_RECOVERED: "the orchestrator was started again, and went on from its journal"}
_NOTES: dict[str, str] = {**_OF_GROUP, **_OF_REPLICA, **_OF_RUN}


def add_notes(run_dir: Path, facts: GroupFacts) -> None:
    """Set the notes, in order of time, and when which rank first asked for which batch. Most lines are not parsed."""
    replicas = {assignment.replica_id for assignment in facts.assignments}
    begin, end = min((assignment.at for assignment in facts.assignments), default=0.0), float("inf")
    if facts.complete:  # without slots: retention has collected their records since
        end = max((slot.durable_at for slot in facts.slots.values()), default=facts.judged_at)
    uses = {(use.policy, use.training_step): use for use in facts.uses}
    notes: list[Note] = []
    pulls: dict[tuple[str, int], dict[int, float]] = defaultdict(dict)
    needles = [facts.task_group_id, *_OF_REPLICA, *_OF_RUN, *([LogEvent.BATCH_PULLED] if uses else [])]
    wanted = re.compile(b"|".join(re.escape(needle.encode()) for needle in needles))
    for path in sorted(run_files.logs(run_dir).glob("*.jsonl")):
        with path.open("rb") as lines:
            for row in parse_rows(filter(wanted.search, lines)):
                event, at = str(row.get("event")), logged_at(row)
                if event == LogEvent.BATCH_PULLED:
                    pulls[row.get("policy", ""), row.get("step", 0)].setdefault(row.get("rank", 0), at)
                elif event in _OF_GROUP:
                    concerns = row.get("task_group") == facts.task_group_id
                else:
                    concerns = begin <= at <= end and (event in _OF_RUN or row.get("replica") in replicas)
                if event in _NOTES and concerns:
                    text = _NOTES[event].format_map(defaultdict(lambda: None, row))
                    notes.append(Note(at=at, service=row.get("instance", ""), event=event, text=text))
    facts.notes = tuple(sorted(notes, key=lambda note: note.at))
    for key, use in uses.items():
        use.pulls = tuple(sorted(pulls.get(key, {}).items()))


def read_group(run_dir: Path, task_group_id: str) -> GroupFacts:
    """All facts of a task group: from the journal first, then from the logs. Raises ``ConfigError`` for one that was never
    issued in this run."""
    with closing(RunModel(run_dir)) as model:
        model.read(task_group_id)
        facts = model.groups.get(task_group_id)
        if facts is None:
            raise ConfigError(
                f"no task group {task_group_id!r} in this run: `rollmill trace RUN --list` shows which there are"
            )
        facts.slots = dict(sorted(facts.slots.items()))
        for slot in facts.slots.values():
            _load(slot, model)
    add_notes(run_dir, facts)
    fit_clocks(facts)
    return facts


def read_groups(run_dir: Path) -> list[GroupFacts]:
    """Every task group in order of issue. Of its slots only when each was durable, and whether it failed: no trajectory
    is read."""
    with closing(RunModel(run_dir)) as model:
        model.read()
        return list(model.groups.values())


def _load(slot: SlotFacts, model: RunModel) -> None:
    """Set the facts that are in the record of a slot."""
    record = model.load(slot.row) if slot.row is not None else None
    slot.readable = record is not None
    if record is None:
        return
    found: Trajectory | RolloutFailure
    if slot.failure:
        found = entries.from_json(RolloutFailure, record)
        slot.detail = found.detail
    else:
        found = entries.from_json(Trajectory, record)
        slot.reward = found.reward
        names = ("policy", "role", "attempt", "reward", "num_tokens", "num_trained_tokens")
        slot.sequences = tuple(
            SequenceFacts(
                **{name: getattr(sequence, name) for name in names},
                versions=tuple(
                    dict.fromkeys(s.weight_version for s in sequence.segments if s.is_policy and s.num_tokens)
                ),
                stop_reason=sequence.stop_reason.value,
            )
            for sequence in found.sequences
        )
    slot.replica_id, slot.started_at, slot.finished_at = found.replica_id, found.started_at, found.finished_at
    for name in ("accepted_at", "sent_at", "num_sends", "num_retries", "phases"):
        setattr(slot, name, getattr(found.timing, name))


def fit_clocks(facts: GroupFacts) -> None:
    """Move the times of every replica to the orchestrator's clock, as far as they allow it."""
    of_replicas: dict[str, list[SlotFacts]] = defaultdict(list)
    for slot in facts.slots.values():
        of_replicas[slot.replica_id].append(slot)
    for replica, slots in of_replicas.items():
        issued = _least(a.at for a in facts.assignments if a.replica_id == replica)
        first = [at for slot in slots if issued and (at := slot.accepted_at or slot.started_at)]
        last = [(slot.durable_at, at) for slot in slots if slot.durable_at and (at := slot.sent_at or slot.finished_at)]
        least = max((issued - at for at in first), default=float("-inf"))
        most = min((durable - at for durable, at in last), default=float("inf"))
        shift = min(max(0.0, least), most) if least <= most else 0.0
        if not shift:
            continue
        facts.clocks[replica] = shift
        for slot in slots:
            for name in ("accepted_at", "started_at", "finished_at", "sent_at"):
                if at := getattr(slot, name):
                    setattr(slot, name, at + shift)


# --- on a terminal, as JSON and as a picture


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
    lines = [line for line in lines if state in (None, line["status"])]
    if order == "slowest":
        return sorted(lines, key=lambda line: line["seconds"], reverse=True)[:last]
    return lines[-last:]


def _line(facts: GroupFacts) -> Json:
    life, use = stages(facts), first_use(facts)
    longest = max(life, key=lambda stage: stage.seconds, default=None)
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
        told = f"{format_seconds(abs(shift))} {'behind' if shift > 0 else 'ahead'}: its times are moved by that"
        say(console, f"the clock of replica {replica} is at least {told}", "yellow")
    life = stages(facts)
    console.print(_timeline(events(facts, with_slots=with_slots), life))
    if facts.slots:
        console.print(_rollouts(facts))
        signs = dict.fromkeys((sign, words) for sign, _, words in _SIGNS.values() if words)
        say(console, "  ".join(f"{sign} {words}" for sign, words in signs), "dim", wrap=True)
    if life:
        longest = max(stage.seconds for stage in life)
        table = Table(title="where the time went", title_justify="left", box=None, show_header=False, pad_edge=False)
        for stage in life:
            bar = "█" * round(BAR * stage.seconds / longest) if longest else ""
            table.add_row(stage.name, format_seconds(stage.seconds), f"[cyan]{bar}[/cyan]")
        console.print(table)


def group_as_json(facts: GroupFacts) -> Json:
    """The same for machines: every fact, every event, every stage."""
    found = asdict(facts)
    for name in ("steps", "entries"):  # of the model
        del found[name]
    for slot in found["slots"].values():
        del slot["row"]
    return {
        "status": status(facts),
        **found,
        "slots": list(found["slots"].values()),
        "events": [event._asdict() for event in events(facts, with_slots=True)],
        "stages": [{**stage._asdict(), "seconds": stage.seconds} for stage in stages(facts)],
    }


def _timeline(found: list[Event], life: list[Stage]) -> Table:
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(no_wrap=True)
    table.add_column(justify="right", no_wrap=True)
    table.add_column(overflow="fold")
    long = [stage for stage in life if stage.name in _WAITS and stage.seconds >= LONG_S]
    waits = {stage.end: _WAITS[stage.name].format(format_seconds(stage.seconds)) for stage in long}
    for event in found:
        if wait := waits.pop(event.at, ""):
            table.add_row("", "", Text(f"  … {wait}", style="yellow"))
        clock = datetime.fromtimestamp(event.at).strftime("%H:%M:%S.%f")[:-3]
        text = Text(event.text, style="red" if event.what in _LOSSES else "")
        table.add_row(clock, f"+{event.at - found[0].at:.3f} s", text)
    return table


def _rollouts(facts: GroupFacts) -> FittingTable:
    slots = facts.slots.values()
    zero = _least(assignment.at for assignment in facts.assignments)
    whole = max(max(slot.durable_at, slot.finished_at) for slot in slots) - zero
    table = FittingTable(
        columns(
            "slot | replica:1 | >slot wait:5 | >played | >generated | >tokens | >gateway | >to journal:4 | >sends:7 | >retries:6 | >reward | versions:2 | time since the issue:3"
        ),
        title="rollouts",
    )
    for slot in slots:
        versions: dict[str, set[int]] = defaultdict(set)
        for sequence in slot.sequences:
            versions[sequence.policy].update(sequence.versions)
        spans = [f"{p} {min(v)}–{max(v)}" if len(v) > 1 else f"{p} {min(v)}" for p, v in versions.items() if v]
        outcome = Text(slot.failure, style="red") if slot.reward is None else f"{slot.reward:g}"
        table.add_row(
            str(slot.index),
            Text(slot.replica_id),
            _between(slot.accepted_at, slot.started_at),
            _between(slot.started_at, slot.finished_at),
            format_seconds(seconds_in(slot, PhaseKind.GENERATE)) if slot.phases else "",
            str(sum(sequence.num_trained_tokens for sequence in slot.sequences) or ""),
            format_seconds(seconds_in(slot, other_than=PhaseKind.GENERATE)) if slot.phases else "",
            _between(slot.finished_at, slot.durable_at),
            str(slot.num_sends or ""),
            str(slot.num_retries or ""),
            outcome if slot.readable else "collected",  # by the journal's retention
            Text(", ".join(spans)),
            _strip(slot, zero, whole),
        )
    return table


_SLOT, _OWN, _SENDING = "waiting for a slot", "between calls", "to the journal"
# Phase of a rollout -> sign, style, words of the legend.
_SIGNS: dict[str, tuple[str, str, str]] = {
    _SLOT: ("·", "dim", _SLOT),
    _OWN: ("─", "dim", _OWN),
    PhaseKind.GENERATE: ("█", "blue", "generating"),
    PhaseKind.SCORE: ("▚", "cyan", "scoring by a teacher"),
    **dict.fromkeys(
        (PhaseKind.CREATE_EPISODE, PhaseKind.STEP, PhaseKind.CLOSE_EPISODE, PhaseKind.EXECUTE_CODE),
        ("▒", "yellow", "environment, code"),
    ),
    **dict.fromkeys((PhaseKind.COMPUTE_REWARD, PhaseKind.JUDGE), ("▓", "magenta", "reward, judge")),
    PhaseKind.RETRY: ("×", "red", "pause before playing again"),
    PhaseKind.NOT_RECORDED: ("?", "dim", ""),
    _SENDING: ("→", "green", _SENDING),
}
STRIP = 48  # characters from the issue of the task group to its last record


def _strip(slot: SlotFacts, zero: float, whole: float) -> Text:
    """The time of a rollout as signs, on the axis that all rollouts of its task group share."""
    cells = [(" ", "")] * STRIP
    stretches = [
        (_SLOT, slot.accepted_at, slot.started_at),
        (_OWN, slot.started_at, slot.finished_at),
        *((p.what, slot.started_at + p.begin_s, slot.started_at + p.end_s) for p in slot.phases if slot.started_at),
        (_SENDING, slot.finished_at, slot.durable_at),
    ]
    for what, begin, end in stretches:
        if begin and end > begin >= zero and whole:
            first = min(STRIP - 1, int(STRIP * (begin - zero) / whole))
            last = min(STRIP, max(first + 1, round(STRIP * (end - zero) / whole)))
            cells[first:last] = [_SIGNS.get(what, _SIGNS[PhaseKind.NOT_RECORDED])[:2]] * (last - first)
    return Text.assemble(*cells)


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
