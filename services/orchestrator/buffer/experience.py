"""One policy's experience buffer: advantage groups, waiting for a batch.

Earliest deadline first (oldest version first), ties and ``fifo`` by arrival; ``issued`` by the names of task groups, which are
counted up. What became too old by the policy's rule is
taken out eagerly when the version advances, member by member, wherever it stands in the queue. Knows nothing about grpc,
journals or admission.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection
from typing import Literal

from services.orchestrator.buffer.late import LateRule
from services.orchestrator.groups import AdvantageGroup, Member

Expired = tuple[AdvantageGroup, list[Member]]  # a group as it was, and which of its members left the buffer


class ExperienceBuffer:
    def __init__(
        self, batch_size: int, rule: LateRule, order: Literal["deadline", "fifo", "issued"] = "deadline"
    ) -> None:
        self._batch_size = batch_size
        self._rule = rule
        self._order = order
        self._waiting: dict[int, AdvantageGroup] = {}  # by arrival
        # (place in the order, arrival); entries of removed groups are skipped.
        self._heap: list[tuple[tuple[int, str], int]] = []
        self._arrivals = 0
        self.version = 0  # the newest published version of the policy
        self.num_sequences = 0

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def ready(self) -> bool:
        """A batch can be taken."""
        return self.num_sequences >= self._batch_size

    def add(self, group: AdvantageGroup) -> tuple[AdvantageGroup | None, list[Member]]:
        """Take a group in: what was taken of it, None for nothing, and the members that are too old already."""
        taken, old = self._rule.split(group, self.version)
        if taken is None:
            return None, old
        heapq.heappush(self._heap, (self._place(taken), self._arrivals))
        self._waiting[self._arrivals] = taken
        self._arrivals += 1
        self.num_sequences += taken.size
        return taken, old

    def _place(self, group: AdvantageGroup) -> tuple[int, str]:
        if self._order == "issued":
            return len(group.task_group_id), group.task_group_id
        if self._order == "fifo":
            return 0, ""
        version = group.min_version
        # A group without trained tokens cannot grow old: it goes with the newest.
        return self.version if version is None else version, ""

    def advance(self, version: int) -> list[Expired]:
        """The trainer reached a version: members that are now too old leave, and are returned with their groups."""
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
                self.num_sequences -= len(old)
            if old:
                expired.append((group, old))
        return expired

    def take(self) -> list[AdvantageGroup]:
        """Whole groups, in order, until they hold at least ``batch_size`` sequences; what is too old in them is masked."""
        if not self.ready:
            raise ValueError(f"the buffer holds {self.num_sequences} of {self._batch_size} sequences")
        taken: list[AdvantageGroup] = []
        count = 0
        while count < self._batch_size:
            _, arrival = heapq.heappop(self._heap)
            if arrival not in self._waiting:
                continue
            taken.append(self._rule.masked(self._remove(arrival), self.version))
            count += taken[-1].size
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
        self.num_sequences -= group.size
        return group
