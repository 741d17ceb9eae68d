"""Plays task groups: one asyncio task per slot, each ending in a trajectory, a failure, or (cancelled) nothing.

    order -> slots not known yet -> wait for a free slot -> workflow -> record -> sink
                                         ^        |
                                         '--------'  InfrastructureError: again, infra_retries times

Repeating an order is harmless: a slot that is played, or whose record was handed to the sink, is not played again.
The exceptions are cancelled slots and those refused as WEIGHTS_STALE: the dispatcher issues them again.
A failure is data and never a reward. Knows nothing of gRPC.
"""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections import OrderedDict
from collections.abc import Callable, Coroutine, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import structlog
import xxhash

from services.common.accounts import TimeAccount
from services.common.errors import (
    CapacityError,
    DeadlineError,
    EpisodeNotFoundError,
    InfrastructureError,
    MillraceError,
    WeightsStaleError,
)
from services.common.types import NO_TIMING, Purpose, RolloutFailure, TaskGroupOrder, Trajectory
from services.inference.policies import RolloutPolicy, ServedPolicy
from services.inference.scripts.base import Scene
from services.inference.timing import RolloutClock, TimedGateway
from services.inference.workflows.base import Endpoint, Gateway, Outcome, Workflow, WorkflowContext

log = structlog.get_logger(__name__)

SlotKey = tuple[str, int]  # (task group, index)
Record = Trajectory | RolloutFailure
_Slot = Coroutine[Any, Any, None]

_RETRYABLE = (InfrastructureError, EpisodeNotFoundError, CapacityError, DeadlineError)
_REMEMBERED_SLOTS = 65536
_RETRY_BASE_S = 0.2


class RecordSink(Protocol):
    """Takes a finished record; waits while too many are not yet durable."""

    async def send(self, record: Record) -> None: ...


@dataclass(slots=True)
class RolloutCounters:
    """Since the start of the process."""

    trajectories: int = 0
    failures: int = 0
    retries: int = 0
    cancelled: int = 0
    repeated: int = 0


