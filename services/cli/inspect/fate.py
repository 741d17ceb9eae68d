"""``rollmill fate``: one fate for each task group, rollout, sequence and token that a run has issued, their sums and checks."""

from __future__ import annotations

import enum
import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

import numpy as np
import typer
from rich.console import Console
from rich.text import Text

from services.cli.console import Column, FittingTable, columns, say
from services.cli.inspect.run_model import Entry, GroupFacts, Json, RunModel
from services.common import records
from services.common.errors import ConfigError, DeadlineError, RolloutTimeoutError
from services.common.records import ClosedReason, GroupFate, Purpose, Trajectory
from services.orchestrator.journal import entries


class Fate(enum.StrEnum):
    """Of a task group, a rollout, a sequence or a token: exactly one.

    In this order a whole has the fate of its parts: a task group of which anything was trained counts as trained.
    """

    TRAINED = "trained"
    IN_TRAINING = "in_training"  # in a recorded batch whose version is not published
    BUFFERED = "waiting_for_a_batch"
    MASKED = "masked"  # in a batch, but no part of the loss
    TOO_OLD = "too_old"  # finished, and dropped for its staleness
    SURPLUS = "surplus"  # its policy could not use it any more
    TRUNCATED = "truncated"  # cut by its budget, and rollout.on_truncation masks such
    RESAMPLED_AWAY = "resampled_away"  # batch.resample chose others
    EQUAL_REWARDS = "equal_rewards"  # batch.dynamic_sampling: nothing to learn from the group
    SIBLINGS = "waiting_for_siblings"  # finished; its task group is not complete
    PLAYING = "being_played"
    LEFT_OVER = "left_over"  # kept, and the run was done before a batch took it
    CANCELLED = "cancelled"  # by the end of the run
    STOPPED = "stopped_as_too_old"  # cancelled at its replica, because it would have been dropped
    TIMED_OUT = "timed_out"
    FAILED = "failed"
    EMPTY = "no_sequence"  # finished without a word of this policy
    UNKNOWN = "not_recorded"  # the journal lacks the record that would say it

    @property
    def label(self) -> str:
        """As people read it.

        >>> Fate.EQUAL_REWARDS.label, Fate.BUFFERED.label
        ('dropped: equal rewards', 'in flight: waiting for a batch')
        """
        kind = "dropped: " if self in _DROPPED else "in flight: " if self.in_flight else ""
        return kind + self.value.replace("_", " ")

    @property
    def in_flight(self) -> bool:
        return self in _IN_FLIGHT


_IN_FLIGHT = frozenset({Fate.IN_TRAINING, Fate.BUFFERED, Fate.SIBLINGS, Fate.PLAYING})
_DROPPED = frozenset({Fate.TOO_OLD, Fate.SURPLUS, Fate.TRUNCATED, Fate.RESAMPLED_AWAY, Fate.EQUAL_REWARDS})
_WITHOUT_TOKENS = frozenset({Fate.PLAYING, Fate.STOPPED, Fate.TIMED_OUT, Fate.FAILED, Fate.EMPTY})
_UNFINISHED = (Fate.STOPPED, Fate.TIMED_OUT, Fate.FAILED, Fate.CANCELLED)


def of_the_whole(parts: Iterable[Fate]) -> Fate:
    """The fate of a whole, from the fates of its parts.

    >>> of_the_whole([Fate.FAILED, Fate.TRAINED])
    <Fate.TRAINED: 'trained'>
    """
    return min(parts, key=list(Fate).index, default=Fate.EMPTY)


@dataclass(slots=True)
class Tally:
    """One policy's task groups that were issued in one training step, or in several: counts by fate."""

    groups: Counter[Fate] = field(default_factory=Counter)
    rollouts: Counter[Fate] = field(default_factory=Counter)
    sequences: Counter[Fate] = field(default_factory=Counter)
    tokens: Counter[Fate] = field(default_factory=Counter)  # that the policy wrote
    failures: Counter[str] = field(default_factory=Counter)  # by reason, as the records say it
    sampled_sequences: int = 0  # as the verdicts count them; of task groups without one, as the trajectories do

    def add(self, other: Tally) -> None:
        for name in ("groups", "rollouts", "sequences", "tokens", "failures"):
            getattr(self, name).update(getattr(other, name))
        self.sampled_sequences += other.sampled_sequences

    def fates(self) -> list[Fate]:
        """Those that occur, in order."""
        return [f for f in Fate if self.groups[f] or self.rollouts[f] or self.sequences[f] or self.tokens[f]]


