"""Task groups with open slots and without a replica, in the order of their loss.

They wait in one queue for each need: versions, policies and number of slots. When no replica fits the first of a queue,
none fits the others, so a search costs one step per need, for any number of waiting groups. Independent of replicas.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterator

from services.orchestrator.state.groups import TaskGroup

MOST_STALE = 64  # entries of task groups that left, in a queue

_Need = tuple[tuple[tuple[str, int], ...], tuple[str, ...], int]


class OrphanedGroups:
    def __init__(self) -> None:
        self._numbers = itertools.count()
        self._waiting: dict[str, tuple[_Need, int]] = {}  # by name: its queue, and its place in the order of all
        self._queues: dict[_Need, list[tuple[int, str]]] = {}  # heaps; those that left are skipped when they are first

    def __contains__(self, name: str) -> bool:
        return name in self._waiting

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, group: TaskGroup) -> None:
        """Append a group; a waiting group keeps its place."""
        if group.id not in self._waiting:
            self._put(group, next(self._numbers))

    def discard(self, name: str) -> None:
        """Remove a group that runs again or is not wanted; ignores others."""
        self._waiting.pop(name, None)

    def resolved(self, group: TaskGroup) -> None:
        """Update a group after an outcome: the group needs fewer slots, or is complete."""
        found = self._waiting.pop(group.id, None)
        if found is not None and not group.complete:
            self._put(group, found[1])

    def in_turn(self) -> Iterator[str]:
        """The names in order. If a group still waits when the caller asks for the next, no replica fits: groups with
        the same need are skipped."""
        heads = [(head[0], head[1], need) for need in list(self._queues) if (head := self._head(need)) is not None]
        heapq.heapify(heads)
        while heads:
            _, name, need = heapq.heappop(heads)
            yield name
            if name not in self._waiting and (head := self._head(need)) is not None:
                heapq.heappush(heads, (head[0], head[1], need))

    def _put(self, group: TaskGroup, number: int) -> None:
        order = group.order
        need = tuple(sorted(order.required_versions.items())), order.policies, len(group.unresolved)
        self._waiting[group.id] = need, number
        queue = self._queues.setdefault(need, [])
        if len(queue) > MOST_STALE + 2 * len(
            self._waiting
        ):  # else those that left behind a first one that stays would pile up
            queue[:] = [(number, name) for number, name in queue if self._waiting.get(name) == (need, number)]
            heapq.heapify(queue)
        heapq.heappush(queue, (number, group.id))

    def _head(self, need: _Need) -> tuple[int, str] | None:
        queue = self._queues.get(need)
        while queue:
            number, name = queue[0]
            if self._waiting.get(name) == (need, number):
                return queue[0]
            heapq.heappop(queue)
        self._queues.pop(need, None)
        return None
