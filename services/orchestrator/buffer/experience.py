"""Advantage groups of one policy: ``ExperienceBuffer`` holds those that wait for a batch, ``ReplayStore`` trained ones.

The buffer gives earliest deadline first (oldest version first), ties and ``fifo`` by arrival; ``issued`` by the names of
task groups, which are counted up. That is the order within a source of tasks; ``Mixture`` chooses among sources. When the
version advances, the buffer removes members that are too old by the policy's rule at once, from any position of the
queue.

The replay store is bounded, first in, first out. A batch draws whole groups at random until the batch is full, none
twice. Groups beyond the store's own bound on staleness leave when the version advances. Drawn groups stay in the store.
The draw depends on ``run.seed``, policy, training step and contents alone.

Both are independent of grpc, quotas, journals and records of batches.
"""

from __future__ import annotations

import heapq
import random
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, replace
from typing import Literal

from services.common.config.training.policy import BatchConfig, ReplayConfig
from services.common.records.types import Segment, Sequence
from services.common.seeds import derived_seed
from services.orchestrator.state.admission import Mixture
from services.orchestrator.state.groups import GroupBy


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """One sequence of an advantage group."""

    sequence_id: str  # "<task group>/<index>/<position in the trajectory>"
    sequence: Sequence  # as trained: masked tokens count as environment tokens
    trained_from: int = 0  # policy tokens of older versions are masked
    num_masked_tokens: int = 0
    trained: bool = True  # False: its reward counts in the statistics, and its tokens are not trained

    @property
    def rollout(self) -> str:
        """The task group and slot of this sequence."""
        return self.sequence_id.rpartition("/")[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class AdvantageGroup:
    """Sequences of one task group that are compared with each other, and their statistics.

    They share policy, role and attempt; with ``group_by: policy`` or ``rollout`` only the policy, and role and attempt
    have no meaning.
    """

    task_group_id: str
    policy: str
    role: str
    attempt: int
    members: tuple[Member, ...]
    mean: float
    std: float  # sample standard deviation (N - 1); 1 for a singleton
    num_compared: int  # rewards that mean and std are of: of rollouts, or of sequences with ``group_by: policy``
    group_by: GroupBy = "attempt"
    silent: tuple[float, ...] = ()  # rewards of rollouts that are compared and left no sequence
    source: str = ""  # of its task
    advantage_scale: float = 1.0  # of that source

    @property
    def size(self) -> int:
        """Number of its sequences."""
        return len(self.members)

    @property
    def min_version(self) -> int | None:
        """Oldest version among its trained tokens; None without trained tokens."""
        versions = [v for m in self.members if (v := m.sequence.min_version) is not None]
        return min(versions) if versions else None

    @property
    def rewards_equal(self) -> bool:
        first = self.members[0].sequence.reward
        return all(m.sequence.reward == first for m in self.members) and all(r == first for r in self.silent)


Expired = tuple[AdvantageGroup, list[Member]]  # a group before, and its members that left the buffer


@dataclass(frozen=True, slots=True)
class LateRule:
    """Rule of one policy for tokens that are older than it may train: ``batch.late`` and ``batch.max_token_age``.

        keep, wait   trained with their true age; masked beyond ``max_token_age``, where that is set
        mask         masked beyond ``max_staleness``
        drop         a sequence whose oldest token is beyond ``max_staleness`` is dropped

    All rules also drop a sequence without a trainable token. Its siblings stay, and so do the statistics of the whole
    group. A masked token counts as read by the policy: later tokens have the masked one in their context, and it is no
    target.

    ``version`` is always the start of the next training step.
    """

    drops: bool  # by the oldest token
    most: int | None  # age of the oldest token that is trained; None: any

    @classmethod
    def of(cls, config: BatchConfig) -> LateRule:
        if config.late_rule == "drop":
            return cls(True, config.max_staleness)
        return cls(False, config.max_staleness if config.late_rule == "mask" else config.max_token_age)

    def is_too_old(self, sequence: Sequence, version: int) -> bool:
        """Whether the sequence has policy tokens and none of them may be trained, now or later."""
        if self.most is None:
            return False
        decisive = sequence.min_version if self.drops else sequence.max_version
        return decisive is not None and version - decisive > self.most

    def split(self, group: AdvantageGroup, version: int) -> tuple[AdvantageGroup | None, list[Member]]:
        """The remaining group, with the statistics of the whole group, and the members that are too old."""
        if self.most is None:
            return group, []
        old = [m for m in group.members if self.is_too_old(m.sequence, version)]
        if not old:
            return group, []
        young = tuple(m for m in group.members if not self.is_too_old(m.sequence, version))
        return (replace(group, members=young) if young else None), old

    def masked(self, group: AdvantageGroup, version: int) -> AdvantageGroup:
        """The group as the step from ``version`` trains it."""
        if self.drops or self.most is None or version <= self.most:
            return group
        oldest = version - self.most
        minimum = group.min_version
        if minimum is None or minimum >= oldest:
            return group
        return replace(group, members=tuple(_masked(member, oldest) for member in group.members))


def mask_sequence(sequence: Sequence, trained_from: int) -> Sequence:
    """The sequence without the policy tokens that versions before ``trained_from`` computed as targets."""
    return replace(
        sequence,
        segments=tuple(
            Segment.environment(s.token_ids) if s.is_policy and s.weight_version < trained_from else s
            for s in sequence.segments
        ),
    )


def _masked(member: Member, trained_from: int) -> Member:
    oldest = member.sequence.min_version
    if oldest is None or oldest >= trained_from:
        return member
    sequence = mask_sequence(member.sequence, trained_from)
    num_masked = member.sequence.num_trained_tokens - sequence.num_trained_tokens
    return replace(
        member,
        sequence=sequence,
        trained_from=trained_from,
        num_masked_tokens=member.num_masked_tokens + num_masked,
    )


class ExperienceBuffer:
    def __init__(
        self,
        batch_size: int,
        rule: LateRule,
        order: Literal["deadline", "fifo", "issued"] = "deadline",
        mixture: Mixture | None = None,
        may_come: Callable[[str], bool] = lambda source: False,
    ) -> None:
        """``may_come``: whether another group of a source of the mixture may come without a batch being taken."""
        self.batch_size = batch_size
        self._rule = rule
        self._order = order
        self._mixture = mixture or Mixture()
        self._may_come = may_come
        self._waiting: dict[int, AdvantageGroup] = {}  # by arrival
        # By source: (place in the order, arrival); entries of removed groups are skipped.
        self._heaps: dict[str, list[tuple[tuple[int, str], int]]] = {source: [] for source in self._mixture.shares}
        self._arrivals = 0
        self.num_of_source: Counter[str] = Counter()  # waiting sequences
        self.version = 0  # the newest published version of the policy
        self.num_sequences = 0

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def groups(self) -> tuple[AdvantageGroup, ...]:
        """The waiting groups, in order of arrival."""
        return tuple(self._waiting.values())

    @property
    def ready(self) -> bool:
        """Whether a batch can be taken."""
        if not self._mixture.is_mixed:
            return self.num_sequences >= self.batch_size
        return bool(self._plan()[0])

    @property
    def lacks(self) -> str:
        """The source that the next batch waits for although there are sequences enough; empty for none."""
        return self._plan()[1]

    def _plan(self) -> tuple[list[str], str]:
        """The sources of the groups of the next batch, in order, and the source that it waits for."""
        if self.num_sequences < self.batch_size:
            return [], ""
        waiting = {source: [group.size for _, group in self._in_order(source)] for source in self._heaps}
        return self._mixture.plan(self.batch_size, waiting, self._may_come)

    def _in_order(self, source: str) -> list[tuple[int, AdvantageGroup]]:
        return [(a, self._waiting[a]) for _, a in sorted(self._heaps[source]) if a in self._waiting]

    def add(self, group: AdvantageGroup) -> tuple[AdvantageGroup | None, list[Member]]:
        """Add a group; returns the part that the buffer took, None without one, and the members that are too old
        already."""
        taken, old = self._rule.split(group, self.version)
        if taken is None:
            return None, old
        heapq.heappush(self._heaps[taken.source], (self._place(taken), self._arrivals))
        self._waiting[self._arrivals] = taken
        self._arrivals += 1
        self._count(taken, taken.size)
        return taken, old

    def _place(self, group: AdvantageGroup) -> tuple[int, str]:
        if self._order == "issued":
            return len(group.task_group_id), group.task_group_id
        if self._order == "fifo":
            return 0, ""
        version = group.min_version
        # A group without trained tokens cannot become too old: its order is that of the newest.
        return self.version if version is None else version, ""

    def advance(self, version: int) -> list[Expired]:
        """Note a version of the trainer; removes and returns members that are too old now, with their groups."""
        self.version = max(self.version, version)
        if self._rule.most is None:
            return []
        expired: list[Expired] = []
        for arrival, group in list(self._waiting.items()):
            left, old = self._rule.split(group, self.version)
            if left is None:
                self._remove(arrival)
            elif old:
                self._waiting[arrival] = left
                self._count(group, -len(old))
            if old:
                expired.append((group, old))
        return expired

    def take(self) -> list[AdvantageGroup]:
        """Whole groups, each source's in order, with at least ``batch_size`` sequences in total; their too old tokens are
        masked."""
        plan, lacks = self._plan()
        if not plan:
            wanted = (
                f"sequences, and its batch waits for source {lacks!r}" if lacks else f"of {self.batch_size} sequences"
            )
            raise ValueError(f"the buffer holds {self.num_sequences} {wanted}")
        taken: list[AdvantageGroup] = []
        for source in plan:
            while (arrival := heapq.heappop(self._heaps[source])[1]) not in self._waiting:
                pass
            taken.append(self._rule.masked(self._remove(arrival), self.version))
        self._mixture.taken(sizes_by_source(taken))
        return taken

    def take_named(self, sequence_ids: Collection[str]) -> list[AdvantageGroup]:
        """Remove the groups that a recorded batch names."""
        found = [a for a, group in self._waiting.items() if group.members[0].sequence_id in sequence_ids]
        return [self._remove(arrival) for arrival in found]

    def take_unnamed(self, sequence_ids: Collection[str]) -> list[AdvantageGroup]:
        """Remove the groups that none of these sequences belongs to."""
        found = [a for a, group in self._waiting.items() if group.members[0].sequence_id not in sequence_ids]
        return [self._remove(arrival) for arrival in found]

    def _remove(self, arrival: int) -> AdvantageGroup:
        group = self._waiting.pop(arrival)
        self._count(group, -group.size)
        return group

    def _count(self, group: AdvantageGroup, num_sequences: int) -> None:
        self.num_sequences += num_sequences
        self.num_of_source[group.source] += num_sequences


def sizes_by_source(groups: Iterable[AdvantageGroup]) -> Counter[str]:
    """Number of sequences by source."""
    sizes: Counter[str] = Counter()
    for group in groups:
        sizes[group.source] += group.size
    return sizes


class ReplayStore:
    def __init__(self, policy: str, config: ReplayConfig, seed: int) -> None:
        self._policy = policy
        self._config = config
        self._seed = seed  # of the run
        self._groups: deque[AdvantageGroup] = deque()
        self.version = 0
        self.num_sequences = 0

    @property
    def enabled(self) -> bool:
        return self._config.ratio > 0

    @property
    def groups(self) -> tuple[AdvantageGroup, ...]:
        """Groups in order of arrival, oldest first."""
        return tuple(self._groups)

    def trained(self, groups: Iterable[AdvantageGroup], version: int) -> None:
        """Store groups whose first training step made ``version``."""
        self.version = max(self.version, version)
        for group in groups:
            self._groups.append(group)
            self.num_sequences += group.size
        young = [group for group in self._groups if self._young(group)]
        self._groups = deque(young)
        self.num_sequences = sum(group.size for group in young)
        while self.num_sequences > self._config.capacity:
            self.num_sequences -= self._groups.popleft().size

    def draw(self, training_step: int, num_sequences: int) -> list[AdvantageGroup]:
        """Draw groups with at least this many sequences, or all groups."""
        candidates = list(self._groups)
        random.Random(derived_seed(self._seed, "replay", self._policy, training_step)).shuffle(candidates)
        drawn: list[AdvantageGroup] = []
        count = 0
        for group in candidates:
            if count >= num_sequences:
                break
            drawn.append(group)
            count += group.size
        return drawn

    def _young(self, group: AdvantageGroup) -> bool:
        """A group without trained tokens has no use in a replay."""
        oldest = group.min_version
        return oldest is not None and self.version - oldest <= self._config.max_staleness
