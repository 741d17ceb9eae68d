"""Pool of slots: runs programs and leases of many runs on a fixed number of slots.

    lease → queue (bounded, with a deadline) → supervisor → results; the slot is free when the holder has left and the
                                               supervisor has reported the end of all its runs

A program is a lease with one run.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import structlog

from services.common.config.envgateway import SandboxConfig
from services.common.errors import CapacityError, InfrastructureError, SandboxRefusedError
from services.common.system.processes import KILLED_S
from services.common.telemetry.metrics import Lane
from services.envgateway.sandbox.bare.statuses import RunStatus
from services.envgateway.sandbox.launch import LaunchedSupervisor, SupervisorLauncher
from services.envgateway.sandbox.lease import (
    Job,
    SubmittedRun,
    SupervisorConnection,
    profile_of,
    why_unusable,
)
from services.envgateway.sandbox.records import ExecutionRequest, ExecutionResult
from services.envgateway.sandbox.scheduler import Scheduler, batch_share

# --- C++: compiles a program once in the sandbox, and runs the binary as often as asked.


_MESSAGE_BYTES = 16_384
_ARTEFACT_BYTES = 32 << 20
_PROCESSES = 16
COMPILE_TIME_S = 20.0  # wall clock and CPU
_COMPILE_MEMORY_BYTES = 1 << 30
_COMPILER_LIMITS = {
    RunStatus.TIME_LIMIT: "the compiler took too long",
    RunStatus.MEMORY_LIMIT: "the compiler used too much memory",
    RunStatus.OUTPUT_LIMIT: "the compiler printed too much, or its program is too large",
}


async def compile_cpp(slot: SlotLease, code: str) -> bytes | ExecutionResult:
    """The program, or why there is none: COMPILE_ERROR, INVALID_REQUEST without a compiler, INFRA_ERROR."""
    if not slot.has_cpp:
        detail = "this gateway has no C++ compiler (g++); it runs python"
        return ExecutionResult(status=RunStatus.INVALID_REQUEST, detail=detail)
    limits: dict[str, float | int] = {
        "wall_s": COMPILE_TIME_S,
        "cpu_s": COMPILE_TIME_S,
        "memory_bytes": _COMPILE_MEMORY_BYTES,
        "processes": _PROCESSES,
        "output_bytes": _MESSAGE_BYTES,
        "answer_bytes": _ARTEFACT_BYTES,
        "file_bytes": _ARTEFACT_BYTES,
        "open_files": 64,
        "disk_bytes": 4 * _ARTEFACT_BYTES,
        "num_files": 256,
    }
    result = await slot.run(Job(mode="compile", profile="native", source=code.encode(), limits=limits))
    if result.status is RunStatus.OK:
        return result.answer
    if result.status in (RunStatus.INFRA_ERROR, RunStatus.CANCELLED):
        return result
    return ExecutionResult(
        status=RunStatus.COMPILE_ERROR,
        stderr=result.stderr,
        truncated=result.truncated,
        wall_s=result.wall_s,
        cpu_s=result.cpu_s,
        peak_memory_bytes=result.peak_memory_bytes,
        tier=result.tier,
        detail=_COMPILER_LIMITS.get(result.status, "the program does not compile"),
    )


def cpp_job(artefact: bytes, stdin: bytes, limits: dict[str, float | int]) -> Job:
    """One run of a compiled program."""
    return Job(mode="binary", profile="native", source=artefact, stdin=stdin, limits=limits)


# --- Turns of slots.


log = structlog.get_logger()
_RETRY_S = 2.0  # of a live process, while all places are taken
_ANSWER_GRACE_S = 40.0  # a fork server's start, the wipe of a slot


class SlotLease:
    """One slot's turn. The slot is free again when the holder has left and all its runs have ended."""

    def __init__(self, pool: SandboxPool, on_empty: Callable[[], None], counts: Counter[str]) -> None:
        """``on_empty`` is called once, when no run uses the slot any more; ``counts`` has ended runs by status."""
        self._pool = pool
        self._on_empty = on_empty
        self._counts = counts
        self._live: set[SubmittedRun] = set()
        self._left = False
        self._given_back = False
        self.config = pool.config
        self.has_cpp = pool.has_cpp

    async def start(self, job: Job) -> SubmittedRun:
        """A run that has begun; the caller waits for its ``result``, which is an INFRA_ERROR without a supervisor."""
        run = await self._pool.submit(job)
        self._live.add(run)
        run.result.add_done_callback(lambda _: self._ended(run))  # before any that waits goes on
        return run

    async def run(self, job: Job) -> ExecutionResult:
        """The result of a run. Cancelling the caller kills the run."""
        return await self.wait(await self.start(job), float(job.limits["wall_s"]))

    async def wait(self, run: SubmittedRun, limit_s: float) -> ExecutionResult:
        """The run's result. A supervisor that does not end the run within its limit and a grace is killed; the result is
        INFRA_ERROR then. Cancelling the caller kills the run.

        Raises:
            InfrastructureError: a killed supervisor has not ended in time.
        """
        try:
            await asyncio.wait([run.result], timeout=limit_s + _ANSWER_GRACE_S)
            if not run.result.done():
                log.error("sandbox.supervisor_stalled", waited_s=limit_s + _ANSWER_GRACE_S)
                self._pool.kill_supervisor()  # which breaks the channel, and so ends the run
                await asyncio.wait([run.result], timeout=KILLED_S)
            if not run.result.done():
                raise InfrastructureError(
                    f"the sandbox's supervisor was killed and has not ended within {KILLED_S:g} s: look for a process that the "
                    "kernel holds up (ps, state D), and start the gateway again"
                )
        except asyncio.CancelledError:
            run.cancel()
            raise
        return run.result.result()

    def leave(self) -> None:
        """No more runs; leaving twice is fine."""
        self._left = True
        self._release_when_empty()

    def _ended(self, run: SubmittedRun) -> None:
        self._counts[run.result.result().status.lower()] += 1
        self._live.discard(run)
        self._release_when_empty()

    def _release_when_empty(self) -> None:
        if self._left and not self._live and not self._given_back:
            self._given_back = True
            self._on_empty()


