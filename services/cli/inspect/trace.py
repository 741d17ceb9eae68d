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
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from services.cli.console import FittingTable, columns, format_seconds, say
from services.cli.inspect.run_model import Assignment, GroupFacts, Json, Note, RunModel, SequenceFacts, SlotFacts, Used
from services.cli.inspect.run_state import logged_at, parse_rows
from services.common import run_files
from services.common.errors import ConfigError
from services.common.records import GroupFate, PhaseKind, RolloutFailure, TokenSequence, Trajectory
from services.common.telemetry.logs import LogEvent
from services.orchestrator.journal import entries
from services.orchestrator.journal.segments import Row

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


@dataclass(frozen=True, slots=True)
class Stage:
    """A part of a task group's life."""

    name: StageName
    begin: float
    end: float

    @property
    def seconds(self) -> float:
        return self.end - self.begin


@dataclass(frozen=True, slots=True)
class Event:
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
    if GroupFate.KEPT in outcomes:
        return facts.closed_reason or StageName.WAITING_FOR_BATCH.value
    for outcome in (GroupFate.SURPLUS, GroupFate.EXPIRED):
        if outcome in outcomes:
            return outcome.value
    if outcomes:
        return "filtered"
    return facts.closed_reason or StageName.WAITING_FOR_BATCH.value


def first_use(facts: GroupFacts) -> Used | None:
    """The first batch that trained the sequence; replays come later."""
    fresh = [use for use in facts.uses if not use.replayed] or list(facts.uses)
    return min(fresh, key=lambda use: use.assembled_at, default=None)


def stages(facts: GroupFacts) -> list[Stage]:
    """Its life, as far as known; a stage without a known end is merged with the next."""
    found: list[Stage] = []
    at = 0.0
    for name, end in _marks(facts):
        if not end:
            continue
        if at:
            found.append(Stage(name, at, max(at, end)))
        at = max(at, end)
    return found


def _marks(facts: GroupFacts) -> Iterator[tuple[StageName, float]]:
    """(stage, time of its end), in order of cause; 0 if unknown."""
    slots, use = facts.slots, first_use(facts)
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
    found = [
        *_issue(facts),
        *(_slot_events(facts) if with_slots else ()),
        *_play(facts),
        *_training(facts),
        *_end(facts),
    ]
    found += [Event(note.at, note.event, f"{note.text} ({note.service})") for note in facts.notes]
    return sorted((event for event in found if event.at), key=lambda event: event.at)


def _issue(facts: GroupFacts) -> Iterator[Event]:
    for number, assignment in enumerate(facts.assignments):
        replica = f"replica {assignment.replica_id}" if assignment.replica_id else "no replica"
        if number:
            yield Event(assignment.at, "reissued", f"open slots issued again, to {replica}")
        else:
            of = f" of {', '.join(facts.policies)}" if facts.policies else ""
            yield Event(
                assignment.at, "issued", f"task {facts.task_id} issued to {replica}: {facts.num_slots} slots{of}"
            )


def _play(facts: GroupFacts) -> Iterator[Event]:
    slots = facts.slots
    for replica in dict.fromkeys(slot.replica_id for slot in slots if slot.accepted_at):
        accepted = min(slot.accepted_at for slot in slots if slot.replica_id == replica and slot.accepted_at)
        yield Event(accepted, "accepted", f"accepted by replica {replica}")
    yield Event(_least(slot.started_at for slot in slots), "started", "the first rollout starts")
    for slot in slots:
        if slot.failure:
            text = f"slot {slot.index} failed: {slot.failure}" + (f": {slot.detail}" if slot.detail else "")
            yield Event(slot.finished_at or slot.durable_at, "failed", text, slot=slot.index)
    if not facts.all_known:
        return
    finished = max(slot.finished_at for slot in slots)
    yield Event(finished, "finished", "the last rollout ends")
    came = f"{facts.num_slots - facts.num_failed} trajectories, {facts.num_failed} failures"
    yield Event(max(slot.durable_at for slot in slots), "complete", f"complete, all durable: {came}")


def _slot_events(facts: GroupFacts) -> Iterator[Event]:
    for slot in facts.slots:
        yield Event(slot.started_at, "slot_started", f"slot {slot.index} starts", slot=slot.index)
        for phase in slot.phases:
            text = f"slot {slot.index}: {phase_text(phase.what, phase.policy, phase.num_tokens, phase.detail)}"
            text += f" in {phase.seconds:.3f} s"
            yield Event(slot.started_at + phase.begin_s, phase.what, text, slot=slot.index)
        yield Event(slot.finished_at, "slot_finished", f"slot {slot.index} ends", slot=slot.index)
        again = f", for the {slot.num_sends}. time" if slot.num_sends > 1 else ""
        yield Event(slot.sent_at, "slot_sent", f"slot {slot.index} is sent{again}", slot=slot.index)
        yield Event(slot.durable_at, "slot_durable", f"slot {slot.index} is durable", slot=slot.index)


