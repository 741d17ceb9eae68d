"""The queue that callers see: keys, deadlines, clients and lanes, in front of a runner that is here or elsewhere."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import overload

from services.common.aio import deadline
from services.common.errors import DeadlineError
from services.envgateway.calls import SharedCalls
from services.envgateway.judge.records import JudgeRequest, JudgeResult, Lane
from services.envgateway.queue.base import Job, JobResult, Runner, is_about_the_program
from services.envgateway.queue.clients import current_client
from services.envgateway.queue.codec import digest, encode_job
from services.envgateway.queue.turns import Turns
from services.envgateway.sandbox.records import ExecutionRequest, ExecutionResult

_STORED_RESULTS = 16384
_STORED_BYTES = 64 << 20


class FairQueue:
    """A ``JobQueue`` over any ``Runner``."""

    def __init__(self, runner: Runner, turns: Turns) -> None:
        self._runner = runner
        self._turns = turns
        self._shared: SharedCalls[JobResult] = SharedCalls(
            _STORED_RESULTS, keep=is_about_the_program, weigh=_weight, max_weight=_STORED_BYTES
        )
        self.counts: Counter[str] = Counter()

    @overload
    async def run(
        self, job: ExecutionRequest, *, lane: Lane, request_id: str, deadline_s: float
    ) -> ExecutionResult: ...
    @overload
    async def run(self, job: JudgeRequest, *, lane: Lane, request_id: str, deadline_s: float) -> JudgeResult: ...
    async def run(self, job: Job, *, lane: Lane, request_id: str, deadline_s: float) -> JobResult:
        # Another job under the same key is another job: nobody is given the result of a program that is not theirs.
        key = f"{request_id} {digest(encode_job(job))}" if request_id else ""
        client = current_client()
        try:
            async with deadline(deadline_s, f"execution {request_id or 'without id'} in the {lane} lane"):
                return await self._shared.run(key, lambda: self._in_turn(job, lane, client))
        except DeadlineError:
            self.counts["expired"] += 1
            raise

    def start(self) -> None:
        """Before the first job."""

    async def failed(self) -> None:
        """Until something broke that does not mend itself; raises it. Here nothing can: cancel the wait."""
        await asyncio.Event().wait()

    async def close(self) -> None:
        """After the last."""

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

    async def _in_turn(self, job: Job, lane: Lane, client: str) -> JobResult:
        async with self._turns.turn(lane, client):
            return await self._runner.run(job, lane)


def _weight(result: JobResult) -> int:
    """About the bytes that a stored result takes."""
    if isinstance(result, JudgeResult):
        return 500 + sum(500 + len(case.stdout) + len(case.stderr) + len(case.detail) for case in result.cases)
    return 500 + len(result.stdout) + len(result.stderr)
