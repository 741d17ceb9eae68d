"""The fates of rollouts and sequences, and how they are counted."""

from __future__ import annotations

import enum
from array import array
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from services.common.errors import DeadlineError, RolloutTimeoutError
from services.common.records import fates
from services.common.records.fates import ClosedReason, GroupFate
from services.orchestrator.journal import rollouts
from services.orchestrator.journal.records import GroupVerdict
from services.orchestrator.journal.segments import Row


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
        for own, more in (
            (self.groups, other.groups),
            (self.rollouts, other.rollouts),
            (self.sequences, other.sequences),
            (self.tokens, other.tokens),
        ):
            own.update(more)
        self.failures.update(other.failures)

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


@dataclass(slots=True)
class Group:
    """An open task group: records may still arrive."""

    steps: dict[str, int]  # by policy
    num_slots: int
    trajectories: dict[int, Row] = field(default_factory=dict)
    failures: dict[int, str] = field(default_factory=dict)  # reasons
    verdicts: list[GroupVerdict] | None = None
    used: dict[Place, tuple[int, int]] = field(default_factory=dict)  # training step, masked tokens
    closed: str = ""

    @property
    def complete(self) -> bool:
        # Trajectories of old task groups may have been collected; groups with a verdict were complete.
        return self.verdicts is not None or len(self.trajectories.keys() | self.failures.keys()) >= self.num_slots


@dataclass(slots=True)
class Sequence:
    """The facts of one sequence."""

    policy: str
    num_tokens: int  # that the policy wrote
    fate: Fate


class Decider:
    """Which fate a rollout and its sequences have, by all that the journal says of their task group."""

    def __init__(self, load: Callable[[Row], dict[str, Any] | None]) -> None:
        """``load`` reads a record; None for one that cannot be read."""
        self._load = load
        self.newest: dict[str, int] = {}  # version of each policy at the end of the journal
        self.is_finished = False  # the run

    def rollout(self, group: Group, slot: int, of_sequences: list[Fate] | None) -> Fate:
        """The fate of a slot's rollout for one policy; ``of_sequences``: the fates of that policy's sequences in it."""
        if slot in group.failures:
            reason = group.failures[slot]
            if reason == fates.TOO_OLD:
                return Fate.STOPPED
            return Fate.TIMED_OUT if reason in _TIMED_OUT else Fate.FAILED
        if of_sequences:
            return of_the_whole(of_sequences)
        if slot in group.trajectories or group.verdicts is not None:
            return Fate.EMPTY
        if group.closed:
            return Fate.CANCELLED if group.closed in CANCELLED else Fate.UNKNOWN
        return Fate.PLAYING

    def sequences(self, group: Group) -> dict[Place, Sequence]:
        """Sequences of all policies, by slot and position."""
        if group.verdicts is None:
            return self._unjudged_sequences(group)
        found: dict[Place, Sequence] = {}
        for verdict in group.verdicts:
            used = any((m.index, m.position) in group.used for m in verdict.members)
            for member in verdict.members:
                place = (member.index, member.position)
                fate = self._fate(group, verdict.policy, member.fate, group.used.get(place), used, member.num_tokens)
                found[place] = Sequence(verdict.policy, member.num_tokens, fate)
        return found

    def _unjudged_sequences(self, group: Group) -> dict[Place, Sequence]:
        """Sequences of a task group without a verdict, from its trajectories."""
        found: dict[Place, Sequence] = {}
        for slot, row in sorted(group.trajectories.items()):
            record = self._load(row)
            sequences = () if record is None else rollouts.trajectory_from_json(record).sequences
            for position, sequence in enumerate(sequences):
                fate = self._unjudged(group)
                found[slot, position] = Sequence(sequence.policy, sequence.num_trained_tokens, fate)
        return found

    def _unjudged(self, group: Group) -> Fate:
        if group.closed in CANCELLED:
            return Fate.CANCELLED
        return Fate.UNKNOWN if group.complete or group.closed else Fate.SIBLINGS

    def _fate(
        self,
        group: Group,
        policy: str,
        judged: GroupFate,
        use: tuple[int, int] | None,
        sibling_used: bool,
        num_tokens: int,
    ) -> Fate:
        """The fate of a sequence with a verdict on its advantage group; ``use``: (training step, masked tokens) of its
        batch."""
        if use is not None:
            training_step, masked = use
            if num_tokens and masked >= num_tokens:
                return Fate.MASKED
            return Fate.TRAINED if training_step <= self.newest.get(policy, -1) else Fate.IN_TRAINING
        if judged is not GroupFate.KEPT:
            return _OF_VERDICT[judged]
        # An advantage group leaves the buffer as a whole: sequences missing from its batch had become too old.
        if sibling_used or group.closed:
            return Fate.TOO_OLD
        return Fate.LEFT_OVER if self.is_finished else Fate.BUFFERED


