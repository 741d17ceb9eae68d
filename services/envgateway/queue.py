"""The queue of executions and judgements in front of a sandbox, which is here or at workers (``extras/farm``).

run ──> equal to one in flight? ──> a place ──> runner: waits for a slot, runs the job ──> result
"""

from __future__ import annotations

import asyncio
import hashlib
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any, TypeAlias

from services.common.aio import deadline
from services.common.errors import DeadlineError
from services.common.telemetry.metrics import Lane
from services.envgateway.calls import SharedCalls, take_place
from services.envgateway.judge.judge import Judge
from services.envgateway.judge.records import JudgeRequest, JudgeResult
from services.envgateway.sandbox.bare.statuses import RunStatus
from services.envgateway.sandbox.pool import SandboxPool
from services.envgateway.sandbox.records import ExecutionRequest, ExecutionResult
from services.envgateway.sandbox.scheduler import Scheduler, current_client

Job: TypeAlias = ExecutionRequest | JudgeRequest
JobResult: TypeAlias = ExecutionResult | JudgeResult
# Waits for a slot, for so many seconds at most, and runs the job there; cancelling it kills the job.
Runner: TypeAlias = Callable[[Job, Lane, float | None], Awaitable[JobResult]]


def sandbox_runner(sandbox: SandboxPool, judge: Judge) -> Runner:
    """Runs jobs in this process's own sandbox."""

    async def run(job: Job, lane: Lane, wait_s: float | None) -> JobResult:
        if isinstance(job, JudgeRequest):
            return await judge.judge(job, lane, wait_s)
        return await sandbox.run(job, lane, wait_s)

    return run


def is_about_the_program(result: JobResult) -> bool:
    """False for a result that may be tried again and never becomes a reward."""
    status = result.verdict if isinstance(result, JudgeResult) else result.status
    return status.is_about_the_program


def infrastructure_failure(job: Job, detail: str) -> JobResult:
    """The result of a job that the machinery could not run."""
    if isinstance(job, JudgeRequest):
        return JudgeResult(verdict=RunStatus.INFRA_ERROR, detail=detail)
    return ExecutionResult(status=RunStatus.INFRA_ERROR, detail=detail)


class JobQueue:
    """Runs programs when their turn has come. Cancelling the caller removes a waiting job, or kills a running one.

    Equal judgements of one client in one lane that wait or run at the same time are one job, and so are equal executions
    under one key: without a key a tool call may draw numbers of its own. Nothing is kept after the last caller.
    """

    def __init__(self, runner: Runner, scheduler: Scheduler) -> None:
        self._runner = runner
        self._scheduler = scheduler
        self._shared: SharedCalls[JobResult] = SharedCalls()
        self.counts: Counter[str] = Counter()

    async def run(
        self,
        job: Job,
        *,
        lane: Lane,
        request_id: str,
        deadline_s: float,
        wait_s: float | None = None,
        places: asyncio.Semaphore | None = None,
    ) -> Any:
        """The ``ExecutionResult`` of an ``ExecutionRequest``, the ``JudgeResult`` of a ``JudgeRequest``.

        ``request_id`` is the key of an execution, empty for none. ``deadline_s`` bounds waiting and running together,
        ``wait_s`` waiting alone. The job takes one of ``places`` before it waits for its turn, and keeps it to its end.

        Raises:
            CapacityError: too many wait already, or no slot came free within ``wait_s``; says when to come back.
            DeadlineError: no result within ``deadline_s`` seconds; a running program was killed.
        """
        key = ""
        if isinstance(job, JudgeRequest):
            if digest := _digest(job):
                key = f"{lane} {wait_s} {digest} {current_client()}"
        elif request_id:  # another job under the same key is another job
            key = f"{request_id} {_digest(job)}"

        async def in_turn() -> JobResult:
            if places is not None:
                await take_place(places, wait_s, "other programs of this task are being judged")
            try:
                return await self._runner(job, lane, wait_s)
            finally:
                if places is not None:
                    places.release()

        self.counts["joined"] += key in self._shared
        try:
            async with deadline(deadline_s, f"execution {request_id or 'without id'} in the {lane} lane"):
                return await self._shared.run(key, in_turn)
        except DeadlineError:
            self.counts["expired"] += 1
            raise

    def start(self) -> None:
        """Call before the first job."""

    async def failed(self) -> None:
        """Wait for a permanent failure and raise the failure. None can occur here: cancel the wait."""
        await asyncio.Event().wait()

    async def close(self) -> None:
        """Call after the last job."""

    @property
    def gauges(self) -> dict[str, float]:
        """Numbers for GetStatus."""
        return {
            **self._scheduler.gauges,
            **{f"queue_{name}": float(count) for name, count in self.counts.items()},
        }

    @property
    def num_waiting(self) -> int:
        """Jobs without a slot."""
        return sum(map(self._scheduler.num_waiting, Lane))

    @property
    def num_slots(self) -> int:
        """Jobs that can run at once, here or at all workers together."""
        return self._scheduler.num_slots


def local_queue(sandbox: SandboxPool, judge: Judge) -> JobQueue:
    """The queue in front of this process's own sandbox."""
    return JobQueue(sandbox_runner(sandbox, judge), sandbox.scheduler)


def _digest(job: Job) -> str:
    """Of all that decides the result; empty for tests that are no data, which the judge refuses."""
    try:
        return hashlib.blake2b(repr(job).encode(errors="surrogatepass"), digest_size=16).hexdigest()
    except (ValueError, RecursionError):
        return ""