class RolloutPlayer:
    """``num_slots`` rollouts at once; what is ordered beyond that waits here for a slot."""

    def __init__(
        self,
        *,
        workflows: Mapping[Purpose, Workflow],
        policies: Mapping[str, ServedPolicy],
        gateway: Gateway,
        sink: RecordSink,
        replica_id: str,
        num_slots: int,
        infra_retries: int,
        account: TimeAccount | None = None,
        endpoint: Endpoint | None = None,
        timed: bool = True,
    ) -> None:
        """``timed``: records say what their rollouts did and when."""
        self._workflows = workflows
        self._policies = policies
        self._gateway = gateway
        self._sink = sink
        self._replica_id = replica_id
        self.num_slots = num_slots
        self._infra_retries = infra_retries
        self._account = account or TimeAccount(f"replica/{replica_id}", num_lanes=num_slots)
        self._endpoint = endpoint
        self._timed = timed
        self._slots = asyncio.Semaphore(num_slots)
        self._groups: dict[str, dict[int, asyncio.Task[None]]] = {}  # what is being played
        self._tasks: set[asyncio.Task[None]] = set()  # these, and cancelled ones that still clean up
        self._finished: OrderedDict[SlotKey, None] = OrderedDict()  # recorded lately, oldest first
        self._idle = asyncio.Event()
        self._idle.set()
        self.counters = RolloutCounters()

    # -- commands -----------------------------------------------------------------------------------------------

    def play(self, order: TaskGroupOrder) -> int:
        """Start the slots of an order that are not known here; returns how many that are."""
        return self._start(order.task_group_id, order.indices, partial(self._slot, order, time.time()))

    def refuse(self, task_group_id: str, indices: Iterable[int], error: MillraceError) -> None:
        """Fail the slots of an order that cannot be played as it is."""

        async def fail(index: int) -> None:
            await self._hand_over(self._failure(task_group_id, index, error.reason, error.message))

        self._start(task_group_id, indices, fail)

    def cancel(self, task_group_id: str) -> int:
        """Stop playing a task group and forget it; returns how many rollouts that ended."""
        tasks = self._groups.pop(task_group_id, {}).values()
        for task in tasks:
            task.cancel()
        self.counters.cancelled += len(tasks)
        return len(tasks)

    async def close(self) -> None:
        """Cancel everything and wait for it."""
        for task_group_id in list(self._groups):
            self.cancel(task_group_id)
        await self._idle.wait()  # ends: every task was cancelled and none awaits anything on the way out

    async def wait_until_idle(self) -> None:
        """Return when nothing is played or waits for a slot; each rollout has its own time limit."""
        await self._idle.wait()

    # -- state --------------------------------------------------------------------------------------------------

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
            with self._account.lane("running the workflow"):
                record = await self._record(order, index, RolloutClock(accepted_at, enabled=self._timed))
                if record is not None:
                    await self._hand_over(record)

    async def _hand_over(self, record: Record) -> None:
        with self._account.during("waiting for room to send", on="orchestrator"):
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
            outcome = await self._play_in_time(order, index, clock)
        except MillraceError as error:
            if not all(p.engine.health().ok for p in self._policies.values()):
                return None  # no record: another replica plays the slot when this one's lease has run out
            return self._failure(order.task_group_id, index, error.reason, error.message, clock)
        except Exception as error:  # a bug in a workflow, tool or reward of the user: this slot fails, others go on
            log.exception("rollout.crashed", task_group=order.task_group_id, index=index)
            return self._failure(order.task_group_id, index, type(error).__name__, str(error), clock)
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

    async def _play_in_time(self, order: TaskGroupOrder, index: int, clock: RolloutClock) -> Outcome:
        limit = asyncio.timeout(order.timeout_s)
        try:
            async with limit:
                return await self._play_with_retries(order, index, clock)
        except TimeoutError:
            if not limit.expired():
                raise
            raise DeadlineError(
                f"rollout {order.task_group_id}/{index} was not done within {order.timeout_s:g} s (rollout.timeout_s)"
            ) from None

    async def _play_with_retries(self, order: TaskGroupOrder, index: int, clock: RolloutClock) -> Outcome:
        for attempt in range(self._infra_retries + 1):
            try:
                return await self._play_once(order, index, attempt, clock)
            except _RETRYABLE as error:
                if attempt == self._infra_retries:
                    raise
                self.counters.retries += 1
                clock.num_retries += 1
                log.warning(
                    "rollout.retry", task_group=order.task_group_id, index=index, attempt=attempt, error=str(error)
                )
                with self._account.during("pausing before another attempt") as wait, clock.phase("retry") as phase:
                    wait.note(error.message)
                    phase.detail = error.reason
                    await asyncio.sleep(_RETRY_BASE_S * 2**attempt * (0.5 + random.random()))
        raise AssertionError("unreachable: the last attempt returns or raises")

    async def _play_once(self, order: TaskGroupOrder, index: int, attempt: int, clock: RolloutClock) -> Outcome:
        self._check_versions(order.required_versions)
        slot = f"{order.task_group_id}/{index}"
        seed = xxhash.xxh3_64_intdigest(f"{order.seed}/{slot}".encode()) >> 1
        scene = Scene(order.task, order.purpose, seed)
        policies = {
            name: RolloutPolicy(
                policy,
                request_prefix=f"{slot}/{attempt}",
                seed=seed,
                account=self._account,
                scene=scene,
                clock=clock,
            )
            for name, policy in self._policies.items()
            if not order.policies or name in order.policies
        }
        context = WorkflowContext(
            policies=policies,
            gateway=TimedGateway(self._gateway, clock),
            sampling=order.sampling,
            seed=seed,
            purpose=order.purpose,
            endpoint=self._endpoint,
        )
        outcome = await self._workflows[order.purpose].run(order.task, context)
        _check_outcome(outcome, order.required_versions)
        return outcome

    def _check_versions(self, required: Mapping[str, int]) -> None:
        for name, number in required.items():
            policy = self._policies.get(name)
            if policy is None or policy.engine.version != number:
                held = "not served here" if policy is None else f"at version {policy.engine.version}"
                raise WeightsStaleError(f"policy {name} must be at version {number} and is {held}")

    def _failure(
        self, task_group_id: str, index: int, reason: str, detail: str, clock: RolloutClock | None = None
    ) -> RolloutFailure:
        """``clock``: of a rollout that began."""
        log.warning("rollout.failed", task_group=task_group_id, index=index, reason=reason, detail=detail)
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
            log.error("rollout.lost", task_group=task_group_id, index=index, exc_info=error)


def _check_outcome(outcome: Outcome, required: Mapping[str, int]) -> None:
    """A workflow's outcome must be usable, and an evaluation must not have seen a swap in its middle."""
    if not outcome.sequences:
        raise ValueError("the workflow returned no sequence")
    for value in (outcome.reward, *(sequence.reward for sequence in outcome.sequences)):
        if not math.isfinite(value):
            raise ValueError(f"the workflow returned the reward {value}; it must be a finite number")
    if not required:
        return
    for sequence in outcome.sequences:
        number = required.get(sequence.policy)
        for segment in sequence.segments:
            if number is not None and segment.is_policy and segment.weight_version != number:
                raise WeightsStaleError(
                    f"policy {sequence.policy} moved to version {segment.weight_version} during an evaluation of {number}"
                )
