"""One policy's experience buffer: whole advantage groups, waiting for a batch.

Earliest deadline first (oldest version first), ties and ``fifo`` by arrival. What became too old is expired eagerly
when the version advances, wherever it stands in the queue. Knows nothing about grpc, journals or admission.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection
from typing import Literal

from services.orchestrator.groups import AdvantageGroup


class ExperienceBuffer:
    def __init__(self, batch_size: int, max_staleness: int, order: Literal["deadline", "fifo"] = "deadline") -> None:
        self._batch_size = batch_size
        self._max_staleness = max_staleness
        self._order = order
        self._waiting: dict[int, AdvantageGroup] = {}  # by arrival
        self._heap: list[tuple[int, int]] = []  # (deadline or 0, arrival); entries of removed groups are skipped
        self._arrivals = 0
        self.version = 0  # the newest published version of the policy
        self.num_sequences = 0

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def ready(self) -> bool:
        """A batch can be taken."""
        return self.num_sequences >= self._batch_size

    def add(self, group: AdvantageGroup) -> bool:
        """Take a group in; False when it is too old already."""
        version = group.min_version
        if self._expired(version):
            return False
        # A group without trained tokens cannot grow old: it goes with the newest.
        deadline = self.version if version is None else version
        heapq.heappush(self._heap, (deadline if self._order == "deadline" else 0, self._arrivals))
        self._waiting[self._arrivals] = group
        self._arrivals += 1
        self.num_sequences += group.size
        return True

    def advance(self, version: int) -> list[AdvantageGroup]:
        """The trainer reached a version: everything that is now too old leaves, and is returned."""
        self.version = max(self.version, version)
        expired = [arrival for arrival, group in self._waiting.items() if self._expired(group.min_version)]
        return [self._remove(arrival) for arrival in expired]

    def take(self) -> list[AdvantageGroup]:
        """Whole groups, in order, until they hold at least ``batch_size`` sequences."""
        if not self.ready:
            raise ValueError(f"the buffer holds {self.num_sequences} of {self._batch_size} sequences")
        taken: list[AdvantageGroup] = []
        count = 0
        while count < self._batch_size:
            _, arrival = heapq.heappop(self._heap)
            if arrival not in self._waiting:
                continue
            taken.append(self._remove(arrival))
            count += taken[-1].size
        return taken

    def take_named(self, sequence_ids: Collection[str]) -> list[AdvantageGroup]:
        """Remove the groups that a recorded batch names."""
        found = [a for a, group in self._waiting.items() if group.members[0].sequence_id in sequence_ids]
        return [self._remove(arrival) for arrival in found]

    def _remove(self, arrival: int) -> AdvantageGroup:
        group = self._waiting.pop(arrival)
        self.num_sequences -= group.size
        return group

    def _expired(self, min_version: int | None) -> bool:
        return min_version is not None and self.version - min_version > self._max_staleness
