"""Index of the replicas that take work, by held versions and number of free slots.

    shelf (replicas with the same key)  ->  [(free slots, replica id), ...] in ascending order

Shelves are few for any number of replicas: replicas hold one of a few versions. The freest replica that fits is the
last of a shelf, so a choice costs one step per shelf, and a change of a replica a binary search. The index places a
changed replica at the next choice, once for any number of changes: a commit of the journal resolves many slots of one
replica. Independent of task groups.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from services.orchestrator.members.replica import Held, Holdings, Replica

_Place = tuple[int, str]  # free slots, replica id: the greatest is chosen


class ShelfKey(NamedTuple):
    """Common properties of the replicas on a shelf."""

    holdings: Holdings
    moving: tuple[str, ...]  # policies of which they were told a newer version than they hold
    idle: bool  # no slot is assigned
    num_slots: int  # this and the next are 0 where shelves do not go by them
    num_evaluating: int


@dataclass(slots=True, kw_only=True)
class Shelf:
    alike: ShelfKey
    held: Mapping[str, Held]
    places: list[_Place] = field(default_factory=list)


class FreeSlots:
    def __init__(self, *, by_evaluating: bool = False) -> None:
        """``by_evaluating``: the number of slots, and of slots in evaluations, are part of the shelf's key."""
        self._by_evaluating = by_evaluating
        self._shelves: dict[ShelfKey, Shelf] = {}
        self._places: dict[str, tuple[Shelf, _Place]] = {}
        self._changed: dict[str, Replica] = {}  # not in their places yet
        self.num_placed = 0  # how often a replica was put into a place

    def __len__(self) -> int:
        self._settle()
        return len(self._places)

    def __contains__(self, replica_id: str) -> bool:
        self._settle()
        return replica_id in self._places

    def shelves(self) -> Iterator[Shelf]:
        """The shelves that are not empty."""
        self._settle()
        return iter(self._shelves.values())

    def place(self, replica: Replica) -> None:
        """Mark a replica for its new place, found at the next choice; a replica that takes no work has none."""
        if replica.takes_work:
            self._changed[replica.replica_id] = replica
        else:
            self.remove(replica.replica_id)

    def _settle(self) -> None:
        if self._changed:
            changed, self._changed = self._changed, {}
            for replica in changed.values():
                self._put(replica)

    def _put(self, replica: Replica) -> None:
        known = self._places.get(replica.replica_id)
        alike = self._alike(replica)
        place = (replica.num_free, replica.replica_id)
        if known is not None:
            if known[1] == place and known[0].alike == alike:
                return
            self._take_out(replica.replica_id)
        self.num_placed += 1
        shelf = self._shelves.get(alike)
        if shelf is None:
            shelf = self._shelves[alike] = Shelf(alike=alike, held=replica.held)
        insort(shelf.places, place)
        self._places[replica.replica_id] = shelf, place

    def remove(self, replica_id: str) -> None:
        """Take a replica out; ignores a replica without a place."""
        self._changed.pop(replica_id, None)
        self._take_out(replica_id)

    def _take_out(self, replica_id: str) -> None:
        found = self._places.pop(replica_id, None)
        if found is None:
            return
        shelf, place = found
        del shelf.places[bisect_left(shelf.places, place)]
        if not shelf.places:
            del self._shelves[shelf.alike]

    def freest(self, num_slots: int, serves: Callable[[Shelf], bool], without: Collection[str] = ()) -> str | None:
        """The replica with the most free slots, of several the one with the greatest id, that has ``num_slots`` free or
        is idle, on a shelf that ``serves``."""
        self._settle()
        best: _Place | None = None
        for shelf in self._shelves.values():
            if (best is not None and shelf.places[-1] <= best) or not serves(shelf):
                continue
            found = _last(shelf, num_slots, without)
            if found is not None and (best is None or found > best):
                best = found
        return None if best is None else best[1]

    def _alike(self, replica: Replica) -> ShelfKey:
        return ShelfKey(
            replica.holdings,
            replica.moving,
            not replica.assignments,
            replica.num_slots if self._by_evaluating else 0,
            replica.num_evaluating if self._by_evaluating else 0,
        )


def _last(shelf: Shelf, num_slots: int, without: Collection[str]) -> _Place | None:
    for place in reversed(shelf.places):
        if place[0] < num_slots and not shelf.alike.idle:
            return None
        if place[1] not in without:
            return place
    return None
