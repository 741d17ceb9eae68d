"""``rollmill fate``: one fate for each task group, rollout, sequence and token that a run has issued, their sums and checks."""

from __future__ import annotations

import enum
import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from contextlib import closing
from dataclasses import asdict, dataclass, field
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

    @property
    def has_tokens(self) -> bool:
        """Whether the tokens of a sequence with this fate are known."""
        return self not in _WITHOUT_TOKENS


_IN_FLIGHT = frozenset({Fate.IN_TRAINING, Fate.BUFFERED, Fate.SIBLINGS, Fate.PLAYING})
_DROPPED = frozenset({Fate.TOO_OLD, Fate.SURPLUS, Fate.TRUNCATED, Fate.RESAMPLED_AWAY, Fate.EQUAL_REWARDS})
_WITHOUT_TOKENS = frozenset({Fate.PLAYING, Fate.STOPPED, Fate.TIMED_OUT, Fate.FAILED, Fate.EMPTY})
_ORDER = {fate: number for number, fate in enumerate(Fate)}


def of_the_whole(parts: Iterable[Fate]) -> Fate:
    """The fate of a whole, from the fates of its parts.

    >>> of_the_whole([Fate.FAILED, Fate.TRAINED])
    <Fate.TRAINED: 'trained'>
    """
    return min(parts, key=_ORDER.__getitem__, default=Fate.EMPTY)


@dataclass(slots=True)
class Tally:
    """One policy's task groups that were issued in one training step (or in several, added up)."""

    issued_groups: int = 0
    issued_rollouts: int = 0
    sampled_sequences: int = 0  # as the verdicts count them; of task groups without one, as the trajectories do
    groups: Counter[Fate] = field(default_factory=Counter)
    rollouts: Counter[Fate] = field(default_factory=Counter)
    sequences: Counter[Fate] = field(default_factory=Counter)
    tokens: Counter[Fate] = field(default_factory=Counter)  # that the policy wrote
    failures: Counter[str] = field(default_factory=Counter)  # by reason, as the records say it

    @property
    def sampled_tokens(self) -> int:
        return self.tokens.total()

    def add(self, other: Tally) -> None:
        self.issued_groups += other.issued_groups
        self.issued_rollouts += other.issued_rollouts
        self.sampled_sequences += other.sampled_sequences
        for name in ("groups", "rollouts", "sequences", "tokens", "failures"):
            getattr(self, name).update(getattr(other, name))

    def fates(self) -> list[Fate]:
        """Those that occur, in order."""
        return [f for f in Fate if self.groups[f] or self.rollouts[f] or self.sequences[f] or self.tokens[f]]


@dataclass(frozen=True, slots=True)
class Check:
    """One sum that must come out."""

    what: str
    expected: int
    found: int

    @property
    def holds(self) -> bool:
        return self.expected == self.found


Place = tuple[int, int]  # slot of a rollout, position in its trajectory

_OF_VERDICT = {
    fate: Fate.TOO_OLD if fate is GroupFate.EXPIRED else Fate(fate.value)
    for fate in GroupFate
    if fate is not GroupFate.KEPT
}
_TIMED_OUT = (
    RolloutTimeoutError.reason,
    DeadlineError.reason,
)  # the policy, or the service it waited for, was too slow
CANCELLED = (ClosedReason.STEPS_DONE, ClosedReason.RUN_ENDED)


class Sequence(NamedTuple):
    """One sequence and its fate."""

    policy: str
    slot: int
    num_tokens: int  # that the policy wrote
    fate: Fate
    use: Entry | None  # the batch that has trained it, or will


QUANTILES = (0.5, 0.9, 0.99, 1.0)
NAMES = ("p0-50", "p50-90", "p90-99", ">p99")


class Played(NamedTuple):
    """A sequence with a decided fate."""

    step: int  # in which its task group was issued
    fate: Fate
    length: int  # tokens
    trained: int  # tokens, without the masked ones


