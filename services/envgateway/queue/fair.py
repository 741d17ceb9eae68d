"""The queue that callers see: keys, deadlines, clients and lanes, in front of a runner that is here or elsewhere."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable
from typing import Any

from services.common.aio import deadline
from services.common.errors import DeadlineError
from services.common.telemetry.gateway_queue import Lane
from services.envgateway.calls import SharedCalls
from services.envgateway.judge.records import JudgeRequest, JudgeResult
from services.envgateway.memory.runs import RunMemory
from services.envgateway.memory.verdicts import JudgeMemory
from services.envgateway.queue.base import Job, JobResult, Runner, is_about_the_program
from services.envgateway.queue.clients import current_client
from services.envgateway.queue.codec import digest, encode_job
from services.envgateway.queue.turns import Turns

_STORED_RESULTS = 16384
_STORED_BYTES = 64 << 20


class FairQueue:
    """A ``JobQueue`` over any ``Runner``."""

    # asked before a turn is waited for
    verdicts: JudgeMemory | None = None
    runs: RunMemory | None = None

    def __init__(self, runner: Runner, turns: Turns) -> None:
        self._runner = runner
        self._turns = turns
        self._shared: SharedCalls[JobResult] = SharedCalls(
            _STORED_RESULTS, keep=is_about_the_program, weigh=_weight, max_weight=_STORED_BYTES
        )
        self.counts: Counter[str] = Counter()

    async def run(
        self, job: Job, *, lane: Lane, request_id: str, deadline_s: float, wait_s: float | None = None
    ) -> Any:  # as ``JobQueue`` says
        # Another job under the same key is another job: no caller gets the result of another program.
        key = f"{request_id} {digest(encode_job(job))}" if request_id else ""
        client = current_client()
        try:
            async with deadline(deadline_s, f"execution {request_id or 'without id'} in the {lane} lane"):
                return await self._shared.run(key, lambda: self._run(job, lane, client, wait_s))
        except DeadlineError:
            self.counts["expired"] += 1
            raise

    async def _run(self, job: Job, lane: Lane, client: str, wait_s: float | None) -> JobResult:
        def in_turn() -> Awaitable[Any]:
            return self._turns.run(lane, client, lambda: self._runner.run(job, lane), wait_s)

        if isinstance(job, JudgeRequest):
            if self.verdicts is not None:
                return await self.verdicts.run(job, lane, client, in_turn)
        elif self.runs is not None:
            return await self.runs.run(job, lane, client, in_turn)
        result: JobResult = await in_turn()
        return result

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


def _weight(result: JobResult) -> int:
    """About the bytes that a stored result takes."""
    if isinstance(result, JudgeResult):
        return 500 + sum(500 + len(case.stdout) + len(case.stderr) + len(case.detail) for case in result.cases)
    return 500 + len(result.stdout) + len(result.stderr)
