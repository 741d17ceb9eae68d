"""Math-Verify in processes that can be killed: started on first use, replaced after an overrun or a crash.

Whose fault a grading's failure is decides what it is worth, for a policy must not get rid of a sample by an answer that
nobody can grade, nor pay for a machine that is busy or breaks:

    the answer takes more than ``timeout_s`` of CPU time     unparsed, 0
    the answer uses up memory or stack                       unparsed, 0
    the answer crashes its worker, twice (SIGSEGV, ...)      unparsed, 0
    the reference answer does any of these, also alone       grader failed: masked, for the row is of no use
    a worker is killed from outside, or ends by itself       tried again; three times: grader failed
    a worker gets no processor for long                      tried again; three times: grader failed

Time is the worker's CPU time, so a loaded machine makes gradings slow and not wrong. Before an answer is blamed, its
reference answer is compared with a harmless one, once. Knows nothing about tasks or rewards beyond an outcome.
"""

from __future__ import annotations

import asyncio
import signal
from collections import Counter, OrderedDict
from typing import Any

import structlog

from services.common.config.envgateway import MathRewardConfig
from services.common.errors import CapacityError, InfrastructureError
from services.envgateway.rewards.math_process import MathProcess, WorkerDied, WorkerOverdue, WorkerStarved
from services.envgateway.rewards.math_progress import ANSWER
from services.envgateway.rewards.result import RewardOutcome, RewardResult, grader_failed, unparsed
from services.envgateway.sandbox.bare import wire

log = structlog.get_logger()

MAX_COMPLETION_CHARS = 50_000  # of the end, where the answer is
_START_TIMEOUT_S = 60.0
_QUEUE_TIMEOUT_S = 60.0
_MAX_WAITING = 4096
_ATTEMPTS = 3
_MAX_SOUND = 4096
_HARMLESS = "$\\frac{355}{113}$"  # nothing that a text comparison could decide
_SURE_AFTER = 2  # crashes on the same answer, until it is the answer's doing
# What a process does to itself; SIGKILL and SIGTERM come from outside.
_OWN_DOING = {
    signal.SIGSEGV,
    signal.SIGBUS,
    signal.SIGABRT,
    signal.SIGFPE,
    signal.SIGILL,
    signal.SIGXCPU,
    signal.SIGSYS,
}


class MathPool:
    """``grade`` is the only way in. Unused, it holds no process."""

    def __init__(self, config: MathRewardConfig) -> None:
        self._config = config
        self._idle: asyncio.LifoQueue[MathProcess | None] = asyncio.LifoQueue()  # None: a place without a process
        for _ in range(config.num_workers):
            self._idle.put_nowait(None)
        self._workers: set[MathProcess] = set()
        self._waiting = 0
        self._sound: OrderedDict[str, bool] = OrderedDict()  # by reference answer
        self.counts: Counter[str] = Counter()

    async def grade(self, truth: str, completion: str) -> RewardResult:
        """Grade one completion.

        Raises:
            CapacityError: too many are waiting.
            InfrastructureError: no worker can be started.
        """
        result, is_blamed = await self._grade(truth, completion)
        if is_blamed and not await self._is_sound(truth):
            return grader_failed(f"the reference answer cannot be compared with anything: {result.detail}")
        return result

    async def _is_sound(self, truth: str) -> bool:
        if truth not in self._sound:
            alone, _ = await self._grade(truth, _HARMLESS)
            if alone.outcome is RewardOutcome.GRADER_FAILED:
                return False  # of no use now, perhaps for the machine's sake: not remembered
            self._sound[truth] = alone.outcome is not RewardOutcome.UNPARSED
            if len(self._sound) > _MAX_SOUND:
                self._sound.popitem(last=False)
        return self._sound[truth]

    async def _grade(self, truth: str, completion: str) -> tuple[RewardResult, bool]:
        """And whether the answer is blamed for a failure."""
        frame = wire.encode(
            {"kind": "grade"},
            [truth.encode(errors="replace"), completion[-MAX_COMPLETION_CHARS:].encode(errors="replace")],
        )
        worker = await self._borrow()
        crashes, why = 0, ""
        try:
            for _ in range(_ATTEMPTS):
                if worker is None:
                    worker = await self._start()
                try:
                    answer = await worker.ask(frame, self._config.timeout_s)
                except (WorkerOverdue, WorkerDied, WorkerStarved) as failure:
                    self._discard(worker)
                    worker = None
                    crashes += isinstance(failure, WorkerDied) and failure.signal in _OWN_DOING
                    result, why = self._judged(failure, crashes), str(failure)
                    if result is not None:
                        return result, result.outcome is RewardOutcome.UNPARSED
                    continue
                if answer["worn"]:
                    self._discard(worker)
                    worker = None
                    self.counts["worn"] += 1
                return _result(answer), answer["exhausted"]
            return grader_failed(f"a worker failed {_ATTEMPTS} times: {why}"), False
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

    def _judged(self, failure: WorkerOverdue | WorkerDied | WorkerStarved, crashes: int) -> RewardResult | None:
        """The result of a grading that did not end well; None when it should be tried again."""
        if isinstance(failure, WorkerOverdue):
            self.counts["timeouts"] += 1
            return _blamed(failure.stage, f"grading took more than {self._config.timeout_s:g} s")
        self.counts["starved" if isinstance(failure, WorkerStarved) else "crashes"] += 1
        log.warning("math_worker.lost", why=str(failure), workers=len(self._workers))
        if isinstance(failure, WorkerDied) and crashes == _SURE_AFTER:
            return _blamed(failure.stage, f"grading {failure} {_SURE_AFTER} times")
        return None

    async def _borrow(self) -> MathProcess | None:
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

    async def _start(self) -> MathProcess:
        worker = MathProcess()
        self._workers.add(worker)
        try:
            async with asyncio.timeout(_START_TIMEOUT_S):
                await worker.start()
        except (TimeoutError, WorkerDied) as error:
            self._discard(worker)
            raise InfrastructureError(f"the math grader does not start (is math-verify installed?): {error}") from error
        except asyncio.CancelledError:
            self._discard(worker)
            raise
        return worker

    def _discard(self, worker: MathProcess) -> None:
        self._workers.discard(worker)
        worker.kill()


def _blamed(stage: int, what: str) -> RewardResult:
    return unparsed(what) if stage == ANSWER else grader_failed(f"{what}, on the reference answer")


def _result(answer: dict[str, Any]) -> RewardResult:
    outcome = RewardOutcome(answer["outcome"])
    reward = 1.0 if outcome is RewardOutcome.CORRECT else 0.0
    return RewardResult(outcome=outcome, reward=reward, detail=answer["detail"])