class Lengths(list[Played]):
    """The sequences of one policy with a decided fate."""

    def bands(self, step: int | None = None) -> list[Json]:
        """Sequences of one quarter of the lengths, from a quantile to the next, of task groups issued in one step, or in all;
        shortest first. Bands that ties leave empty are not there."""
        chosen = [played for played in self if step in (None, played.step)]
        if not chosen:
            return []
        lengths = [played.length for played in chosen]
        places = np.searchsorted(
            np.quantile(lengths, QUANTILES), lengths, side="left"
        )  # a length at a limit is below it
        found = []
        for number, name in enumerate(NAMES):
            part = [played for played, place in zip(chosen, places, strict=True) if place == number]
            fates, of_part = Counter(played.fate for played in part), [played.length for played in part]
            if part:
                found.append(
                    {
                        "quantiles": name, "shortest": min(of_part), "longest": max(of_part), "sequences": len(part),
                        "tokens": sum(of_part), "tokens_trained": sum(played.trained for played in part),
                        "trained_share": fates[Fate.TRAINED] / len(part), "fates": fates,
                    }
                )  # fmt: skip
        return found

    def means(self, step: int | None = None) -> tuple[float, float] | None:
        """(of the sequences that were trained, of all that were played), in tokens; None where none was trained."""
        chosen = [played for played in self if step in (None, played.step)]
        trained = [played.length for played in chosen if played.fate is Fate.TRAINED]
        return (fmean(trained), fmean(played.length for played in chosen)) if trained else None


@dataclass(slots=True)
class Fates:
    """Sums of a run. A step is the training step that a policy was at when the task group was issued."""

    tallies: dict[tuple[str, int], Tally] = field(default_factory=lambda: defaultdict(Tally))
    lengths: dict[str, Lengths] = field(default_factory=lambda: defaultdict(Lengths))
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
            if step is None or number == step:
                whole.add(tally)
        return whole

    @property
    def failed_checks(self) -> list[Check]:
        return [check for check in self.checks if not check.holds]


def read_fates(run_dir: Path) -> Fates:
    """Raises ``ConfigError`` when the directory has no journal."""
    with closing(RunModel(run_dir)) as model:
        model.read()
        return count_fates(model)


def count_fates(model: RunModel) -> Fates:
    """The fates of all task groups that were issued for training. Loads the trajectories of those without a verdict: they
    were incomplete at the end."""
    found = Fates()
    is_finished = model.is_finished
    counted: Counter[tuple[str, int]] = Counter()  # (policy, training step) -> trained tokens of its sequences
    groups = [group for group in model.groups.values() if group.purpose == Purpose.TRAIN and group.num_slots]
    for group in groups:
        _count_group(found, counted, group, list(_sequences(found, model, group, is_finished)))
    found.num_passed_over = model.num_positions - len(groups)
    found.num_updates_skipped = model.updates_skipped
    found.num_unreadable += model.num_unreadable
    found.checks = list(_checks(found, model, counted))
    return found


def _sequences(found: Fates, model: RunModel, group: GroupFacts, is_finished: bool) -> Iterator[Sequence]:
    """The sequences of all policies, with their fates."""
    used: dict[Place, Entry] = {}
    for entry in group.entries:
        if not entry.replayed:
            used.setdefault((entry.slot, entry.position), entry)
    if not group.judged_at:
        whole = len(group.rows) >= group.num_slots
        fate = Fate.UNKNOWN if whole or group.closed_reason else Fate.SIBLINGS
        if group.closed_reason in CANCELLED:
            fate = Fate.CANCELLED
        for slot, row in sorted(group.rows.items()):
            if slot in group.failures:
                continue
            record = model.load(row)
            found.num_unreadable += record is None
            for position, spoken in enumerate(entries.from_json(Trajectory, record).sequences if record else ()):
                use = used.get((slot, position))
                yield Sequence(spoken.policy, slot, spoken.num_trained_tokens, fate, use)
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
            elif member.fate is not GroupFate.KEPT:
                fate = _OF_VERDICT[member.fate]
            elif left:
                fate = Fate.TOO_OLD
            else:
                fate = Fate.LEFT_OVER if is_finished else Fate.BUFFERED
            yield Sequence(verdict.policy, member.index, member.num_tokens, fate, use)