class LiveSlots:
    """The places of live processes, which are the supervisor's last slots."""

    def __init__(self, pool: SandboxPool, num: int) -> None:
        self._pool = pool
        self._num = num
        self._taken = 0
        self.config = pool.config
        self.counts: Counter[str] = Counter()

    def lease(self) -> SlotLease:
        """A place, until the lease is left and its process has ended.

        Raises:
            CapacityError: all are taken; says when to come back.
        """
        if self._taken == self._num:
            self.counts["refused"] += 1
            raise CapacityError(f"all {self._num} live processes of the sandbox are in use", retry_after_s=_RETRY_S)
        self._taken += 1
        return SlotLease(self._pool, self._give_back, self.counts)

    @property
    def gauges(self) -> dict[str, float]:
        """Numbers for GetStatus."""
        return {"live_processes": float(self._taken), **{f"live_{k}": float(n) for k, n in self.counts.items()}}

    def _give_back(self) -> None:
        self._taken -= 1


# --- The pool.


_RESTART_PAUSE_S = 1.0


class SandboxPool:
    """Create with ``start_before_threads``, before grpc or anything else starts a thread."""

    def __init__(
        self, config: SandboxConfig, launcher: SupervisorLauncher, supervisor: LaunchedSupervisor | SandboxRefusedError
    ) -> None:
        self.config = config
        self._launcher = launcher
        self.base_dir = launcher.base_dir
        self.user_ids = launcher.user_ids
        self._refused = supervisor if isinstance(supervisor, SandboxRefusedError) else None
        self._supervisor = supervisor if isinstance(supervisor, LaunchedSupervisor) else None
        self._connection: SupervisorConnection | None = None
        self._connecting: asyncio.Task[SupervisorConnection] | None = None
        self.scheduler = Scheduler(num_slots=config.num_slots, batch_slots=batch_share(config.num_slots))
        self._last_start = 0.0
        self._closed = False
        self.tier = "none" if self._supervisor is None else self._supervisor.tier
        self.has_cpp = self._supervisor is not None and bool(self._supervisor.facts["cpp"])
        self.counts: Counter[str] = Counter()
        self.live = LiveSlots(self, config.num_live)

    @classmethod
    def start_before_threads(
        cls, config: SandboxConfig, tiers: tuple[str, ...] | None = None, *, is_optional: bool = False
    ) -> SandboxPool:
        """Start the supervisor and find the tier; ``tiers`` narrows the choice. ``is_optional``: where no tier works, the
        pool refuses every program instead.

        Raises:
            SandboxRefusedError: no tier that the config allows works here; names the line to add.
        """
        launcher = SupervisorLauncher(config, tiers)
        supervisor: LaunchedSupervisor | SandboxRefusedError
        try:
            supervisor = launcher.launch()
        except SandboxRefusedError as refused:
            if not is_optional:
                launcher.close()
                raise
            log.warning("sandbox.absent", why=refused.message, effect="programs are refused; the recipe names none")
            supervisor = refused
        except BaseException:
            launcher.close()
            raise
        return cls(config, launcher, supervisor)

    async def run(
        self, request: ExecutionRequest, lane: Lane = Lane.INTERACTIVE, wait_s: float | None = None
    ) -> ExecutionResult:
        """Run one program. Cancelling the caller kills the program.

        Raises:
            CapacityError: too many are waiting, or no slot came free within ``wait_s``; gives a time to retry.
        """
        if unusable := why_unusable(request.code, request.language):
            return ExecutionResult(status=RunStatus.INVALID_REQUEST, detail=unusable)
        source, limits = request.code.encode(), request.limits.within(self.config)
        async with self.lease(lane, wait_s) as slot:
            if request.language == "cpp":
                artefact = await compile_cpp(slot, request.code)
                if isinstance(artefact, ExecutionResult):
                    return artefact
                job = cpp_job(artefact, request.stdin, limits)
            else:
                mode = "echo" if request.echo else "program"
                job = Job(mode=mode, profile=profile_of(source), source=source, stdin=request.stdin, limits=limits)
            return await slot.run(job)

    @asynccontextmanager
    async def lease(self, lane: Lane = Lane.INTERACTIVE, wait_s: float | None = None) -> AsyncIterator[SlotLease]:
        """A slot's turn: its runs start at once.

        Raises:
            CapacityError: too many are waiting, or no slot came free within ``wait_s``; gives a time to retry.
        """
        await self.scheduler.take(lane, wait_s)
        began = time.monotonic()
        lease = SlotLease(self, lambda: self.scheduler.give(lane, time.monotonic() - began), self.counts)
        try:
            yield lease
        finally:
            lease.leave()

    @property
    def supervisor_pid(self) -> int | None:
        """None while a dead supervisor is replaced."""
        return None if self._supervisor is None else self._supervisor.process.pid

    async def submit(self, job: Job) -> SubmittedRun:
        """For leases: a run on its way.

        Raises:
            SandboxRefusedError: the pool is one without a sandbox.
        """
        if self._refused is not None:
            raise SandboxRefusedError(f"this gateway runs no programs: {self._refused.message}")
        return (await self._connected()).submit(job)

    async def close(self) -> None:
        """End all runs and the supervisor."""
        self._closed = True
        if self._connecting is not None:
            await asyncio.wait([self._connecting])  # else a supervisor that is starting would be left behind
        if self._connection is not None:
            self._connection.close()
        if self._supervisor is not None:
            await asyncio.to_thread(self._supervisor.stop)
        self._launcher.close()

    @property
    def gauges(self) -> dict[str, float]:
        """Numbers for GetStatus."""
        return {
            "sandbox_busy_slots": float(self.scheduler.num_running),
            "sandbox_queued": float(sum(map(self.scheduler.num_waiting, Lane))),
            **{f"sandbox_{name}": float(count) for name, count in self.counts.items()},
            **{f"sandbox_{name}": value for name, value in self.live.gauges.items()},
        }

    # -- the supervisor -----------------------------------------------------------------------------------------

    async def _connected(self) -> SupervisorConnection:
        """A connection, open where there is a supervisor. A caller that leaves ends none that others wait for."""
        if self._connection is not None and self._connection.is_open:
            return self._connection
        if self._connecting is None or self._connecting.done():
            self._connecting = asyncio.create_task(self._connect(), name="sandbox: connect to the supervisor")
        return await asyncio.shield(self._connecting)

    async def _connect(self) -> SupervisorConnection:
        if self._connection is not None or self._supervisor is None:
            try:
                await self._restart()
            except (InfrastructureError, SandboxRefusedError) as error:
                log.error("sandbox.restart_failed", error=error.message)
                return SupervisorConnection(error.message)
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
        self.counts["restarts"] += 1
        log.warning("sandbox.restarted", tier=self.tier, pid=self.supervisor_pid)

    def kill_supervisor(self) -> None:
        """For leases: the supervisor does not answer. The next run starts another one."""
        if self._supervisor is not None:
            self._supervisor.process.kill()
