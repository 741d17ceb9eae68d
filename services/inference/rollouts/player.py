"""Plays task groups: one asyncio task per slot, each ending in a trajectory, a failure, or no record if cancelled.

    order -> slots not known yet -> wait for a free slot -> attempts -> record -> sink

Repeating an order is harmless: a slot that is played, or whose record was handed to the sink, is not played again.
The exceptions are cancelled slots and those refused as WEIGHTS_STALE: the dispatcher issues them again.
A failure is data and never a reward. Independent of gRPC.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable, Coroutine, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any, Protocol

import structlog

from services.common.errors import RollmillError, WeightsStaleError
from services.common.records.types import NO_TIMING, PlayedBy, RolloutFailure, TaskGroupOrder, Trajectory
from services.common.telemetry.accounts import TimeAccount
from services.common.telemetry.activities import ActivityName
from services.common.telemetry.components import ORCHESTRATOR, replica
from services.common.telemetry.log_events import LogEvent
from services.common.user_code import RAISED, name_and_text, place_of_error
from services.inference.rollouts.attempts import Attempts
from services.inference.rollouts.policies import ServedPolicy
from services.inference.rollouts.timing import RolloutClock
from services.inference.workflows.base import Endpoint, Gateway, Workflow

log = structlog.get_logger(__name__)

SlotKey = tuple[str, int]  # (task group, index)
Record = Trajectory | RolloutFailure
_Slot = Coroutine[Any, Any, None]

_REMEMBERED_SLOTS = 65536


class RecordSink(Protocol):
    """Takes a finished record; waits while too many are not yet durable."""

    async def send(self, record: Record) -> None: ...


@dataclass(slots=True)
class RolloutCounters:
    """Counters since the start of the process."""

    trajectories: int = 0
    failures: int = 0
    cancelled: int = 0
    repeated: int = 0


class RolloutPlayer:
    """Plays ``num_slots`` rollouts at once; further ordered rollouts wait here for a slot."""

    def __init__(
        self,
        *,
        workflows: Mapping[PlayedBy, Workflow],
        policies: Mapping[str, ServedPolicy],
        gateway: Gateway,
        sink: RecordSink,
        replica_id: str,
        num_slots: int,
        infra_retries: int,
        account: TimeAccount | None = None,
        endpoint: Endpoint | None = None,
        timed: bool = True,
        teachers: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        """``timed``: records carry the phases of their rollouts. ``teachers``: student policy -> teacher policy."""
        self._policies = policies
        self._sink = sink
        self._replica_id = replica_id
        self.num_slots = num_slots
        self._account = account or TimeAccount(replica(replica_id), num_lanes=num_slots)
        self._attempts = Attempts(
            workflows=workflows,
            policies=policies,
            gateway=gateway,
            endpoint=endpoint,
            infra_retries=infra_retries,
            account=self._account,
            teachers=teachers,
        )
        self._timed = timed
        self._slots = asyncio.Semaphore(num_slots)
        self._groups: dict[str, dict[int, asyncio.Task[None]]] = {}  # running rollouts
        self._tasks: set[asyncio.Task[None]] = set()  # running rollouts, and cancelled ones in their cleanup
        self._finished: OrderedDict[SlotKey, None] = OrderedDict()  # recorded lately, oldest first
        self._idle = asyncio.Event()
        self._idle.set()
        self.counters = RolloutCounters()

    # -- commands -----------------------------------------------------------------------------------------------

    def play(self, order: TaskGroupOrder) -> int:
        """Start the slots of an order that are new here; returns their number."""
        return self._start(order.task_group_id, order.indices, partial(self._slot, order, time.time()))

    def refuse(self, task_group_id: str, indices: Iterable[int], error: RollmillError) -> None:
        """Fail the slots of an order that this replica cannot play."""

        async def fail(index: int) -> None:
            await self._hand_over(self._failure(task_group_id, index, error.reason, error.message))

        self._start(task_group_id, indices, fail)

    def cancel(self, task_group_id: str) -> int:
        """Cancel the rollouts of a task group and forget the group; returns the number of cancelled rollouts."""
        tasks = self._groups.pop(task_group_id, {}).values()
        for task in tasks:
            task.cancel()
        self.counters.cancelled += len(tasks)
        return len(tasks)

    def stand_still(self) -> None:
        """Stop the clocks of all rollouts: no engine can compute."""
        self._attempts.stand_still()

    def go_on(self) -> None:
        """Let the clocks of all rollouts run again."""
        self._attempts.go_on()

    async def close(self) -> None:
        """Cancel all rollouts and wait until they end."""
        for task_group_id in list(self._groups):
            self.cancel(task_group_id)
        await self._idle.wait()  # ends: every task is cancelled, and cleanup does not wait

    async def wait_until_idle(self) -> None:
        """Return when no rollout runs or waits for a slot; each rollout has its own time limit."""
        await self._idle.wait()

    # -- state --------------------------------------------------------------------------------------------------

    @property
    def num_retries(self) -> int:
        """Attempts after a first one, since the start of the process."""
        return self._attempts.num_retries

    @property
    def num_running(self) -> int:
        return sum(len(group) for group in self._groups.values())

    @property
    def num_free_slots(self) -> int:
        return max(0, self.num_slots - self.num_running)

    @property
    def running_task_group_ids(self) -> tuple[str, ...]:
        return tuple(self._groups)

    # -- one slot -----------------------------------------------------------------------------------------------

    def _start(self, task_group_id: str, indices: Iterable[int], play: Callable[[int], _Slot]) -> int:
        playing = self._groups.setdefault(task_group_id, {})
        started = 0
        for index in indices:
            if index in playing or (task_group_id, index) in self._finished:
                self.counters.repeated += 1
                continue
            task = asyncio.create_task(play(index), name=f"rollout {task_group_id}/{index}")
            playing[index] = task
            self._tasks.add(task)
            # Not a `finally` in the task: one that is cancelled before its first step never enters its body.
            task.add_done_callback(partial(self._leave, task_group_id, index))
            started += 1
        if self._tasks:
            self._idle.clear()
        if not playing:
            del self._groups[task_group_id]
        return started

    async def _slot(self, order: TaskGroupOrder, accepted_at: float, index: int) -> None:
        async with self._slots:
            with self._account.lane(ActivityName.RUNNING_WORKFLOW):
                record = await self._record(order, index, RolloutClock(accepted_at, enabled=self._timed))
                if record is not None:
                    await self._hand_over(record)

    async def _hand_over(self, record: Record) -> None:
        with self._account.during(ActivityName.WAITING_FOR_ROOM_TO_SEND, on=ORCHESTRATOR):
            await self._sink.send(record)
        if isinstance(record, Trajectory):
            self.counters.trajectories += 1
        else:
            self.counters.failures += 1
            if record.reason == WeightsStaleError.reason:
                return
        self._remember((record.task_group_id, record.index))

    async def _record(self, order: TaskGroupOrder, index: int, clock: RolloutClock) -> Record | None:
        """The trajectory or the failure of a slot; None when an engine died and the process is about to end."""
        try:
            outcome = await self._attempts.play(order, index, clock)
        except RollmillError as error:
            if not all(p.engine.health().ok for p in self._policies.values()):
                return None  # no record: another replica plays the slot after this process has left
            return self._failure(order.task_group_id, index, error.reason, error.message, clock)
        except BaseException as error:  # a bug in a workflow, tool or reward of the user: this slot fails, others go on
            playing = self._groups.get(order.task_group_id, {}).get(index)
            if isinstance(error, asyncio.CancelledError) and playing is not asyncio.current_task():
                raise  # `cancel` asked for it; one that the user's code raises, as cancel scopes do, is a failure
            name, text = name_and_text(error)
            try:
                log.exception(LogEvent.ROLLOUT_CRASHED, task_group=order.task_group_id, index=index)
            except RAISED:  # the traceback asks the error for its name and text
                log.error(LogEvent.ROLLOUT_CRASHED, task_group=order.task_group_id, index=index, error=name)
            return self._failure(order.task_group_id, index, name, f"{place_of_error(error)}{text}", clock)
        return Trajectory(
            task_group_id=order.task_group_id,
            index=index,
            sequences=outcome.sequences,
            reward=outcome.reward,
            metrics=outcome.metrics,
            started_at=clock.started_at,
            finished_at=time.time(),
            replica_id=self._replica_id,
            timing=clock.timing(),
        )

    def _failure(
        self, task_group_id: str, index: int, reason: str, detail: str, clock: RolloutClock | None = None
    ) -> RolloutFailure:
        """A failure record; ``clock`` is the rollout's, if the rollout began."""
        log.warning(LogEvent.ROLLOUT_FAILED, task_group=task_group_id, index=index, reason=reason, detail=detail)
        return RolloutFailure(
            task_group_id=task_group_id,
            index=index,
            reason=reason,
            detail=detail,
            replica_id=self._replica_id,
            started_at=clock.started_at if clock else 0.0,
            finished_at=time.time(),
            timing=clock.timing() if clock else NO_TIMING,
        )

    def _remember(self, key: SlotKey) -> None:
        self._finished[key] = None
        while len(self._finished) > _REMEMBERED_SLOTS:
            self._finished.popitem(last=False)

    def _leave(self, task_group_id: str, index: int, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        playing = self._groups.get(task_group_id)
        if playing is not None and playing.get(index) is task:  # else: cancelled, and perhaps ordered again
            del playing[index]
            if not playing:
                del self._groups[task_group_id]
        if not self._tasks:
            self._idle.set()
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error(LogEvent.ROLLOUT_LOST, task_group=task_group_id, index=index, exc_info=error)