def phase_text(what: str, policy: str, num_tokens: int, detail: str) -> str:
    """
    >>> phase_text("generate", "model0", 64, "stop")
    'generate 64 tokens of model0 (stop)'
    """
    tokens = f" {num_tokens} tokens of {policy}" if policy else ""
    return f"{what}{tokens}" + (f" ({detail})" if detail else "")


def _training(facts: GroupFacts) -> Iterator[Event]:
    for verdict in facts.verdicts:
        name = "/".join(part for part in (verdict.policy, verdict.role, str(verdict.attempt)) if part)
        text = (
            f"advantage group {name}: {verdict.num_sequences} sequences, reward {verdict.mean:.3g} ± {verdict.std:.3g}, "
            f"{OUTCOMES[verdict.outcome]}"
        )
        if 0 < verdict.num_kept < verdict.num_sequences:
            text += f" ({verdict.num_kept} of them)"
        yield Event(facts.judged_at, f"advantage_group_{verdict.outcome}", text)
    for use in facts.uses:
        yield from _use(use)


def _use(use: Used) -> Iterator[Event]:
    again = "again " if use.replayed else ""
    cuts = ", ".join(map(str, use.minibatches))
    text = (
        f"{again}in the batch of step {use.training_step} of {use.policy}: {use.num_sequences} of its {use.batch_size} "
        f"sequences, minibatch {cuts}, staleness at most {use.staleness_max}"
    )
    yield Event(use.assembled_at, "batch", text)
    for rank, at in use.pulls:
        yield Event(at, "pulled", f"batch of step {use.training_step} pulled by rank {rank}")
    for begin, end in use.compute:
        yield Event(begin, "training", f"training step {use.training_step} of {use.policy} begins")
        facts = [f"{end - begin:.3f} s"]
        facts += [f"loss {use.loss:.4g}"] if use.loss is not None else []
        facts += [f"gradient norm {use.grad_norm:.4g}"] if use.grad_norm is not None else []
        yield Event(end, "trained", f"training step {use.training_step} done: {', '.join(facts)}")
    if use.published_at:
        yield Event(use.published_at, "published", f"version {use.training_step} of {use.policy} published")


def _end(facts: GroupFacts) -> Iterator[Event]:
    if facts.closed_at and facts.closed_reason != "trained":
        yield Event(facts.closed_at, "closed", f"closed: {facts.closed_reason}")
    if facts.evaluated_at:
        yield Event(facts.evaluated_at, "evaluated", f"evaluation {facts.evaluation} is finished")


def seconds_in(slot: SlotFacts, what: PhaseKind | None = None, *, other_than: PhaseKind | None = None) -> float:
    """Seconds of a rollout in phases of a kind, or of all other kinds; phases at the same time count once."""
    chosen = [
        p for p in slot.phases if what in (None, p.what) and p.what != other_than and p.what != PhaseKind.NOT_RECORDED
    ]
    total, until = 0.0, 0.0
    for phase in sorted(chosen, key=lambda phase: phase.begin_s):
        total += max(0.0, phase.end_s - max(phase.begin_s, until))
        until = max(until, phase.end_s)
    return total


def _least(times: Iterator[float]) -> float:
    return min((at for at in times if at), default=0.0)


def headline(facts: GroupFacts) -> str:
    """One line: the task, the purpose, and the result."""
    parts = [f"task {facts.task_id}"] if facts.task_id else []
    parts.append(f"evaluation {facts.evaluation}" if facts.evaluation else facts.purpose)
    use = first_use(facts)
    word = status(facts)
    parts.append(f"{word} in step {use.training_step} of {use.policy}" if use and word == "trained" else word)
    found = stages(facts)
    if found:
        parts.append(f"{format_seconds(found[-1].end - found[0].begin)} in all")
    return ", ".join(parts)


Pulls = Mapping[tuple[str, int], Mapping[int, float]]  # (policy, step) -> rank -> when it first asked

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
        event, at, concerns = str(row.get("event")), logged_at(row), False
        if event == LogEvent.BATCH_PULLED:
            if (key := (row.get("policy", ""), row.get("step", 0))) in wanted:
                pulls[key].setdefault(row.get("rank", 0), at)
        elif event in _OF_GROUP:
            concerns = row.get("task_group") == facts.task_group_id
        else:
            concerns = begin <= at <= end and (event in _OF_RUN or row.get("replica") in replicas)
        if event in _NOTES and concerns:
            text = _NOTES[event].format_map(defaultdict(lambda: None, row))
            notes.append(Note(at=at, service=row.get("instance", ""), event=event, text=text))
    return tuple(sorted(notes, key=lambda note: note.at)), pulls


