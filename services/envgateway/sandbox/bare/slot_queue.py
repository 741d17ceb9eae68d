"""The order in which requests get a slot: of leases in the gateway, of programs in the supervisor.

Interactive requests go first and may use every slot; batch requests leave some to them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Generic, TypeVar

Item = TypeVar("Item")


def batch_share(num_slots: int) -> int:
    """The most slots that batch requests may use together: one less than there are, where there are several.

    >>> [batch_share(n) for n in (1, 2, 8)]
    [1, 1, 7]
    """
    return max(1, num_slots - 1)


class SlotQueue(Generic[Item]):
    """Two classes, each first come first served: ``add`` requests, ``take`` the next one to start, report its end with
    ``ended``. A request has a key of its own.

    >>> queue = SlotQueue[str](num_slots=2, batch_slots=1)
    >>> for key, (item, is_batch) in enumerate((("b1", True), ("b2", True), ("i1", False))):
    ...     queue.add(key, item, is_batch)
    >>> queue.take(), queue.take(), queue.take()
    ('i1', 'b1', None)
    """

    def __init__(self, num_slots: int, batch_slots: int) -> None:
        self._num_slots = num_slots
        self._batch_slots = batch_slots
        self._keys: dict[bool, deque[int]] = {False: deque(), True: deque()}  # of waiting requests, by whether batch
        self._waiting: dict[int, tuple[Item, bool]] = {}
        self._holding: dict[int, bool] = {}
        self._batch_holding = 0

    def add(self, key: int, item: Item, is_batch: bool) -> None:
        self._keys[is_batch].append(key)
        self._waiting[key] = (item, is_batch)

    def take(self) -> Item | None:
        """The next request that may start now; it holds a slot until ``ended``. None while all have to wait."""
        if len(self._holding) >= self._num_slots:
            return None
        is_batch = not self._keys[False]
        if (is_batch and self._batch_holding >= self._batch_slots) or not self._keys[is_batch]:
            return None
        key = self._keys[is_batch].popleft()
        item, _ = self._waiting.pop(key)
        self._holding[key] = is_batch
        self._batch_holding += is_batch
        return item

    def ended(self, key: int) -> None:
        """The request holds no slot any more. Requests that hold none are ignored."""
        self._batch_holding -= self._holding.pop(key, False)

    def find(self, key: int) -> Item | None:
        """The request, if it waits."""
        waiting = self._waiting.get(key)
        return None if waiting is None else waiting[0]

    def remove(self, key: int) -> bool:
        """Remove a waiting request; False when the request does not wait."""
        waiting = self._waiting.pop(key, None)
        if waiting is None:
            return False
        self._keys[waiting[1]].remove(key)
        return True

    def num_waiting(self, is_batch: bool) -> int:
        return len(self._keys[is_batch])

    @property
    def num_holding(self) -> int:
        return len(self._holding)

    @property
    def waiting(self) -> Iterable[Item]:
        return [item for item, _ in self._waiting.values()]
