"""The fates of rollouts and sequences, and how they are counted."""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field


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