def _of_rollout(group: GroupFacts, slot: int, of_sequences: list[Fate]) -> Fate:
    """The fate of a slot's rollout for one policy; ``of_sequences``: the fates of that policy's sequences in it."""
    if slot in group.failures:
        reason = group.failures[slot]
        if reason == records.TOO_OLD:
            return Fate.STOPPED
        return Fate.TIMED_OUT if reason in _TIMED_OUT else Fate.FAILED
    if of_sequences:
        return of_the_whole(of_sequences)
    if slot in group.rows or group.judged_at:
        return Fate.EMPTY
    if group.closed_reason:
        return Fate.CANCELLED if group.closed_reason in CANCELLED else Fate.UNKNOWN
    return Fate.PLAYING


def _count_group(found: Fates, counted: Counter[tuple[str, int]], group: GroupFacts, sequences: list[Sequence]) -> None:
    for policy, step in group.steps.items():
        tally = found.tallies[policy, step]
        tally.issued_groups += 1
        tally.issued_rollouts += group.num_slots
        of_slots: dict[int, list[Fate]] = defaultdict(list)
        for sequence in sequences:
            if sequence.policy != policy:
                continue
            fate = sequence.fate
            of_slots[sequence.slot].append(fate)
            tally.sequences[fate] += 1
            masked = sequence.use.num_masked_tokens if sequence.use else 0
            rest = sequence.num_tokens - masked
            tally.tokens[fate] += sequence.num_tokens if fate is Fate.MASKED else rest
            if masked and fate is not Fate.MASKED:
                tally.tokens[Fate.MASKED] += masked
            if sequence.use:
                counted[policy, sequence.use.use.training_step] += rest
            if not fate.in_flight and fate is not Fate.UNKNOWN:
                trained = rest if fate is Fate.TRAINED else 0
                found.lengths[policy].append(Played(step, fate, sequence.num_tokens, trained))
        of_rollouts = [_of_rollout(group, slot, of_slots[slot]) for slot in range(group.num_slots)]
        tally.rollouts.update(of_rollouts)
        tally.failures.update(group.failures.values())
        tally.groups[of_the_whole(of_rollouts)] += 1
        tally.sampled_sequences += (
            sum(verdict.num_sequences for verdict in group.verdicts if verdict.policy == policy)
            if group.judged_at
            else sum(map(len, of_slots.values()))
        )


def _checks(found: Fates, model: RunModel, counted: Counter[tuple[str, int]]) -> Iterator[Check]:
    for policy in found.policies:
        total = found.total(policy)
        yield Check(f"task groups of {policy} issued = their fates", total.issued_groups, total.groups.total())
        yield Check(f"rollouts of {policy} issued = their fates", total.issued_rollouts, total.rollouts.total())
        sampled = total.sampled_sequences
        yield Check(f"sequences of {policy} sampled = their fates", sampled, total.sequences.total())
        used = sum(total.sequences[fate] for fate in (Fate.TRAINED, Fate.IN_TRAINING, Fate.MASKED))
        yield Check(f"fresh sequences in batches of {policy} = those of its rollouts", model.num_fresh[policy], used)
        in_batches = {key: tokens for key, tokens in model.batch_tokens.items() if key[0] == policy}
        from_rollouts = sum(counted[key] for key in in_batches)
        yield Check(
            f"trained tokens in batches of {policy} = those of its sequences", sum(in_batches.values()), from_rollouts
        )
    yield Check("records of slots that had one already = 0", 0, model.num_repeated)


_UNFINISHED = (Fate.STOPPED, Fate.TIMED_OUT, Fate.FAILED, Fate.CANCELLED)


