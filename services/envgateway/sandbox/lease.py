"""One slot's turn: the runs of one caller, one after the other (or a program and the tests that call it)."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Protocol

import structlog

from services.common.config.envgateway import SandboxConfig
from services.envgateway.sandbox.connection import SubmittedRun, SupervisorConnection
from services.envgateway.sandbox.jobs import Job
from services.envgateway.sandbox.records import ExecutionResult

log = structlog.get_logger()

_ANSWER_GRACE_S = 40.0  # a fork server's start, the wipe of a slot


class LeaseOwner(Protocol):
    """What a lease needs of the pool that gave it."""

    @property
    def config(self) -> SandboxConfig: ...
    @property
    def has_cpp(self) -> bool: ...

    async def submit(self, job: Job) -> SubmittedRun | ExecutionResult: ...
    def count(self, result: ExecutionResult) -> ExecutionResult: ...
    def slot_is_empty(self, patient: bool) -> None: ...
    def kill_supervisor(self) -> None: ...


class SlotLease:
    """One slot's turn. It is given back when the holder has left and all that ran under it has ended."""

    def __init__(self, pool: LeaseOwner, patient: bool = False) -> None:
        self._pool = pool
        self._patient = patient
        self._live: set[SubmittedRun] = set()
        self._left = False
        self._given_back = False
        self.config = pool.config
        self.has_cpp = pool.has_cpp

    async def start(self, job: Job) -> SubmittedRun:
        """A run that has begun; whoever holds it waits for its ``result``.

        A supervisor that cannot be had is a result of its own, INFRA_ERROR.
        """
        submitted = await self._pool.submit(replace(job, patient=True) if self._patient else job)
        if isinstance(submitted, ExecutionResult):
            failed = SubmittedRun(SupervisorConnection(), 0)
            failed.finish(self._pool.count(submitted), b"")
            return failed
        self._live.add(submitted)
        submitted.result.add_done_callback(lambda _: self._ended(submitted))
        return submitted

    async def run(self, job: Job) -> SubmittedRun:
        """A run that has ended. Cancelling the caller kills it."""
        run = await self.start(job)
        await self.wait(run, float(job.limits["wall_s"]))
        return run

    async def wait(self, run: SubmittedRun, limit_s: float) -> ExecutionResult:
        """Its result, within its own limit and a grace; a supervisor that does not answer is killed."""
        try:
            async with asyncio.timeout(limit_s + _ANSWER_GRACE_S):
                return await asyncio.shield(run.result)
        except TimeoutError:
            log.error("sandbox.supervisor_stalled", waited_s=limit_s + _ANSWER_GRACE_S)
            self._pool.kill_supervisor()
            return await run.result  # comes when the channel breaks
        except asyncio.CancelledError:
            run.cancel()
            raise

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
            self._pool.slot_is_empty(self._patient)
