"""Decides how many task groups are started (``Admission``), and from which source of tasks (``Mixture``).

**Admission** limits the number of started rollouts, so that no result is too old to be trained. The rule, per policy: the
dispatcher issues a task group only while

    accepted and not yet trained + expected from running  <  min(max_staleness + 1 - lag, steps left) * batch

where lag is the number of versions that the chosen replica is behind: its samples start that much older. "Trained"
means that the version of the training step is published: the batch of a running step still counts. Filtered, failed and
expired sequences return their share. The buffer never evicts a group to make room.

Accepted sequences that wait for a running sibling cannot be trained yet: a straggler would hold the places of its
finished siblings while the trainer is idle. So they do not count while the buffer lacks a batch, up to UNFINISHED_SHARE
of the quota: less than 1 + UNFINISHED_SHARE quotas are ever outstanding when a group is issued. They count again when
the buffer has a batch, so a slow trainer does not increase staleness. Where late tokens are not trained (``mask``,
``drop``) they always count: groups beyond the quota would lose their oldest tokens.

With ``Account.exact`` the dispatcher issues a group only if the batch would lack that group even if all running ones are
kept:

    no batch in training,  and  buffered + slots of groups that are not complete  <  batch

Then the batch of a step consists of the first groups whose sequences fill the batch, by the order of their issue. The
number of filtered groups and the order in which groups end do not matter, as long as a slot brings at most one
sequence.

**Mixture** shares the sequences that one policy trains among several sources of tasks. The level of a source is the
number of its sequences that batches have taken, over its weight. The dispatcher issues the source of the lowest level,
with waiting and expected sequences counted too; a batch takes the task groups of the lowest level one after another, and
waits for a source without a task group while one may still come:

    issue   argmin (trained + waiting + expected) / weight
    batch   argmin  trained / weight, group by group

So the shares of trained sequences follow the weights within a task group, however slow a source is and however many of
its groups are dropped: a dropped group leaves the count, and its source is issued again (stride scheduling; Waldspurger
and Weihl, 1995). A source of which ``exhausted_after`` task groups in a row were dropped is exhausted: batches do not wait
for this source, and sequences of other sources in its place do not count, so that the source does not displace the
others later.

Both work on counts only, independent of task groups, replicas, buffers and the journal.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal, TypeVar

from services.common.telemetry.metrics import StepKey, source_key

T = TypeVar("T")
ONLY: Mapping[str, float] = {"": 1.0}  # weights of a run with one dataset
UNFINISHED_SHARE = 0.5  # of the quota: accepted sequences without a complete group that need not count


@dataclass(slots=True, kw_only=True)
class Account:
    """Quota of one policy, and its use."""

    batch_size: int
    max_staleness: int
    num_steps: int
    counts_unfinished: bool = False  # always: accepted sequences that wait for a running sibling
    exact: bool = False  # issue only groups that the next batch may need
    version: int = -1
    unfinished: int = 0  # sequences that wait for a running sibling
    buffered: int = 0  # sequences that a batch can be made of
    in_training: int = 0  # sequences in a batch that the trainer holds
    running_slots: int = 0  # slots of issued training groups that are not resolved yet
    group_slots: int = 0  # all slots of issued training groups that are not complete
    num_trajectories: int = 0  # resolved ones, to learn how many sequences one brings
    num_sequences: int = 0

    @property
    def steps_left(self) -> int:
        return self.num_steps - max(self.version, 0)

    @property
    def expected(self) -> float:
        """Expected sequences of the running rollouts, from the mean of earlier ones."""
        return self.running_slots * (self.num_sequences / self.num_trajectories if self.num_trajectories else 1.0)

    @property
    def accepted(self) -> int:
        """Sequences that are finished and not yet trained."""
        return self.unfinished + self.buffered + self.in_training

    @property
    def counted(self) -> float:
        """Sequences that count against the quota."""
        outstanding = self.unfinished + self.buffered + self.in_training + self.expected
        if self.counts_unfinished or self.buffered >= self.batch_size:
            return outstanding
        return outstanding - min(self.unfinished, UNFINISHED_SHARE * self.quota)

    @property
    def quota(self) -> int:
        """Sequences that may be outstanding; excludes those that the last steps cannot use."""
        return min(self.max_staleness + 1, self.steps_left) * self.batch_size

    def has_room(self, lag: int = 0) -> bool:
        """Apply the rule of this module."""
        if self.exact:
            started = self.buffered + self.group_slots < self.batch_size
            return started and not self.in_training and not lag and self.steps_left > 0
        return self.counted < min(self.max_staleness + 1 - lag, self.steps_left) * self.batch_size

    @property
    def is_full(self) -> bool:
        """Whether the staleness bound stops new task groups."""
        return self.steps_left > 0 and not self.has_room()

    @property
    def fullness(self) -> float:
        """Share of the quota in use; 1 for an empty quota."""
        return self.counted / self.quota if self.quota else 1.0


class Admission:
    """Accounts of all policies; decides whether the dispatcher may issue a task group."""

    def __init__(self, accounts: dict[str, Account], admit: Literal["all", "any"] = "all") -> None:
        self.accounts = accounts
        self._admit = admit
        # Policies without a trainer: the other policies do not wait for them, and excess sequences are surplus.
        self.absent: set[str] = set()

    def open(self, policies: Iterable[str], lags: Mapping[str, int] = MappingProxyType({})) -> bool:
        """Whether all of the still trained policies (``all``), or one (``any``), have room at a replica with these
        lags."""
        rooms = [
            self.accounts[policy].has_room(lags.get(policy, 0))
            for policy in policies
            if self.accounts[policy].steps_left > 0 and policy not in self.absent
        ]
        return bool(rooms) and (all(rooms) if self._admit == "all" else any(rooms))

    def is_surplus(self, policy: str) -> bool:
        """Whether the policy cannot use another complete group."""
        account = self.accounts[policy]
        if account.steps_left == 0:
            return True
        outrun = self._admit == "any" or policy in self.absent
        return outrun and account.buffered + account.in_training >= account.quota


class Mixture:
    """Shares of the sources of tasks among the sequences that one policy trains."""

    def __init__(self, weights: Mapping[str, float] = ONLY, exhausted_after: int = 100) -> None:
        """``weights``: by name of the source, above 0, in the order that breaks ties."""
        total = sum(weights.values())
        self.shares = {source: weight / total for source, weight in weights.items()}
        self.is_mixed = len(self.shares) > 1
        self._exhausted_after = exhausted_after
        self.trained: Counter[str] = Counter()  # sequences in batches
        self._forgiven: dict[str, float] = dict.fromkeys(weights, 0.0)
        self._slots: Counter[str] = Counter()  # of issued task groups that are not complete
        self._ended_slots: Counter[str] = Counter()
        self._ended_sequences: Counter[str] = Counter()
        self._dropped_in_a_row: Counter[str] = Counter()  # task groups

    # --- issued task groups ------------------------------------------------------------------------------------------

    def issued(self, source: str, num_slots: int) -> None:
        self._slots[source] += num_slots

    def ended(self, source: str, num_slots: int, num_sequences: int | None = None) -> None:
        """Count the end of a task group with ``num_sequences``; None for a cancelled one."""
        self._slots[source] -= num_slots
        assert self._slots[source] >= 0
        if num_sequences is not None:
            self._ended_slots[source] += num_slots
            self._ended_sequences[source] += num_sequences

    def is_running(self, source: str) -> bool:
        """Whether a task group of the source is not complete."""
        return self._slots[source] > 0

    def expected(self, source: str) -> float:
        """Sequences of its running task groups, from the mean of earlier ones."""
        ended = self._ended_slots[source]
        return self._slots[source] * (self._ended_sequences[source] / ended if ended else 1.0)

    def kept(self, source: str) -> None:
        """Note a task group with sequences to train."""
        self._dropped_in_a_row[source] = 0

    def dropped(self, source: str, num_sequences: int) -> bool:
        """Note a task group without a sequence to train; returns whether the source is now exhausted."""
        self._dropped_in_a_row[source] += 1
        if self.is_exhausted(source):  # its turn is over, so that the others are issued too
            self._forgiven[source] += num_sequences
        return self._dropped_in_a_row[source] == self._exhausted_after

    def is_exhausted(self, source: str) -> bool:
        return self._dropped_in_a_row[source] >= self._exhausted_after

    @property
    def exhausted(self) -> dict[str, int]:
        """Exhausted sources of a mixture, and how many of their task groups were dropped in a row."""
        return {s: self._dropped_in_a_row[s] for s in self.shares if self.is_mixed and self.is_exhausted(s)}

    def level(self, source: str, more: float = 0.0) -> float:
        """Trained sequences and ``more`` of them, over the share of the source."""
        return (self.trained[source] + self._forgiven[source] + more) / self.shares[source]

    # --- batches -----------------------------------------------------------------------------------------------------

    def plan(
        self, batch_size: int, waiting: Mapping[str, Iterable[tuple[int, T]]], may_come: Callable[[str], bool]
    ) -> tuple[list[T], str]:
        """The groups of the next batch, in order, and the source that the batch waits for.

        ``waiting``: size and name of the waiting groups of each source, in their order. Without a plan the list is empty;
        the source is empty too where there are too few sequences of all.
        """
        left = {source: iter(waiting.get(source, ())) for source in self.shares}
        plan: list[T] = []
        planned: Counter[str] = Counter()
        while planned.total() < batch_size:
            if not left:
                return [], ""
            levels = {source: self.level(source, planned[source]) for source in left}
            source = min(levels, key=levels.__getitem__)
            found = next(left[source], None)
            if found is not None:
                planned[source] += found[0]
                plan.append(found[1])
            elif not self.is_exhausted(source) and may_come(source):
                return [], source
            else:
                del left[source]
        return plan, ""

    def taken(self, num_sequences: Mapping[str, int]) -> dict[str, float]:
        """Count the sequences of a batch by source; returns what its record keeps of the mixture, empty for one source."""
        self.trained.update(num_sequences)
        if not self.is_mixed:
            return {}
        active = [source for source in self.shares if not self.is_exhausted(source)]
        if active and self.exhausted:
            lowest = min(map(self.level, active))
            for source in self.exhausted:
                lacking = (lowest - self.level(source)) * self.shares[source]
                self._forgiven[source] += max(0.0, lacking)
        total = self.trained.total()
        values = {}
        for source in self.shares:
            values[source_key(source, StepKey.NUM_SEQUENCES)] = float(num_sequences.get(source, 0))
            values[source_key(source, StepKey.SHARE)] = self.trained[source] / total if total else 0.0
            values[source_key(source, StepKey.WANTED_SHARE)] = self.shares[source]
            values[source_key(source, StepKey.FORGIVEN)] = self._forgiven[source]
        return values

    def recover(self, statistics: Mapping[str, float]) -> None:
        """Apply the facts of a batch that an earlier process recorded."""
        for source in self.shares:
            self.trained[source] += int(statistics.get(source_key(source, StepKey.NUM_SEQUENCES), 0))
            self._forgiven[source] = statistics.get(source_key(source, StepKey.FORGIVEN), self._forgiven[source])