def show(found: Fates, console: Console, *, policies: Iterable[str], step: int | None, last: int) -> None:
    """Print the fates of a run, or of the task groups issued in one step; the table of steps has the ``last`` ones."""
    for number, policy in enumerate(policies):
        if number:
            console.print()
        total = found.total(policy, step)
        when = "" if step is None else f", issued in step {step}"
        console.print(_fates_table(total, f"{policy}{when}"))
        for reason, count in total.failures.most_common():
            say(console, f"  {count:,} rollouts ended in a failure: {reason}", wrap=True)
        _show_lengths(found, console, policy, step, total)
        if step is None:
            _show_steps(found, console, policy, last)
        if skipped := found.num_updates_skipped[policy]:
            console.print(
                f"{skipped:,} optimizer updates were skipped: the sequences of their minibatches had no effect",
                style="yellow",
            )
    if found.num_passed_over:
        console.print(f"{found.num_passed_over:,} prompts were passed over by data.curation and never issued")
    if found.num_unreadable:
        console.print(f"{found.num_unreadable:,} records of the journal cannot be read", style="bold red")
    _show_checks(found.checks, console)


def _fates_table(total: Tally, title: str) -> FittingTable:
    table = FittingTable(
        [Column(title), *columns(">task groups:1 | >rollouts | >sequences:2 | >tokens | >of tokens | >mean length:3")],
        box=None,
    )
    tokens = total.sampled_tokens
    table.add_row("issued", f"{total.issued_groups:,}", f"{total.issued_rollouts:,}", "", "", "", "")
    for fate in total.fates():
        table.add_row(
            Text(fate.label, style=_style(fate)),
            _count(total.groups[fate]),
            _count(total.rollouts[fate]),
            _count(total.sequences[fate]),
            _count(total.tokens[fate]),
            _percent(total.tokens[fate], tokens) if fate.has_tokens else "",
            f"{total.tokens[fate] / total.sequences[fate]:,.1f}" if total.sequences[fate] else "",
        )
    mean = f"{tokens / total.sampled_sequences:,.1f}" if total.sampled_sequences else ""
    table.add_row("sampled", "", "", f"{total.sampled_sequences:,}", f"{tokens:,}", "", mean)
    return table


def _style(fate: Fate) -> str:
    if fate is Fate.TRAINED:
        return "green"
    return "dim" if fate.in_flight else "yellow"


def _show_lengths(found: Fates, console: Console, policy: str, step: int | None, total: Tally) -> None:
    bands = found.lengths[policy].bands(step)
    if not bands:
        return
    others = [fate for fate in Fate if fate is not Fate.TRAINED and any(band["fates"][fate] for band in bands)]
    table = FittingTable(
        [
            *columns("length | >tokens | >sequences | >trained"),
            *(Column(fate.label, "right", number + 1) for number, fate in enumerate(others)),
        ],
        box=None,
    )
    for band in bands:
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
    if means := found.lengths[policy].means(step):
        trained, played = means
        say(
            console,
            f"length bias {trained / played:.3f}: mean length trained {trained:,.1f}, played {played:,.1f} tokens",
            wrap=True,
        )
    if unfinished := sum(total.rollouts[fate] for fate in _UNFINISHED):
        say(console, f"{unfinished:,} rollouts were not played to their end and have no length", wrap=True)


def _show_steps(found: Fates, console: Console, policy: str, last: int) -> None:
    steps = found.steps(policy)
    shown = dict(list(steps.items())[-last:])
    fates = [f for f in Fate if f.has_tokens and not f.in_flight and any(t.tokens[f] for t in shown.values())]
    unfinished = [f for f in _UNFINISHED if any(t.rollouts[f] for t in shown.values())]
    table = FittingTable(
        [
            *columns(">issued in step | >rollouts:1 | >tokens"),
            *(Column(f.label, "right", 0 if f is Fate.TRAINED else 2) for f in fates),
            *columns(">in flight"),
            *(Column(f"{f.label} (rollouts)", "right", 3) for f in unfinished),
        ],
        box=None,
    )
    for step, tally in shown.items():
        tokens = tally.sampled_tokens
        flying = sum(count for fate, count in tally.tokens.items() if fate.in_flight)
        table.add_row(
            str(step),
            f"{tally.issued_rollouts:,}",
            f"{tokens:,}",
            *(_percent(tally.tokens[fate], tokens) for fate in fates),
            _percent(flying, tokens),
            *(_count(tally.rollouts[fate]) for fate in unfinished),
        )
    console.print()
    console.print(table)
    if len(shown) < len(steps):
        console.print(f"the last {len(shown)} of {len(steps)} steps: --last shows more", style="dim")


