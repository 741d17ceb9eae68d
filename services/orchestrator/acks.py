"""Acknowledgements of one trajectory stream: answered out of order, sent in order, up to 16 in one message.

Knows nothing about grpc or what is acknowledged.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

MAX_ACKS = 16  # in one message
MAX_OPEN = 256  # records read and not yet acknowledged: beyond this the stream is not read


T = TypeVar("T")  # what a record is answered with


class _Slot(Generic[T]):
    __slots__ = ("number", "outcome")

    def __init__(self, number: int) -> None:
        self.number = number
        self.outcome: T | None = None


class AckQueue(Generic[T]):
    def __init__(self) -> None:
        self._slots: deque[_Slot[T]] = deque()
        self._answered = asyncio.Event()
        self._has_room = asyncio.Event()
        self._has_room.set()
        self._ended = False

    def open(self, number: int) -> Callable[[T], None]:
        """A record was read; returns what its outcome is told to."""
        slot: _Slot[T] = _Slot(number)
        self._slots.append(slot)
        if len(self._slots) >= MAX_OPEN:
            self._has_room.clear()

        def answer(outcome: T) -> None:
            slot.outcome = outcome
            if self._slots and self._slots[0].outcome is not None:
                self._answered.set()

        return answer

    @property
    def full(self) -> bool:
        return not self._has_room.is_set()

    async def room(self) -> None:
        """Wait until fewer than ``MAX_OPEN`` are unanswered: as long as the disk takes, so without deadline."""
        await self._has_room.wait()

    def end(self) -> None:
        """No further record will be read."""
        self._ended = True
        self._answered.set()

    async def next(self) -> list[tuple[int, T]]:
        """The next acknowledgements, in order; empty when all are out and no further record will come."""
        while True:
            ready: list[tuple[int, T]] = []
            while self._slots and len(ready) < MAX_ACKS and self._slots[0].outcome is not None:
                slot = self._slots.popleft()
                assert slot.outcome is not None
                ready.append((slot.number, slot.outcome))
            if len(self._slots) < MAX_OPEN:
                self._has_room.set()
            if ready or (self._ended and not self._slots):
                return ready
            self._answered.clear()
            await self._answered.wait()
