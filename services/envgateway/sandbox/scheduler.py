"""Who gets the next slot: clients take turns, and a waiting rollout goes before batches.

Servers set the client of a call at their edge (``on_behalf_of``); every task that the call starts inherits the client.
"""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from services.common.errors import CapacityError
from services.common.telemetry.metrics import Lane, waiting_gauge

LANE_SIZE = 4096  # waiting in each lane, before callers are told to come back
_RETRY_FROM_S = 0.5
_RETRY_AT_MOST_S = 30.0

_client: ContextVar[str] = ContextVar("client", default="")


def current_client() -> str:
    """Empty for the gateway itself."""
    return _client.get()


@contextmanager
def on_behalf_of(client: str) -> Iterator[None]:
    """The code inside, and the tasks that the code starts, work for this client."""
    token = _client.set(client)
    try:
        yield
    finally:
        _client.reset(token)


def batch_share(num_slots: int) -> int:
    """The most slots that batch requests may use together: one less than there are, where there are several.

    >>> [batch_share(n) for n in (1, 2, 8)]
    [1, 1, 7]
    """
    return max(1, num_slots - 1)


class Scheduler:
    """Decides the next user of a slot; ``take`` one, and ``give`` it back.

        interactive (a rollout waits) --> |
                                          | --> at most ``num_slots`` at once
        batch (judging)               --> |     at most ``batch_slots`` of them for batch

    Interactive goes before batch. Within a lane clients take turns, and each client's jobs are first come first served.
    A full lane refuses the client with the most waiting jobs there, not the last one to arrive.
    """

    def __init__(self, *, num_slots: int, batch_slots: int, lane_size: int = LANE_SIZE) -> None:
        self._lane_size = lane_size
        # by client, whose turn is next the first; no client without turns is kept
        self._waiting: dict[Lane, OrderedDict[str, OrderedDict[asyncio.Future[None], None]]] = {
            lane: OrderedDict() for lane in Lane
        }
        self._running: Counter[Lane] = Counter()
        self._mean_s = 0.05  # of a job, for telling when to come back
        self._num_refused = 0
        self.num_slots = num_slots
        self._batch_slots = batch_slots

    def resize(self, num_slots: int, batch_slots: int) -> None:
        """Change the number of slots, from the next turn on."""
        self.num_slots = num_slots
        self._batch_slots = batch_slots
        self._wake()

    def num_waiting(self, lane: Lane) -> int:
        return sum(map(len, self._waiting[lane].values()))

    @property
    def gauges(self) -> dict[str, float]:
        return {
            **{waiting_gauge(lane): float(self.num_waiting(lane)) for lane in Lane},
            **{f"queue_{lane}_running": float(self._running[lane]) for lane in Lane},
            "queue_mean_s": self._mean_s,
            "queue_refused": float(self._num_refused),
        }

    @property
    def num_running(self) -> int:
        return self._running.total()

    async def take(self, lane: Lane, wait_s: float | None = None) -> None:
        """Wait for a slot, for the current client. Cancelling the waiter gives up its place.

        Raises:
            CapacityError: too many wait, or no slot came free within ``wait_s``; says when to come back.
        """
        try:
            async with asyncio.timeout(wait_s):
                await self._take(lane, current_client())
        except TimeoutError:
            raise self._full(lane) from None

    def give(self, lane: Lane, held_s: float) -> None:
        """Give a slot back that was held for this long."""
        self._mean_s += 0.05 * (held_s - self._mean_s)
        self._running[lane] -= 1
        self._wake()

    async def _take(self, lane: Lane, client: str) -> None:
        waiting = self._waiting[lane]
        if self._may_start(lane) and not waiting:
            self._running[lane] += 1
            return
        if self.num_waiting(lane) >= self._lane_size:
            self._num_refused += 1
            longest = max(waiting.values(), key=len)
            if len(waiting.get(client, ())) + 1 >= len(longest):
                raise self._full(lane)
            newest, _ = longest.popitem()
            if not newest.done():
                newest.set_exception(self._full(lane))
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        waiting.setdefault(client, OrderedDict())[turn] = None
        try:
            await turn
        except asyncio.CancelledError:
            if turn in (own := waiting.get(client, OrderedDict())):
                del own[turn]
                if not own:
                    del waiting[client]
            elif not turn.cancelled() and turn.exception() is None:
                self._running[lane] -= 1  # the turn was given in the very moment of leaving: pass the turn on
                self._wake()
            raise

    def _full(self, lane: Lane) -> CapacityError:
        num_waiting = self.num_waiting(lane)
        drained_s = num_waiting * self._mean_s / self.num_slots
        return CapacityError(
            f"{num_waiting} executions are waiting in the {lane} lane for {self.num_slots} slots",
            retry_after_s=min(max(drained_s / 2, _RETRY_FROM_S), _RETRY_AT_MOST_S),
        )

    def _may_start(self, lane: Lane) -> bool:
        interactive, batch = self._running[Lane.INTERACTIVE], self._running[Lane.BATCH]
        if interactive + min(batch, self._batch_slots) >= self.num_slots:
            return False
        return lane is Lane.INTERACTIVE or (batch < self._batch_slots and not self._waiting[Lane.INTERACTIVE])

    def _wake(self) -> None:
        for lane in (Lane.INTERACTIVE, Lane.BATCH):
            waiting = self._waiting[lane]
            while waiting and self._may_start(lane):
                client, turns = waiting.popitem(last=False)
                turn, _ = turns.popitem(last=False)
                if turns:
                    waiting[client] = turns
                if not turn.done():
                    self._running[lane] += 1
                    turn.set_result(None)