QUANTILES = (0.0, 0.5, 0.9, 0.99, 1.0)
NAMES = ("p0-50", "p50-90", "p90-99", ">p99")
_FATES = tuple(Fate)
_CODES = {fate: code for code, fate in enumerate(_FATES)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Band:
    """Sequences of one quarter of the lengths, from a quantile to the next."""

    name: str
    shortest: int  # tokens
    longest: int
    num_sequences: int
    num_tokens: int
    fates: Counter[Fate]  # sequences
    num_trained_tokens: int

    @property
    def trained_share(self) -> float:
        """Of the sequences."""
        return self.fates[Fate.TRAINED] / self.num_sequences


@dataclass(slots=True)
class Lengths:
    """The sequences of one policy with a decided fate: 13 bytes each."""

    steps: array[int] = field(default_factory=lambda: array("I"))
    lengths: array[int] = field(default_factory=lambda: array("I"))
    trained: array[int] = field(default_factory=lambda: array("I"))  # tokens, without the masked ones
    fates: array[int] = field(default_factory=lambda: array("B"))

    def add(self, step: int, fate: Fate, length: int, trained: int) -> None:
        self.steps.append(step)
        self.lengths.append(length)
        self.trained.append(trained)
        self.fates.append(_CODES[fate])

    def bands(self, step: int | None = None) -> list[Band]:
        """Of task groups issued in one step, or in all; shortest first. Bands that ties leave empty are not there."""
        chosen, lengths, trained, fates = self._arrays(step)
        if not chosen:
            return []
        limits = np.quantile(lengths, QUANTILES[1:])
        place = np.searchsorted(limits, lengths, side="left")  # a length at a limit is below it
        found = []
        for number, name in enumerate(NAMES):
            here = place == number
            if here.any():
                found.append(
                    Band(
                        name=name,
                        shortest=int(lengths[here].min()),
                        longest=int(lengths[here].max()),
                        num_sequences=int(here.sum()),
                        num_tokens=int(lengths[here].sum()),
                        fates=Counter({_FATES[c]: int(n) for c, n in enumerate(np.bincount(fates[here])) if n}),
                        num_trained_tokens=int(trained[here].sum()),
                    )
                )
        return found

    def means(self, step: int | None = None) -> tuple[float, float] | None:
        """(of the sequences that were trained, of all that were played), in tokens; None where none was trained."""
        _, lengths, _, fates = self._arrays(step)
        was_trained = fates == _CODES[Fate.TRAINED]
        return (float(lengths[was_trained].mean()), float(lengths.mean())) if was_trained.any() else None

    def _arrays(self, step: int | None) -> tuple[int, np.ndarray, np.ndarray, np.ndarray]:
        steps = np.frombuffer(self.steps, dtype=np.uint32) if self.steps else np.zeros(0, dtype=np.uint32)
        chosen = np.ones(len(steps), dtype=bool) if step is None else steps == step
        columns = [np.array(column, dtype=np.int64)[chosen] for column in (self.lengths, self.trained, self.fates)]
        return int(chosen.sum()), columns[0], columns[1], columns[2]
