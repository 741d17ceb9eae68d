"""One slot's turn: the runs of one caller, one after the other."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Protocol

import structlog

from services.common.config.processes.envgateway import SandboxConfig
from services.common.telemetry.gateway_queue import Lane
from services.envgateway.sandbox.connection import SubmittedRun, SupervisorConnection
from services.envgateway.sandbox.jobs import Job
from services.envgateway.sandbox.records import ExecutionResult

log = structlog.get_logger()

_ANSWER_GRACE_S = 40.0  # a fork server's start, the wipe of a slot
_AGE_TIMEOUT_S = 5.0  # of a supervisor that is asked about a run


class LeaseOwner(Protocol):
    """Operations that a lease needs of its pool."""

    @property
    def config(self) -> SandboxConfig: ...
    @property
    def has_cpp(self) -> bool: ...

    async def submit(self, job: Job) -> SubmittedRun | ExecutionResult: ...
    def count(self, result: ExecutionResult) -> ExecutionResult: ...
    def kill_supervisor(self) -> None: ...


class SlotLease:
    """One slot's turn. The slot is free again when the holder has left and all its runs have ended."""

    def __init__(self, pool: LeaseOwner, lane: Lane, on_empty: Callable[[], None]) -> None:
        """``on_empty`` is called once, when no run uses the slot any more."""
        self._pool = pool
        self._lane = lane
        self._on_empty = on_empty
        self._live: set[SubmittedRun] = set()
        self._left = False
        self._given_back = False
        self.config = pool.config
        self.has_cpp = pool.has_cpp

    async def start(self, job: Job) -> SubmittedRun:
        """A run that has begun; the caller waits for its ``result``.

        An unavailable supervisor gives the result INFRA_ERROR.
        """
        submitted = await self._pool.submit(job if job.lane is self._lane else replace(job, lane=self._lane))
        if isinstance(submitted, ExecutionResult):
            failed = SubmittedRun(SupervisorConnection(), 0)
            failed.finish(self._pool.count(submitted), b"")
            return failed
        self._live.add(submitted)
        submitted.when_ended(self._ended)
        return submitted

    async def run(self, job: Job) -> SubmittedRun:
        """A run that has ended. Cancelling the caller kills the run."""
        run = await self.start(job)
        await self.wait(run, float(job.limits["wall_s"]))
        return run

    async def wait(self, run: SubmittedRun, limit_s: float) -> ExecutionResult:
        """The run's result. A supervisor that does not end the run within its limit and a grace is killed; the time that
        the run waits for a slot does not count."""
        loop = asyncio.get_running_loop()
        checks: list[asyncio.Task[None]] = []
        timer = loop.call_later(
            limit_s + _ANSWER_GRACE_S, lambda: checks.append(loop.create_task(self._check(run, limit_s)))
        )
        try:
            return await run.ended()
        except asyncio.CancelledError:
            run.cancel()
            raise
        finally:
            timer.cancel()
            for check in checks:
                check.cancel()

    async def _check(self, run: SubmittedRun, limit_s: float) -> None:
        """Ask about an overdue run until its end. After a kill of the supervisor the result comes from the broken
        channel."""
        while True:
            try:
                async with asyncio.timeout(_AGE_TIMEOUT_S):
                    age_s = await run.age()
            except TimeoutError:
                break
            left_s = limit_s + _ANSWER_GRACE_S - (age_s or 0.0)
            if left_s <= 0:
                break
            await asyncio.sleep(left_s)
        log.error("sandbox.supervisor_stalled", waited_s=limit_s + _ANSWER_GRACE_S)
        self._pool.kill_supervisor()

    def leave(self) -> None:
        """No more runs; leaving twice is fine."""
        self._left = True
        self._release_when_empty()

    def _ended(self, run: SubmittedRun) -> None:
        self._pool.count(run.result.result())
        self._live.discard(run)
        self._release_when_empty()

    def _release_when_empty(self) -> None:
        if self._left and not self._live and not self._given_back:
            self._given_back = True
            self._on_empty()