class Check(NamedTuple):
    """One sum that must come out."""

    what: str
    expected: int
    found: int

    @property
    def holds(self) -> bool:
        return self.expected == self.found


class Played(NamedTuple):
    """A sequence with a decided fate."""

    step: int  # in which its task group was issued
    fate: Fate
    length: int  # tokens
    trained: int  # tokens, without the masked ones


def bands(played: Sequence[Played]) -> list[Json]:
    """Sequences by length, from one quantile to the next, shortest first. Bands that ties leave empty are not there."""
    limits = np.quantile([one.length for one in played], (0.5, 0.9, 0.99, 1.0)).tolist() if played else []
    found = []
    for name, (low, high) in zip(("p0-50", "p50-90", "p90-99", ">p99"), pairwise([-1.0, *limits]), strict=False):
        if part := [one for one in played if low < one.length <= high]:
            lengths, fates = [one.length for one in part], Counter(one.fate for one in part)
            found.append(
                {
                    "quantiles": name, "shortest": min(lengths), "longest": max(lengths), "sequences": len(part),
                    "tokens": sum(lengths), "tokens_trained": sum(one.trained for one in part),
                    "trained_share": fates[Fate.TRAINED] / len(part), "fates": fates,
                }
            )  # fmt: skip
    return found


def mean_lengths(played: Sequence[Played]) -> tuple[float, float] | None:
    """(of the sequences that were trained, of all that were played), in tokens; None where none was trained."""
    trained = [one.length for one in played if one.fate is Fate.TRAINED]
    return (fmean(trained), fmean(one.length for one in played)) if trained else None


@dataclass(slots=True)
class Fates:
    """Sums of a run. A step is the training step that a policy was at when the task group was issued."""

    tallies: dict[tuple[str, int], Tally] = field(default_factory=lambda: defaultdict(Tally))
    decided: dict[str, list[Played]] = field(default_factory=lambda: defaultdict(list))  # by policy
    checks: list[Check] = field(default_factory=list)
    num_passed_over: int = 0  # prompts that curation has excluded
    num_unreadable: int = 0  # damaged records
    num_updates_skipped: Counter[str] = field(default_factory=Counter)  # optimizer updates, by policy

    @property
    def policies(self) -> list[str]:
        return sorted({policy for policy, _ in self.tallies})

    def steps(self, policy: str) -> dict[int, Tally]:
        return {step: self.tallies[policy, step] for p, step in sorted(self.tallies) if p == policy}

    def total(self, policy: str, step: int | None = None) -> Tally:
        whole = Tally()
        for number, tally in self.steps(policy).items():
            if step in (None, number):
                whole.add(tally)
        return whole

    def played(self, policy: str, step: int | None = None) -> list[Played]:
        """The sequences with a decided fate, of task groups issued in one step, or in all."""
        return [one for one in self.decided[policy] if step in (None, one.step)]

    @property
    def failed_checks(self) -> list[Check]:
        return [check for check in self.checks if not check.holds]


class _Spoken(NamedTuple):
    """One sequence and its fate."""

    policy: str
    slot: int
    num_tokens: int  # that the policy wrote
    fate: Fate
    use: Entry | None  # the batch that has trained it, or will


def read_fates(run_dir: Path) -> Fates:
    """Raises ``ConfigError`` when the directory has no journal."""
    with closing(RunModel(run_dir)) as model:
        model.read()
        return count_fates(model)


def count_fates(model: RunModel) -> Fates:
    """The fates of all task groups that were issued for training. Loads the trajectories of those without a verdict: they
    were incomplete at the end."""
    found = Fates(num_updates_skipped=model.updates_skipped)
    is_finished = model.is_finished
    counted: Counter[tuple[str, int]] = Counter()  # (policy, training step) -> trained tokens of its sequences
    groups = [group for group in model.groups.values() if group.purpose == Purpose.TRAIN and group.num_slots]
    for group in groups:
        _count_group(found, counted, group, list(_sequences(found, model, group, is_finished)))
    found.num_passed_over = model.num_positions - len(groups)
    found.num_unreadable += model.num_unreadable
    found.checks = list(_checks(found, model, counted))
    return found


_TIMED_OUT = (RolloutTimeoutError.reason, DeadlineError.reason)  # the policy, or the service it waited for, was slow
CANCELLED = (ClosedReason.STEPS_DONE, ClosedReason.RUN_ENDED)


