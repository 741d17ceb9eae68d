"""The queue that callers see: keys, deadlines, clients and lanes, in front of a runner that is here or elsewhere."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

from services.common.aio import deadline
from services.common.errors import DeadlineError
from services.common.telemetry.gateway_queue import Lane
from services.envgateway.calls import SharedCalls, take_place
from services.envgateway.judge.records import JudgeRequest, JudgeResult
from services.envgateway.queue.base import Job, JobResult, Runner, is_about_the_program
from services.envgateway.queue.clients import current_client
from services.envgateway.queue.codec import digest, encode_job
from services.envgateway.queue.turns import Turns

_STORED_RESULTS = 16384
_STORED_BYTES = 64 << 20


class FairQueue:
    """A ``JobQueue`` over any ``Runner``.

    Equal judgements of one client in one lane that wait or run at the same time are one job. Nothing of them is kept
    after the last caller. Executions are never shared: a tool call may draw numbers of its own.
    """

    def __init__(self, runner: Runner, turns: Turns) -> None:
        self._runner = runner
        self._turns = turns
        self._shared: SharedCalls[JobResult] = SharedCalls(
            _STORED_RESULTS, keep=is_about_the_program, weigh=_weight, max_weight=_STORED_BYTES
        )
        self._judging: SharedCalls[JobResult] = SharedCalls(0)
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
    ) -> Any:  # as ``JobQueue`` says
        # Another job under the same key is another job: no caller gets the result of another program.
        body = _digest(job) if request_id or isinstance(job, JudgeRequest) else ""
        key = f"{request_id} {body}" if request_id else ""
        client = current_client()
        try:
            async with deadline(deadline_s, f"execution {request_id or 'without id'} in the {lane} lane"):
                return await self._shared.run(key, lambda: self._run(job, body, lane, client, wait_s, places))
        except DeadlineError:
            self.counts["expired"] += 1
            raise

    async def _run(
        self, job: Job, body: str, lane: Lane, client: str, wait_s: float | None, places: asyncio.Semaphore | None
    ) -> JobResult:
        async def in_turn() -> JobResult:
            if places is None:
                return await self._turns.run(lane, client, lambda: self._runner.run(job, lane), wait_s)
            await take_place(places, wait_s, "other programs of this task are being judged")
            try:
                return await self._turns.run(lane, client, lambda: self._runner.run(job, lane), wait_s)
            finally:
                places.release()

        if not isinstance(job, JudgeRequest):
            return await in_turn()
        key = f"{lane} {wait_s} {body} {client}" if body else ""
        self.counts["joined"] += key in self._judging
        return await self._judging.run(key, in_turn)

    def start(self) -> None:
        """Call before the first job."""

    async def failed(self) -> None:
        """Wait for a permanent failure and raise the failure. None can occur here: cancel the wait."""
        await asyncio.Event().wait()

    async def close(self) -> None:
        """Call after the last job."""

    @property
    def gauges(self) -> dict[str, float]:
        return {
            **self._turns.gauges,
            "queue_stored_results": float(len(self._shared)),
            **{f"queue_{name}": float(count) for name, count in self.counts.items()},
        }

    @property
    def num_waiting(self) -> int:
        return self._turns.num_waiting

    @property
    def num_slots(self) -> int:
        return self._turns.num_slots


def _digest(job: Job) -> str:
    """Of all that decides the result; empty for tests that are no data, which the judge refuses."""
    try:
        return digest(encode_job(job))
    except (ValueError, TypeError, RecursionError):
        return ""


def _weight(result: JobResult) -> int:
    """About the bytes that a stored result takes."""
    if isinstance(result, JudgeResult):
        return 500 + sum(500 + len(case.stdout) + len(case.stderr) + len(case.detail) for case in result.cases)
    return 500 + len(result.stdout) + len(result.stderr)