def pulls_of(pulls: Pulls, use: Used) -> tuple[tuple[int, float], ...]:
    return tuple(sorted(pulls.get((use.policy, use.training_step), {}).items()))


def _rows(run_dir: Path, needles: list[bytes]) -> Iterator[Json]:
    """Lines of all logs that hold one of the needles; most lines are not parsed."""
    for path in sorted(run_files.logs(run_dir).glob("*.jsonl")):
        with path.open("rb") as lines:
            yield from parse_rows(line for line in lines if any(needle in line for needle in needles))


_TIMES = ("accepted_at", "started_at", "finished_at", "sent_at")


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
        facts.slots = tuple(_slot(index, row, model.reader.load(row)) for index, row in sorted(facts.rows.items()))
    facts.notes, pulls = read_notes(run_dir, facts)
    for use in facts.uses:
        use.pulls = pulls_of(pulls, use)
    return fitted(facts)


def read_groups(run_dir: Path) -> list[GroupFacts]:
    """Every task group in order of issue. Of its slots only when each was durable, and whether it failed: no trajectory
    is read."""
    with closing(RunModel(run_dir)) as model:
        model.read()
    for facts in model.groups.values():
        facts.slots = tuple(
            SlotFacts(
                index=index,
                replica_id="",
                durable_at=row.written_at,
                failure="failed" if index in facts.failures else "",
            )
            for index, row in sorted(facts.rows.items())
        )
    return list(model.groups.values())


def _slot(index: int, row: Row, record: Json | None) -> SlotFacts:
    if record is None:
        return SlotFacts(index=index, replica_id="", durable_at=row.written_at, readable=False)
    found: Trajectory | RolloutFailure
    if row.kind == entries.FAILURE:
        found = entries.from_json(RolloutFailure, record)
        outcome: Json = {"failure": found.reason, "detail": found.detail}
    else:
        found = entries.from_json(Trajectory, record)
        outcome = {"reward": found.reward, "sequences": tuple(map(_sequence, found.sequences))}
    times = {
        name: getattr(found.timing, name) for name in ("accepted_at", "sent_at", "num_sends", "num_retries", "phases")
    }
    return SlotFacts(
        index=index, replica_id=found.replica_id, durable_at=row.written_at, started_at=found.started_at,
        finished_at=found.finished_at, **times, **outcome,
    )  # fmt: skip


def _sequence(found: TokenSequence) -> SequenceFacts:
    names = ("policy", "role", "attempt", "reward", "num_tokens", "num_trained_tokens")
    written = (s.weight_version for s in found.segments if s.is_policy and s.num_tokens)
    return SequenceFacts(
        **{name: getattr(found, name) for name in names},
        versions=tuple(dict.fromkeys(written)),
        stop_reason=found.stop_reason.value,
    )


def fitted(facts: GroupFacts) -> GroupFacts:
    """The same facts with the times of every replica moved to the orchestrator's clock, as far as they allow it."""
    slots: dict[str, list[SlotFacts]] = defaultdict(list)
    for slot in facts.slots:
        slots[slot.replica_id].append(slot)
    shifts = {replica: _shift(replica, found, facts.assignments) for replica, found in slots.items()}
    moved = tuple(_moved(slot, shifts[slot.replica_id]) for slot in facts.slots)
    return replace(facts, slots=moved, clocks={replica: shift for replica, shift in shifts.items() if shift})


def _shift(replica_id: str, slots: Iterable[SlotFacts], assignments: Iterable[Assignment]) -> float:
    """Seconds to add to a replica's times; 0 when they fit, or when no shift fits."""
    issued = min((a.at for a in assignments if a.replica_id == replica_id and a.at), default=0.0)
    least, most = float("-inf"), float("inf")
    for slot in slots:
        first = next((at for at in (slot.accepted_at, slot.started_at) if at), 0.0)
        last = next((at for at in (slot.sent_at, slot.finished_at) if at), 0.0)
        if first and issued:
            least = max(least, issued - first)
        if last and slot.durable_at:
            most = min(most, slot.durable_at - last)
    if least > most:
        return 0.0
    return min(max(0.0, least), most)


def _moved(slot: SlotFacts, shift: float) -> SlotFacts:
    if not shift:
        return slot
    return replace(slot, **{name: at + shift for name in _TIMES if (at := getattr(slot, name))})


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