def _sequences(found: Fates, model: RunModel, group: GroupFacts, is_finished: bool) -> Iterator[_Spoken]:
    """The sequences of all policies, with their fates."""
    used: dict[tuple[int, int], Entry] = {}  # by slot, and position in its trajectory
    for entry in group.entries:
        if not entry.replayed:
            used.setdefault((entry.slot, entry.position), entry)
    if not group.judged_at:
        whole = len(group.slots) >= group.num_slots
        fate = Fate.UNKNOWN if whole or group.closed_reason else Fate.SIBLINGS
        if group.closed_reason in CANCELLED:
            fate = Fate.CANCELLED
        for slot, resolved in sorted(group.slots.items()):
            if resolved.failure or resolved.row is None:
                continue
            record = model.load(resolved.row)
            found.num_unreadable += record is None
            for position, spoken in enumerate(entries.from_json(Trajectory, record).sequences if record else ()):
                use = used.get((slot, position))
                yield _Spoken(spoken.policy, slot, spoken.num_trained_tokens, fate, use)
    for verdict in group.verdicts:
        # An advantage group leaves the buffer as a whole: sequences missing from its batch had become too old.
        left = group.closed_reason or any((m.index, m.position) in used for m in verdict.members)
        for member in verdict.members:
            use = used.get((member.index, member.position))
            if use is not None and member.num_tokens and use.num_masked_tokens >= member.num_tokens:
                fate = Fate.MASKED
            elif use is not None:
                trained = use.use.training_step <= model.newest.get(verdict.policy, -1)
                fate = Fate.TRAINED if trained else Fate.IN_TRAINING
            elif member.fate is GroupFate.EXPIRED or (member.fate is GroupFate.KEPT and left):
                fate = Fate.TOO_OLD
            elif member.fate is not GroupFate.KEPT:
                fate = Fate(member.fate.value)
            else:
                fate = Fate.LEFT_OVER if is_finished else Fate.BUFFERED
            yield _Spoken(verdict.policy, member.index, member.num_tokens, fate, use)


def _of_rollout(group: GroupFacts, slot: int, of_sequences: list[Fate]) -> Fate:
    """The fate of a slot's rollout for one policy; ``of_sequences``: the fates of that policy's sequences in it."""
    resolved = group.slots.get(slot)
    if resolved is not None and (reason := resolved.failure):
        if reason == records.TOO_OLD:
            return Fate.STOPPED
        return Fate.TIMED_OUT if reason in _TIMED_OUT else Fate.FAILED
    if of_sequences or resolved or group.judged_at:
        return of_the_whole(of_sequences)
    if group.closed_reason:
        return Fate.CANCELLED if group.closed_reason in CANCELLED else Fate.UNKNOWN
    return Fate.PLAYING


def _count_group(found: Fates, counted: Counter[tuple[str, int]], group: GroupFacts, sequences: list[_Spoken]) -> None:
    for policy, step in group.steps.items():
        tally = found.tallies[policy, step]
        of_slots: dict[int, list[Fate]] = defaultdict(list)
        for _, slot, num_tokens, fate, use in (one for one in sequences if one.policy == policy):
            of_slots[slot].append(fate)
            masked = use.num_masked_tokens if use else 0
            rest = num_tokens - masked
            tally.sequences[fate] += 1
            tally.tokens[fate] += num_tokens if fate is Fate.MASKED else rest
            if masked and fate is not Fate.MASKED:
                tally.tokens[Fate.MASKED] += masked
            if use:
                counted[policy, use.use.training_step] += rest
            if not fate.in_flight and fate is not Fate.UNKNOWN:
                found.decided[policy].append(Played(step, fate, num_tokens, rest if fate is Fate.TRAINED else 0))
        tally.sampled_sequences += (
            sum(verdict.num_sequences for verdict in group.verdicts if verdict.policy == policy)
            if group.judged_at
            else sum(map(len, of_slots.values()))
        )
        of_rollouts = [_of_rollout(group, slot, of_slots[slot]) for slot in range(group.num_slots)]
        tally.rollouts.update(of_rollouts)
        tally.failures.update(slot.failure for slot in group.slots.values() if slot.failure)
        tally.groups[of_the_whole(of_rollouts)] += 1


