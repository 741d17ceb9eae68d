"""A bounded queue with one reader: commands on their way to one peer.

The sender never waits: a peer that does not read loses its stream (``overflow``) and must join again; after that the
sender repeats all wanted commands. Independent of the kind of the items.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Generic, TypeVar

from services.common.errors import MillraceError

T = TypeVar("T")


class Mailbox(Generic[T]):
    def __init__(self, capacity: int = 1024) -> None:
        self._capacity = capacity
        self._items: deque[T] = deque()
        self._changed = asyncio.Event()
        self._error: MillraceError | None = None
        self.closed = False

    def __len__(self) -> int:
        return len(self._items)

    def put(self, item: T) -> bool:
        """False when the mailbox is closed or full."""
        if self.closed or len(self._items) >= self._capacity:
            return False
        self._items.append(item)
        self._changed.set()
        return True

    def close(self, error: MillraceError | None = None) -> None:
        """Close the mailbox. Without an error the reader still gets the queued items; with one the reader gets the
        error at once."""
        if self.closed:
            return
        self.closed = True
        self._error = error
        self._changed.set()

    async def get(self) -> T | None:
        """The next item, or None after the end of the mailbox.

        Has no deadline: the wait lasts as long as the peer's stream, and the owner ends the wait with ``close``.
        """
        while True:
            if self._error is not None:
                raise self._error
            if self._items:
                return self._items.popleft()
            if self.closed:
                return None
            self._changed.clear()
            await self._changed.wait()
