"""Math-Verify in processes that can be killed: started on first use, replaced after a deadline or a crash.

Knows nothing about tasks or rewards beyond an outcome. A worker serves one grading at a time; while it is lent out
nobody else has it, so a killed one can never answer another's question.
"""

from __future__ import annotations

import asyncio
from collections import Counter

import structlog

from services.common.config.envgateway import MathRewardConfig
from services.common.errors import CapacityError, InfrastructureError
from services.envgateway.child import Child, ChildDied
from services.envgateway.rewards.result import RewardOutcome, RewardResult, grader_failed
from services.envgateway.sandbox.bare import wire

log = structlog.get_logger()

MAX_COMPLETION_CHARS = 50_000  # of the end, where the answer is
_START_TIMEOUT_S = 60.0
_QUEUE_TIMEOUT_S = 60.0
_MAX_WAITING = 4096
_ATTEMPTS = 2
_MODULE = "services.envgateway.rewards.math_worker"


class MathPool:
    """``grade`` is the only way in. Unused, it holds no process."""

    def __init__(self, config: MathRewardConfig) -> None:
        self._config = config
        self._idle: asyncio.LifoQueue[Child | None] = asyncio.LifoQueue()  # None: a place without a process
        for _ in range(config.num_workers):
            self._idle.put_nowait(None)
        self._workers: set[Child] = set()
        self._waiting = 0
        self.counts: Counter[str] = Counter()

    async def grade(self, truth: str, completion: str) -> RewardResult:
        """Grade one completion. An answer that kills its worker twice, or takes too long, is a grader failure.

        Raises:
            CapacityError: too many are waiting.
            InfrastructureError: no worker can be started.
        """
        frame = wire.encode(
            {"kind": "grade"},
            [truth.encode(errors="replace"), completion[-MAX_COMPLETION_CHARS:].encode(errors="replace")],
        )
        worker = await self._borrow()
        try:
            for attempt in range(_ATTEMPTS):
                if worker is None:
                    worker = await self._start()
                try:
                    async with asyncio.timeout(self._config.timeout_s):
                        answer = await worker.ask(frame)
                except TimeoutError:
                    self._discard(worker)
                    worker = None
                    self.counts["timeouts"] += 1
                    return grader_failed(f"grading took longer than {self._config.timeout_s:g} s")
                except ChildDied:
                    self._discard(worker)
                    worker = None
                    self.counts["crashes"] += 1
                    log.warning("math_worker.died", attempt=attempt + 1)
                    continue
                outcome = RewardOutcome(answer["outcome"])
                reward = 1.0 if outcome is RewardOutcome.CORRECT else 0.0
                return RewardResult(outcome=outcome, reward=reward, detail=answer["detail"])
            return grader_failed(f"the answer ended its worker {_ATTEMPTS} times")
        except asyncio.CancelledError:
            if worker is not None:  # it is busy with a question that nobody waits for
                self._discard(worker)
                worker = None
            raise
        finally:
            self._idle.put_nowait(worker)

    async def close(self) -> None:
        for worker in list(self._workers):
            self._discard(worker)

    async def _borrow(self) -> Child | None:
        if self._waiting >= _MAX_WAITING:
            raise CapacityError(f"{self._waiting} answers wait to be graded", retry_after_s=1.0)
        self._waiting += 1
        try:
            async with asyncio.timeout(_QUEUE_TIMEOUT_S):
                return await self._idle.get()
        except TimeoutError:
            raise CapacityError(f"no grader came free within {_QUEUE_TIMEOUT_S:g} s", retry_after_s=1.0) from None
        finally:
            self._waiting -= 1

    async def _start(self) -> Child:
        worker = Child(_MODULE)
        self._workers.add(worker)
        try:
            async with asyncio.timeout(_START_TIMEOUT_S):
                await worker.next_answer()  # it has imported what it needs
        except (TimeoutError, ChildDied) as error:
            self._discard(worker)
            raise InfrastructureError(f"the math grader does not start (is math-verify installed?): {error}") from error
        except asyncio.CancelledError:
            self._discard(worker)
            raise
        return worker

    def _discard(self, worker: Child) -> None:
        self._workers.discard(worker)
        worker.kill()