def _checks(found: Fates, model: RunModel, counted: Counter[tuple[str, int]]) -> Iterator[Check]:
    for policy in found.policies:
        total = found.total(policy)
        yield Check(f"sequences of {policy} sampled = their fates", total.sampled_sequences, total.sequences.total())
        used = sum(total.sequences[fate] for fate in (Fate.TRAINED, Fate.IN_TRAINING, Fate.MASKED))
        yield Check(f"fresh sequences in batches of {policy} = those of its rollouts", model.num_fresh[policy], used)
        in_batches = {key: tokens for key, tokens in model.batch_tokens.items() if key[0] == policy}
        yield Check(
            f"trained tokens in batches of {policy} = those of its sequences",
            sum(in_batches.values()),
            sum(counted[key] for key in in_batches),
        )
    yield Check("records of slots that had one already = 0", 0, model.num_repeated)


# --- on a terminal, and for machines


def show(found: Fates, console: Console, *, policies: Iterable[str], step: int | None, last: int) -> None:
    """Print the fates of a run, or of the task groups issued in one step; the table of steps has the ``last`` ones."""
    for number, policy in enumerate(policies):
        if number:
            console.print()
        total = found.total(policy, step)
        console.print(_fates_table(total, policy if step is None else f"{policy}, issued in step {step}"))
        for reason, count in total.failures.most_common():
            say(console, f"  {count:,} rollouts ended in a failure: {reason}", wrap=True)
        _show_lengths(found.played(policy, step), console)
        if unfinished := sum(total.rollouts[fate] for fate in _UNFINISHED):
            say(console, f"{unfinished:,} rollouts were not played to their end and have no length", wrap=True)
        if step is None:
            _show_steps(found.steps(policy), console, last)
        if skipped := found.num_updates_skipped[policy]:
            told = f"{skipped:,} optimizer updates were skipped: the sequences of their minibatches had no effect"
            console.print(told, style="yellow")
    if found.num_passed_over:
        console.print(f"{found.num_passed_over:,} prompts were passed over by data.curation and never issued")
    if found.num_unreadable:
        console.print(f"{found.num_unreadable:,} records of the journal cannot be read", style="bold red")
    console.print()
    if broken := found.failed_checks:
        console.print("this does NOT add up:", style="bold red")
        for check in broken:
            say(console, f"  {check.what}: {check.expected:,} against {check.found:,}", "red")
        return
    told = (
        f"it adds up ({len(found.checks)} sums): what was sampled is the sum of its fates, and batches hold what these"
    )
    say(console, f"{told} rollouts brought", "dim", wrap=True)


def _fates_table(total: Tally, title: str) -> FittingTable:
    names = columns(">task groups:1 | >rollouts | >sequences:2 | >tokens | >of tokens | >mean length:3")
    table = FittingTable([Column(title), *names], box=None)
    tokens = total.tokens.total()
    table.add_row("issued", f"{total.groups.total():,}", f"{total.rollouts.total():,}", "", "", "", "")
    for fate in total.fates():
        style = "green" if fate is Fate.TRAINED else "dim" if fate.in_flight else "yellow"
        table.add_row(
            Text(fate.label, style=style),
            *(_count(of_unit[fate]) for of_unit in (total.groups, total.rollouts, total.sequences, total.tokens)),
            _percent(total.tokens[fate], tokens) if fate not in _WITHOUT_TOKENS else "",
            _mean(total.tokens[fate], total.sequences[fate]),
        )
    sampled = total.sampled_sequences
    table.add_row("sampled", "", "", f"{sampled:,}", f"{tokens:,}", "", _mean(tokens, sampled))
    return table


def _show_lengths(played: list[Played], console: Console) -> None:
    if not played:
        return
    found = bands(played)
    others = [fate for fate in Fate if fate is not Fate.TRAINED and any(band["fates"][fate] for band in found)]
    of_fates = (Column(fate.label, "right", number + 1) for number, fate in enumerate(others))
    table = FittingTable([*columns("length | >tokens | >sequences | >trained"), *of_fates], box=None)
    for band in found:
        shortest, longest, number = band["shortest"], band["longest"], band["sequences"]
        table.add_row(
            band["quantiles"],
            f"{shortest:,}" if shortest == longest else f"{shortest:,} to {longest:,}",
            f"{number:,}",
            f"{band['trained_share']:.1%}",
            *(_percent(band["fates"][fate], number) for fate in others),
        )
    console.print()
    console.print(table)
    if means := mean_lengths(played):
        trained, whole = means
        told = f"length bias {trained / whole:.3f}: mean length trained {trained:,.1f}, played {whole:,.1f} tokens"
        say(console, told, wrap=True)


