"""Programs in, results out: a first-come queue before a fixed number of slots.

Knows nothing about how a program is confined. Each run goes

    queue (bounded, with a deadline) → slot → supervisor → result; the slot is free again when the supervisor says so,
    which is when it is empty, also for a run whose caller has gone.

A caller with several runs to do, one after the other, takes a slot's turn once (``lease``). Patient callers leave one
slot to the others. A program may be sent ahead of the queue: it waits at the supervisor, the urgent before the patient, and
begins in the moment when another has ended; how many are sent ahead is the business of who calls.
"""

from __future__ import annotations

import asyncio
import collections
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import structlog

from services.common.config.envgateway import SandboxConfig
from services.common.errors import CapacityError, InfrastructureError, SandboxRefusedError
from services.envgateway.sandbox.connection import SubmittedRun, SupervisorConnection
from services.envgateway.sandbox.cpp import run_cpp
from services.envgateway.sandbox.jobs import Job, profile_of, why_unusable
from services.envgateway.sandbox.launch import LaunchedSupervisor, SupervisorLauncher
from services.envgateway.sandbox.lease import SlotLease
from services.envgateway.sandbox.live import LiveSlots
from services.envgateway.sandbox.records import ExecutionRequest, ExecutionResult, ExecutionStatus

log = structlog.get_logger()

_RESTART_PAUSE_S = 1.0


