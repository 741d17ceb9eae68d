"""One task group as the journal tells it, and what became of each of its rollouts and sequences.

Knows nothing about sums, or about the order in which the journal is read.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from services.cli.fate.facts import Fate, of_the_whole
from services.common import fates
from services.common.errors import DeadlineError, RolloutTimeoutError
from services.common.fates import ClosedReason, GroupFate
from services.orchestrator.journal.index import Row
from services.orchestrator.journal.records import MemberFate, Verdict

Place = tuple[int, int]  # slot of a rollout, position in its trajectory

_OF_VERDICT = {
    fate: Fate.TOO_OLD if fate is GroupFate.EXPIRED else Fate(fate.value)
    for fate in GroupFate
    if fate is not GroupFate.KEPT
}
_TIMED_OUT = (RolloutTimeoutError.reason, DeadlineError.reason)  # the policy, or what it waited for, was too slow
CANCELLED = (ClosedReason.STEPS_DONE, ClosedReason.RUN_ENDED)


@dataclass(slots=True)
class Group:
    """A task group of which something may still come."""

    steps: dict[str, int]  # by policy
    num_slots: int
    trajectories: dict[int, Row] = field(default_factory=dict)
    failures: dict[int, str] = field(default_factory=dict)  # reasons
    verdicts: list[Verdict] | None = None
    used: dict[Place, tuple[int, int]] = field(default_factory=dict)  # training step, masked tokens
    closed: str = ""

    @property
    def complete(self) -> bool:
        # Trajectories of old task groups may have been collected; what was judged was complete.
        return self.verdicts is not None or len(self.trajectories.keys() | self.failures.keys()) >= self.num_slots


@dataclass(slots=True)
class Sequence:
    """What is known of one sequence."""

    policy: str
    num_tokens: int | None  # that the policy wrote; None: its trajectory is gone
    fate: Fate


class Decider:
    """Which fate a rollout and its sequences have, by all that the journal says of their task group."""

    def __init__(self, load: Callable[[Row], dict[str, Any] | None]) -> None:
        """``load`` reads a record; None for one that cannot be read."""
        self._load = load
        self.newest: dict[str, int] = {}  # version of each policy at the end of the journal
        self.is_finished = False  # the run

    def rollout(self, group: Group, slot: int, of_sequences: list[Fate] | None) -> Fate:
        """Of the rollout of a slot, for one policy; ``of_sequences``: the fates of what that policy said in it."""
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
        """Of all policies, by slot and position; what was collected has places that no slot has."""
        found: dict[Place, Sequence] = {}
        for verdict in group.verdicts or ():
            used = any((m.index, m.position) in group.used for m in verdict.members)
            for member in verdict.members:
                place = (member.index, member.position)
                fate = self._fate(group, verdict.policy, member.fate, group.used.get(place), used, member.num_tokens)
                found[place] = Sequence(verdict.policy, member.num_tokens, fate)
        if group.verdicts is None or any(not v.members for v in group.verdicts):
            found |= self._without_members(group)
        return found

    def _without_members(self, group: Group) -> dict[Place, Sequence]:
        """From the trajectories: of a task group that was not judged, or of an earlier release's verdicts."""
        found: dict[Place, Sequence] = {}
        members: dict[tuple[str, str, int], list[MemberFate]] = defaultdict(list)
        for slot, row in sorted(group.trajectories.items()):
            record = self._load(row)
            for position, sequence in enumerate(record["sequences"] if record is not None else ()):
                tokens = sum(s["num_tokens"] for s in sequence["segments"] if s["source"] == "policy")
                key = (sequence["policy"], sequence["role"], sequence["attempt"])
                member = MemberFate(index=slot, position=position, num_tokens=tokens, fate=GroupFate.KEPT)
                members[key].append(member)
                found[slot, position] = Sequence(sequence["policy"], tokens, self._unjudged(group))
        for verdict in group.verdicts or ():
            # With `group_by: policy` its role is empty: it is of all roles.
            mine = [m for key, of_key in members.items() if verdict.role in ("", key[1]) and verdict.policy == key[0]
                    and (not verdict.role or verdict.attempt == key[2]) for m in of_key]  # fmt: skip
            used = any((m.index, m.position) in group.used for m in mine)
            for member in mine:
                place = (member.index, member.position)
                kept_part = verdict.outcome is GroupFate.KEPT and used and verdict.num_kept < verdict.num_sequences
                judged = GroupFate.RESAMPLED_AWAY if kept_part and place not in group.used else verdict.outcome
                fate = self._fate(group, verdict.policy, judged, group.used.get(place), used, member.num_tokens)
                found[place] = Sequence(verdict.policy, member.num_tokens, fate)
            for number in range(verdict.num_sequences - len(mine)):  # their trajectories were collected
                use = next(iter(group.used.values()), None)
                fate = self._fate(group, verdict.policy, verdict.outcome, use, used, 0)
                found[-1 - len(found), number] = Sequence(verdict.policy, None, fate)
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
        """Of a sequence whose advantage group was judged; ``use``: (training step, masked tokens) of its batch."""
        if use is not None:
            training_step, masked = use
            if num_tokens and masked >= num_tokens:
                return Fate.MASKED
            return Fate.TRAINED if training_step <= self.newest.get(policy, -1) else Fate.IN_TRAINING
        if judged is not GroupFate.KEPT:
            return _OF_VERDICT[judged]
        # An advantage group leaves the buffer as a whole: what its batch lacks had grown too old.
        if sibling_used or group.closed:
            return Fate.TOO_OLD
        return Fate.LEFT_OVER if self.is_finished else Fate.BUFFERED