def _show_steps(steps: dict[int, Tally], console: Console, last: int) -> None:
    shown = dict(list(steps.items())[-last:])
    written = [f for f in Fate if f not in _WITHOUT_TOKENS and any(t.tokens[f] for t in shown.values())]
    fates = [fate for fate in written if not fate.in_flight]
    unfinished = [fate for fate in _UNFINISHED if any(tally.rollouts[fate] for tally in shown.values())]
    table = FittingTable(
        [
            *columns(">issued in step | >rollouts:1 | >tokens"),
            *(Column(fate.label, "right", 0 if fate is Fate.TRAINED else 2) for fate in fates),
            *columns(">in flight"),
            *(Column(f"{fate.label} (rollouts)", "right", 3) for fate in unfinished),
        ],
        box=None,
    )
    for step, tally in shown.items():
        tokens = tally.tokens.total()
        table.add_row(
            *(str(step), f"{tally.rollouts.total():,}", f"{tokens:,}"),
            *(_percent(tally.tokens[fate], tokens) for fate in fates),
            _percent(sum(count for fate, count in tally.tokens.items() if fate.in_flight), tokens),
            *(_count(tally.rollouts[fate]) for fate in unfinished),
        )
    console.print()
    console.print(table)
    if len(shown) < len(steps):
        console.print(f"the last {len(shown)} of {len(steps)} steps: --last shows more", style="dim")


def _count(number: int) -> str:
    return f"{number:,}" if number else ""


def _percent(part: int, whole: int) -> str:
    if not part or not whole:
        return ""
    return f"{part / whole:.1%}" if part / whole >= 0.0005 else "<0.1%"


def _mean(whole: int, number: int) -> str:
    return f"{whole / number:,.1f}" if number else ""


def as_json(found: Fates, policies: Iterable[str], step: int | None) -> Json:
    """Every number of the tables. Keys of ``fates`` are those of ``Fate``."""
    return {
        "policies": {policy: _policy_json(found, policy, step) for policy in policies},
        "prompts_passed_over": found.num_passed_over,
        "records_unreadable": found.num_unreadable,
        "adds_up": not found.failed_checks,
        "checks": [{**check._asdict(), "holds": check.holds} for check in found.checks],
    }


def _policy_json(found: Fates, policy: str, step: int | None) -> Json:
    played = found.played(policy, step)
    trained, whole = mean_lengths(played) or (None, None)
    steps = {number: tally for number, tally in found.steps(policy).items() if step in (None, number)}
    return {
        "total": _tally_json(found.total(policy, step)),
        "steps": [{"step": number, **_tally_json(tally)} for number, tally in steps.items()],
        "updates_skipped": found.num_updates_skipped[policy],
        "lengths": bands(played),
        "length_bias": trained / whole if trained is not None and whole else None,
        "mean_length_trained": trained,
        "mean_length_played": whole,
    }


def _tally_json(tally: Tally) -> Json:
    units = {
        "task_groups": tally.groups,
        "rollouts": tally.rollouts,
        "sequences": tally.sequences,
        "tokens": tally.tokens,
    }
    return {
        "issued": {unit: units[unit].total() for unit in ("task_groups", "rollouts")},
        "sampled": {"sequences": tally.sampled_sequences, "tokens": tally.tokens.total()},
        "fates": {fate.value: {unit: count[fate] for unit, count in units.items()} for fate in tally.fates()},
        "failures": dict(tally.failures),
    }


def tell_fates(
    run_dir: Path, console: Console, *, policy: str | None, step: int | None, last: int, as_object: bool
) -> None:
    """Raises ``ConfigError``: no journal, or a policy or step without issued task groups."""
    found = read_fates(run_dir)
    policies = [name for name in found.policies if policy in (None, name)]
    if policy is not None and not policies:
        known = ", ".join(found.policies) or "none"
        raise ConfigError(f"no task group was issued for a policy {policy!r}; the run has {known}")
    if step is not None:
        policies = [name for name in policies if step in found.steps(name)]
        if not policies:
            steps = sorted({number for _, number in found.tallies})
            told = f"steps {steps[0]} to {steps[-1]}" if steps else "no step at all"
            raise ConfigError(f"no task group was issued in step {step}: this run issued task groups in {told}")
    if as_object:
        typer.echo(json.dumps(as_json(found, policies, step)))
    elif policies:
        show(found, console, policies=policies, step=step, last=last)
    else:
        console.print("no task group was issued for training yet")
