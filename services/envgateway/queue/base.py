"""Interface of a queue of jobs, independent of lanes' rules, of Redis and of grpc."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Protocol, TypeAlias, overload

from services.common.telemetry.gateway_queue import Lane
from services.envgateway.judge.records import JudgeRequest, JudgeResult
from services.envgateway.sandbox.bare.statuses import RunStatus
from services.envgateway.sandbox.records import ExecutionRequest, ExecutionResult

Job: TypeAlias = ExecutionRequest | JudgeRequest
JobResult: TypeAlias = ExecutionResult | JudgeResult


class JobQueue(Protocol):
    """Runs programs when their turn has come. Cancelling the caller removes a waiting job, or kills a running one.

    ``request_id`` is the key of the job, empty for none: the same job under the same key joins the running one or gets
    the stored result. Equal judgements of one client in one lane that wait or run at the same time are one job.
    ``deadline_s`` bounds waiting and running together, ``wait_s`` waiting alone. A job takes one of ``places`` before
    it waits for its turn, and keeps it to its end.

    Raises:
        CapacityError: too many wait already, or no slot came free within ``wait_s``; says when to come back.
        DeadlineError: no result within ``deadline_s`` seconds; a running program was killed.
    """

    @overload
    async def run(
        self, job: ExecutionRequest, *, lane: Lane, request_id: str, deadline_s: float, wait_s: float | None = None
    ) -> ExecutionResult: ...
    @overload
    async def run(
        self,
        job: JudgeRequest,
        *,
        lane: Lane,
        request_id: str,
        deadline_s: float,
        wait_s: float | None = None,
        places: asyncio.Semaphore | None = None,
    ) -> JudgeResult: ...
    @property
    def gauges(self) -> Mapping[str, float]:
        """Numbers for GetStatus."""
        ...

    @property
    def num_waiting(self) -> int:
        """Jobs without a slot."""
        ...

    @property
    def num_slots(self) -> int:
        """Jobs that can run at once, here or at all workers together."""
        ...


class Runner(Protocol):
    """Runs a job whose turn has come. Cancelling the caller kills the job."""

    async def run(self, job: Job, lane: Lane) -> JobResult: ...


class Executor(Protocol):
    """Runs one program (``SandboxPool``)."""

    async def run(self, request: ExecutionRequest, lane: Lane = Lane.INTERACTIVE) -> ExecutionResult: ...


class Judging(Protocol):
    """Judges one program (``Judge``)."""

    async def judge(self, request: JudgeRequest, lane: Lane = Lane.BATCH) -> JudgeResult: ...


class LocalRunner:
    """Runs jobs in this process's own sandbox."""

    def __init__(self, sandbox: Executor, judge: Judging) -> None:
        self._sandbox = sandbox
        self._judge = judge

    async def run(self, job: Job, lane: Lane) -> JobResult:
        if isinstance(job, JudgeRequest):
            return await self._judge.judge(job, lane)
        return await self._sandbox.run(job, lane)


def is_about_the_program(result: JobResult) -> bool:
    """False for a result that may be tried again and never becomes a reward."""
    if isinstance(result, JudgeResult):
        return result.verdict.is_about_the_program
    return result.status.is_about_the_program


def infrastructure_failure(job: Job, detail: str) -> JobResult:
    """The result of a job that the machinery could not run."""
    if isinstance(job, JudgeRequest):
        return JudgeResult(verdict=RunStatus.INFRA_ERROR, detail=detail)
    return ExecutionResult(status=RunStatus.INFRA_ERROR, detail=detail)