def _show_checks(checks: list[Check], console: Console) -> None:
    console.print()
    if broken := [check for check in checks if not check.holds]:
        console.print("this does NOT add up:", style="bold red")
        for check in broken:
            say(console, f"  {check.what}: {check.expected:,} against {check.found:,}", "red")
    else:
        say(
            console,
            f"it adds up ({len(checks)} sums): what was issued and sampled is the sum of its fates, and batches hold what "
            "these rollouts brought",
            "dim",
            wrap=True,
        )


def _count(number: int) -> str:
    return f"{number:,}" if number else ""


def _percent(part: int, whole: int) -> str:
    if not part or not whole:
        return ""
    return f"{part / whole:.1%}" if part / whole >= 0.0005 else "<0.1%"


# --- for machines -----------------------------------------------------------------------------------------------------


def as_json(found: Fates, policies: Iterable[str], step: int | None) -> Json:
    """Every number of the tables. Keys of ``fates`` are those of ``Fate``."""
    chosen = list(policies)
    return {
        "policies": {policy: _policy_json(found, policy, step) for policy in chosen},
        "prompts_passed_over": found.num_passed_over,
        "records_unreadable": found.num_unreadable,
        "adds_up": not found.failed_checks,
        "checks": [{**asdict(check), "holds": check.holds} for check in found.checks],
    }


def _policy_json(found: Fates, policy: str, step: int | None) -> Json:
    means = found.lengths[policy].means(step)
    return {
        "total": _tally_json(found.total(policy, step)),
        "steps": [
            {"step": number, **_tally_json(tally)}
            for number, tally in found.steps(policy).items()
            if step is None or number == step
        ],
        "updates_skipped": found.num_updates_skipped[policy],
        "lengths": found.lengths[policy].bands(step),
        "length_bias": means[0] / means[1] if means else None,
        "mean_length_trained": means[0] if means else None,
        "mean_length_played": means[1] if means else None,
    }


_UNITS = ("rollouts", "sequences", "tokens")


def _tally_json(tally: Tally) -> Json:
    return {
        "issued": {"task_groups": tally.issued_groups, "rollouts": tally.issued_rollouts},
        "sampled": {"sequences": tally.sampled_sequences, "tokens": tally.sampled_tokens},
        "fates": {
            fate.value: {"task_groups": tally.groups[fate], **{u: getattr(tally, u)[fate] for u in _UNITS}}
            for fate in tally.fates()
        },
        "failures": dict(tally.failures),
    }


def tell_fates(
    run_dir: Path, console: Console, *, policy: str | None, step: int | None, last: int, as_object: bool
) -> None:
    """Raises ``ConfigError``: no journal, or a policy or step without issued task groups."""
    found = read_fates(run_dir)
    if policy is not None and policy not in found.policies:
        raise ConfigError(
            f"no task group was issued for a policy {policy!r}; the run has {', '.join(found.policies) or 'none'}"
        )
    policies = found.policies if policy is None else [policy]
    if step is not None:
        policies = [name for name in policies if step in found.steps(name)]
        if not policies:
            known = sorted({number for name in found.policies for number in found.steps(name)})
            told = f"steps {known[0]} to {known[-1]}" if known else "no step at all"
            raise ConfigError(f"no task group was issued in step {step}: this run issued task groups in {told}")
    if as_object:
        typer.echo(json.dumps(as_json(found, policies, step)))
    elif policies:
        show(found, console, policies=policies, step=step, last=last)
    else:
        console.print("no task group was issued for training yet")
