"""A round-robin queue: clients take turns, so a client with a hundred thousand items leaves others their share."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from typing import Generic, TypeVar

Item = TypeVar("Item", bound=Hashable)


class RoundRobinQueue(Generic[Item]):
    """First come first served within a client, round-robin among clients. Every operation but ``longest`` is O(1).

    >>> queue = RoundRobinQueue[str]()
    >>> for client, item in (("a", "a1"), ("a", "a2"), ("b", "b1")):
    ...     queue.add(client, item)
    >>> [queue.take() for _ in range(3)]
    ['a1', 'b1', 'a2']
    """

    def __init__(self) -> None:
        self._clients: OrderedDict[str, OrderedDict[Item, None]] = OrderedDict()  # the first is next
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def add(self, client: str, item: Item) -> None:
        self._clients.setdefault(client, OrderedDict())[item] = None
        self._size += 1

    def take(self) -> Item:
        """The next one; its client goes to the end. Raises ``KeyError`` when the queue is empty."""
        client, items = self._clients.popitem(last=False)
        item, _ = items.popitem(last=False)
        if items:
            self._clients[client] = items
        self._size -= 1
        return item

    def remove(self, client: str, item: Item) -> bool:
        """Remove an item that no longer waits; False when the item is not here."""
        items = self._clients.get(client)
        if items is None or item not in items:
            return False
        del items[item]
        if not items:
            del self._clients[client]
        self._size -= 1
        return True

    def count(self, client: str) -> int:
        return len(self._clients.get(client, ()))

    def longest(self) -> str:
        """The client with most items."""
        return max(self._clients, key=lambda client: len(self._clients[client]))

    def take_newest(self, client: str) -> Item:
        """Remove and return the newest item of this client."""
        items = self._clients[client]
        item, _ = items.popitem()
        if not items:
            del self._clients[client]
        self._size -= 1
        return item
