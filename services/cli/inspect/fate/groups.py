"""One task group in the journal, and the fate of each of its rollouts and sequences.

Independent of sums, and of the order in which the journal is read.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from services.cli.inspect.fate.facts import Fate, of_the_whole
from services.common.errors import DeadlineError, RolloutTimeoutError
from services.common.records import fates
from services.common.records.fates import ClosedReason, GroupFate
from services.orchestrator.journal import rollouts
from services.orchestrator.journal.records import GroupVerdict
from services.orchestrator.journal.storage.segments import Row

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
