"""Commands of the orchestrator to replicas and trainers, as plain records, and the queue in which they wait for one peer."""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass
from typing import Generic, TypeVar

from services.common.errors import RollmillError
from services.common.records.device_turn import DeviceTurn
from services.common.records.types import FetchPlan, TaskGroupOrder, WeightVersion

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class PlayGroup:
    order: TaskGroupOrder


@dataclass(frozen=True, slots=True)
class CancelGroup:
    task_group_id: str
    reason: str


@dataclass(frozen=True, slots=True)
class AnnounceVersion:
    version: WeightVersion
    plan: FetchPlan | None = None


@dataclass(frozen=True, slots=True)
class LeavePool:
    reason: str


@dataclass(frozen=True, slots=True)
class UseGateway:
    address: str


ReplicaCommand = PlayGroup | CancelGroup | AnnounceVersion | LeavePool | UseGateway | DeviceTurn


@dataclass(frozen=True, slots=True)
class PauseTraining:
    pass


@dataclass(frozen=True, slots=True)
class ResumeTraining:
    pass


@dataclass(frozen=True, slots=True)
class SaveCheckpoint:
    pass


@dataclass(frozen=True, slots=True)
class StopTraining:
    reason: str


TrainerCommand = PauseTraining | ResumeTraining | SaveCheckpoint | StopTraining | DeviceTurn


class Mailbox(Generic[T]):
    """A bounded queue with one reader: commands on their way to one peer.

    The sender never waits: a peer that does not read loses its stream (``overflow``) and must join again; after that the
    sender repeats all wanted commands. Independent of the kind of the items.
    """

    def __init__(self, capacity: int = 1024) -> None:
        self._capacity = capacity
        self._items: deque[T] = deque()
        self._changed = asyncio.Event()
        self._error: RollmillError | None = None
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

    def close(self, error: RollmillError | None = None) -> None:
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
