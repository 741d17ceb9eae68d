"""Queue of acknowledgements of one trajectory stream: answered in any order, sent in order, up to 64 per message.

Sends a single acknowledgement at once; in a stream of them, partly filled messages are at least ``LINGER_S`` apart.
Only the memory of the sender waits for an acknowledgement: the sender keeps unacknowledged records. Independent of grpc
and the kind of the acknowledged items.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

MAX_ACKS = 64  # in one message
LINGER_S = 0.05  # between two messages
MAX_OPEN = 256  # records read and not yet acknowledged: beyond this the stream is not read


T = TypeVar("T")  # the answer to a record


class _Slot(Generic[T]):
    __slots__ = ("number", "outcome")

    def __init__(self, number: int) -> None:
        self.number = number
        self.outcome: T | None = None


class AckQueue(Generic[T]):
    """Belongs to one event loop."""

    def __init__(self, linger_s: float = LINGER_S) -> None:
        self._linger_s = linger_s
        self._loop = asyncio.get_running_loop()
        self._slots: deque[_Slot[T]] = deque()
        self._answered = asyncio.Event()  # the sender checks the queue
        self._has_room = asyncio.Event()
        self._has_room.set()
        self._ended = False
        self._num_answered = 0  # since the last message
        self._lingering: asyncio.TimerHandle | None = None
        self._sent_at = -math.inf  # by the loop's clock

    def open(self, number: int) -> Callable[[T], None]:
        """Register a received record; returns the callback for its outcome."""
        slot: _Slot[T] = _Slot(number)
        self._slots.append(slot)
        if len(self._slots) >= MAX_OPEN:
            self._has_room.clear()

        def answer(outcome: T) -> None:
            slot.outcome = outcome
            self._num_answered += 1
            if self._slots and self._slots[0].outcome is not None:
                self._linger()

        return answer

    def _linger(self) -> None:
        """Wake the sender now, or at the end of the linger time, together with the next answers."""
        left_s = self._sent_at + self._linger_s - self._loop.time()
        if self._num_answered >= MAX_ACKS or left_s <= 0:
            self._answered.set()
        elif self._lingering is None:
            self._lingering = self._loop.call_later(left_s, self._lingered)

    def _lingered(self) -> None:
        self._lingering = None
        self._answered.set()

    @property
    def full(self) -> bool:
        return not self._has_room.is_set()

    async def room(self) -> None:
        """Wait until fewer than ``MAX_OPEN`` are unanswered; has no deadline, because the disk sets the pace."""
        await self._has_room.wait()

    def end(self) -> None:
        """Mark the end of the stream: no further record follows."""
        self._ended = True
        self._answered.set()

    async def next(self) -> list[tuple[int, T]]:
        """The next acknowledgements, in order; empty after the end of the stream when all are sent."""
        while True:
            lingers = self._lingering is not None and self._num_answered < MAX_ACKS and not self._ended
            ready = [] if lingers else self._ready()
            if ready or (self._ended and not self._slots):
                self._note_sent()
                return ready
            self._answered.clear()
            await self._answered.wait()

    def _ready(self) -> list[tuple[int, T]]:
        ready: list[tuple[int, T]] = []
        while self._slots and len(ready) < MAX_ACKS and self._slots[0].outcome is not None:
            slot = self._slots.popleft()
            assert slot.outcome is not None
            ready.append((slot.number, slot.outcome))
        if len(self._slots) < MAX_OPEN:
            self._has_room.set()
        return ready

    def _note_sent(self) -> None:
        self._sent_at, self._num_answered = self._loop.time(), 0
        if self._lingering is not None:
            self._lingering.cancel()
            self._lingering = None