class SandboxPool:
    """Create with ``start_before_threads``, before grpc or anything else starts a thread."""

    def __init__(self, config: SandboxConfig, launcher: SupervisorLauncher, supervisor: LaunchedSupervisor) -> None:
        self._config = config
        self._launcher = launcher
        self._supervisor: LaunchedSupervisor | None = supervisor
        self._connection: SupervisorConnection | None = None
        self._connecting = asyncio.Lock()
        self._free = config.num_slots
        self._most_patient = max(1, config.num_slots - 1)  # leases of the patient at once
        self._patient = 0
        self._ahead = 0  # programs that were sent ahead, running or waiting at the supervisor
        self._queue: collections.deque[asyncio.Future[None]] = collections.deque()
        self._patient_queue: collections.deque[asyncio.Future[None]] = collections.deque()
        self._last_start = 0.0
        self._mean_wall_s = 0.05
        self._closed = False
        self.tier = supervisor.tier
        self._has_cpp = bool(supervisor.facts["cpp"])
        self._memory_cgroup = int(supervisor.facts["memory_cgroup"])  # its version; 0 where processes are watched
        self.counts: collections.Counter[str] = collections.Counter()
        self.live = LiveSlots(self, config.num_live)

    @classmethod
    def start_before_threads(cls, config: SandboxConfig, tiers: tuple[str, ...] | None = None) -> SandboxPool:
        """Start the supervisor and find the tier; ``tiers`` narrows the choice.

        Raises:
            SandboxRefusedError: nothing that the config allows works here; names the line to add.
        """
        launcher = SupervisorLauncher(config, tiers)
        try:
            supervisor = launcher.launch()
        except BaseException:
            launcher.close()
            raise
        return cls(config, launcher, supervisor)

    async def run(
        self, request: ExecutionRequest, queue_timeout_s: float = 60.0, *, patient: bool = False, ahead: bool = False
    ) -> ExecutionResult:
        """Run one program. Cancelling the caller kills it.

        Raises:
            CapacityError: too many are waiting, or no slot came free in time; says when to come back.
        """
        unusable = why_unusable(request.code)
        if unusable:
            return ExecutionResult(status=ExecutionStatus.INVALID_REQUEST, detail=unusable)
        if request.language not in ("python", "cpp"):
            detail = f"no language {request.language!r}; there are python and cpp"
            return ExecutionResult(status=ExecutionStatus.INVALID_REQUEST, detail=detail)
        if request.language == "cpp":
            async with self.lease(queue_timeout_s, patient) as slot:
                return await run_cpp(slot, request)
        source = request.code.encode()
        job = Job(
            mode="echo" if request.echo else "program",
            profile=profile_of(source),
            source=source,
            stdin=request.stdin,
            limits=request.limits.within(self._config),
        )
        if ahead:
            return await self._run_ahead(job, patient)
        async with self.lease(queue_timeout_s, patient) as slot:
            return (await slot.run(job)).result.result()

    async def _run_ahead(self, job: Job, patient: bool) -> ExecutionResult:
        self._ahead += 1
        slot = SlotLease(_Ahead(self), patient)
        try:
            return (await slot.run(job)).result.result()
        finally:
            slot.leave()

    @asynccontextmanager
    async def lease(self, queue_timeout_s: float = 60.0, patient: bool = False) -> AsyncIterator[SlotLease]:
        """A slot's turn: runs within it start at once, or as soon as a program that was sent ahead has ended.

        Raises:
            CapacityError: too many are waiting, or no slot came free in time; says when to come back.
        """
        await self._take_slot(queue_timeout_s, patient)
        lease = SlotLease(self, patient)
        try:
            yield lease
        finally:
            lease.leave()

    @property
    def config(self) -> SandboxConfig:
        return self._config

    @property
    def has_cpp(self) -> bool:
        """Whether there is a C++ compiler."""
        return self._has_cpp

    async def submit(self, job: Job) -> SubmittedRun | ExecutionResult:
        """For leases: a run on its way, or why there is no supervisor."""
        connection = await self._connected()
        return connection if isinstance(connection, ExecutionResult) else connection.submit(job)

    async def close(self) -> None:
        """End all runs and the supervisor."""
        self._closed = True
        for waiting in (*self._queue, *self._patient_queue):
            waiting.cancel()
        if self._connection is not None:
            self._connection.close()
        if self._supervisor is not None:
            await asyncio.to_thread(self._supervisor.stop)
        self._launcher.close()

    @property
    def gauges(self) -> dict[str, float]:
        """Numbers for GetStatus."""
        busy = self._config.num_slots - self._free + self._ahead
        return {
            "sandbox_busy_slots": float(min(busy, self._config.num_slots)),
            "sandbox_memory_cgroup": float(self._memory_cgroup),
            "sandbox_queued": float(len(self._queue) + len(self._patient_queue)),
            **{f"sandbox_{status.lower()}": float(count) for status, count in self.counts.items()},
            **{f"sandbox_{name}": value for name, value in self.live.gauges.items()},
        }

    # -- slots --------------------------------------------------------------------------------------------------

    def _may_take(self, patient: bool) -> bool:
        return self._free > 0 and (not patient or self._patient < self._most_patient)

    def _take(self, patient: bool) -> None:
        self._free -= 1
        self._patient += patient

    async def _take_slot(self, timeout_s: float, patient: bool) -> None:
        queue = self._patient_queue if patient else self._queue
        if self._may_take(patient) and not queue:
            self._take(patient)
            return
        if len(queue) >= self._config.queue_size:
            raise self._full(f"{len(queue)} programs are waiting")
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        queue.append(turn)
        try:
            async with asyncio.timeout(timeout_s):
                await turn
        except (TimeoutError, asyncio.CancelledError) as left:
            if turn.done() and not turn.cancelled():
                self._give_slot(patient)  # it was our turn in the very moment of leaving
            elif turn in queue:
                queue.remove(turn)
            if isinstance(left, TimeoutError):
                raise self._full(f"no slot came free within {timeout_s:g} s") from None
            raise

    def _full(self, why: str) -> CapacityError:
        wait_s = max(0.1, self._mean_wall_s * (len(self._queue) + 1) / self._config.num_slots)
        return CapacityError(f"the sandbox is full: {why}", retry_after_s=min(wait_s, 30.0))

    def _give_slot(self, patient: bool) -> None:
        self._free += 1
        self._patient -= patient
        for next_patient, queue in ((False, self._queue), (True, self._patient_queue)):
            while queue and self._may_take(next_patient):
                turn = queue.popleft()
                if not turn.done():
                    self._take(next_patient)
                    turn.set_result(None)

    def ahead_has_ended(self) -> None:
        """A program that was sent ahead has ended."""
        self._ahead -= 1

    def slot_is_empty(self, patient: bool) -> None:
        """For leases: nothing runs under it any more."""
        self._give_slot(patient)

    def count(self, result: ExecutionResult) -> ExecutionResult:
        """For leases: a run has ended."""
        self._mean_wall_s += 0.05 * (result.wall_s - self._mean_wall_s)
        self.counts[result.status.value] += 1
        return result

    # -- the supervisor -----------------------------------------------------------------------------------------

    async def _connected(self) -> SupervisorConnection | ExecutionResult:
        """A live connection, or why there is none."""
        if self._connection is not None and self._connection.is_open:
            return self._connection
        async with self._connecting:
            if self._connection is not None and self._connection.is_open:
                return self._connection
            if self._connection is not None or self._supervisor is None:
                try:
                    await self._restart()
                except (InfrastructureError, SandboxRefusedError) as error:
                    log.error("sandbox.restart_failed", error=error.message)
                    return ExecutionResult(status=ExecutionStatus.INFRA_ERROR, detail=error.message)
            assert self._supervisor is not None
            channel = self._supervisor.channel
            channel.setblocking(False)
            loop = asyncio.get_running_loop()
            _, self._connection = await loop.create_unix_connection(SupervisorConnection, sock=channel)
            return self._connection

    async def _restart(self) -> None:
        dead, self._supervisor, self._connection = self._supervisor, None, None
        if self._closed:
            raise InfrastructureError("the sandbox is closed")
        if dead is not None:
            await asyncio.to_thread(dead.stop, 1.0)
        pause = self._last_start + _RESTART_PAUSE_S - time.monotonic()
        if pause > 0:
            await asyncio.sleep(pause)
        self._last_start = time.monotonic()
        self._supervisor = await asyncio.to_thread(self._launcher.launch)
        self.tier = self._supervisor.tier
        self._memory_cgroup = int(self._supervisor.facts["memory_cgroup"])
        self.counts["restarts"] += 1
        log.warning("sandbox.restarted", tier=self.tier)

    def kill_supervisor(self) -> None:
        """For leases: it does not answer. The next run starts another."""
        if self._supervisor is not None:
            self._supervisor.process.kill()


class _Ahead:
    """The ``LeaseOwner`` of one program that takes no slot's turn: the supervisor starts it when a slot is free."""

    def __init__(self, pool: SandboxPool) -> None:
        self._pool = pool
        self.config = pool.config
        self.has_cpp = pool.has_cpp

    async def submit(self, job: Job) -> SubmittedRun | ExecutionResult:
        return await self._pool.submit(job)

    def count(self, result: ExecutionResult) -> ExecutionResult:
        return self._pool.count(result)

    def slot_is_empty(self, patient: bool) -> None:
        self._pool.ahead_has_ended()

    def kill_supervisor(self) -> None:
        self._pool.kill_supervisor()
