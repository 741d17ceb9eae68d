"""Math-Verify in processes that can be killed: started on first use, replaced after an overrun or a crash.

The cause of a failed grading decides its reward: a policy must neither drop a sample by an answer that cannot be
graded, nor pay for a machine that is busy or broken:

    the answer takes more than ``timeout_s`` of CPU time     unparsed, 0
    the answer uses up memory or stack                       unparsed, 0
    the answer crashes its worker, twice (SIGSEGV, ...)      unparsed, 0
    the reference answer does any of these, alone            grader failed: masked, for the row is unusable
    a worker is killed from outside, or exits by itself      tried again; three times: grader failed
    a worker gets no processor for long                      tried again; three times: grader failed

Time is the worker's CPU time, so a loaded machine makes gradings slow and not wrong. Before an answer is blamed, its
reference answer is compared with a harmless one, once.
"""

from __future__ import annotations

import asyncio
import signal
from collections import Counter, OrderedDict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import structlog

from services.common.config.envgateway import ScorerConfig
from services.common.errors import CapacityError, InfrastructureError
from services.common.text.thoughts import after_thoughts
from services.envgateway.calls import RewardOutcome, RewardResult, grader_failed, take_place, unparsed
from services.envgateway.child import Child, ChildDied, ChildFailed
from services.envgateway.rewards.math_worker import COMPARISON
from services.envgateway.sandbox.bare import procfs, wire

log = structlog.get_logger()


_MODULE = "services.envgateway.rewards.math_worker"
_STARVED_FACTOR = 6.0  # wall time over CPU time, before a slow grading is the machine's fault
_SHORTEST_WAIT_S = 0.05


class WorkerOverdue(ChildFailed):
    """The worker has used the CPU time of a grading."""


class WorkerStarved(ChildFailed):
    """The worker got no processor time: the machine is at fault."""


class MathProcess(Child):
    """``ask`` raises ``ChildDied``, ``WorkerOverdue`` and ``WorkerStarved`` because of its question, or while the
    question was graded."""

    def __init__(self, cpu_s: float, grader: str = "") -> None:
        """``cpu_s``: CPU time of one question; ``grader``: another than Math-Verify."""
        super().__init__(_MODULE, [grader])
        self._cpu_s = cpu_s
        self._turned_s = 0.0  # when the first open question became the first
        self._cpu_before_s = 0.0  # used by the worker until then
        self._watch: asyncio.TimerHandle | None = None

    def _turn(self) -> None:
        if self._watch is not None:
            self._watch.cancel()
            self._watch = None
        if self._asked:
            self._turned_s, self._cpu_before_s = self._loop.time(), procfs.usage([self.pid]).cpu_s
            self._watch = self._loop.call_later(self._cpu_s, self._look)

    def _look(self) -> None:
        used_s = procfs.usage([self.pid]).cpu_s - self._cpu_before_s
        if used_s >= self._cpu_s:
            self._fail(WorkerOverdue("is overdue"))
        elif self._loop.time() - self._turned_s >= _STARVED_FACTOR * self._cpu_s:
            self._fail(WorkerStarved("got no processor"))
        else:
            self._watch = self._loop.call_later(max(self._cpu_s - used_s, _SHORTEST_WAIT_S), self._look)


MAX_COMPLETION_CHARS = 50_000  # of the end, where the answer is
_QUEUE_TIMEOUT_S = 60.0
_MAX_WAITING = 4096
_ATTEMPTS = 3
_MAX_SOUND = 4096
_HARMLESS = "$\\frac{355}{113}$"  # no verdict by a text comparison
_SURE_AFTER = 2  # crashes on the same answer, until the answer is at fault
# Signals that a process causes itself; SIGKILL and SIGTERM come from outside.
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
    """Pool of math workers. ``grade`` is the only entry; an unused pool holds no process."""

    def __init__(self, config: ScorerConfig, grader: str = "") -> None:
        """``grader``: another than Math-Verify."""
        self._config = config
        self._grader = grader
        self._workers: set[MathProcess] = set()
        self._idle: list[MathProcess] = []
        self._room = asyncio.Semaphore(config.num_workers)
        self._waiting = 0
        self._sound: OrderedDict[str, bool] = OrderedDict()  # by reference answer
        self.counts: Counter[str] = Counter()

    @property
    def pids(self) -> list[int]:
        """Process ids of live workers."""
        return [worker.pid for worker in self._workers]

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

    async def failure(self, check: bytes, answer: bytes) -> str:
        """The fault of a program's answer; an answer that uses up the time or memory of its comparison has one.

        Raises:
            CapacityError: too many are waiting.
            InfrastructureError: the comparison was ended by others than its answer.
        """
        result, _ = await self._ask(wire.encode({"kind": "grade"}, [check, answer]))
        if result.outcome is RewardOutcome.GRADER_FAILED:
            raise InfrastructureError(f"an answer was not compared: {result.detail}")
        return result.detail

    async def close(self) -> None:
        for worker in self._workers:
            worker.kill()
        self._workers.clear()
        self._idle.clear()

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
        said = after_thoughts(completion)[-MAX_COMPLETION_CHARS:]
        texts = [text.encode(errors="replace") for text in (truth, said)]
        return await self._ask(wire.encode({"kind": "grade"}, texts))

    async def _ask(self, frame: bytes) -> tuple[RewardResult, bool]:
        failed = crashes = 0
        while True:
            try:
                async with self._place():
                    answer = await self._answered(frame)
                self.counts["worn"] += answer["worn"]
                outcome = RewardOutcome(answer["outcome"])
                result = RewardResult(outcome=outcome, reward=answer["reward"], detail=answer["detail"])
                return result, answer["exhausted"]
            except ChildFailed as failure:
                failed += 1
                crashes += isinstance(failure, ChildDied) and failure.signal in _OWN_DOING
                if (judged := self._judged(failure, crashes)) is not None:
                    return judged, True
                if failed == _ATTEMPTS:
                    return grader_failed(f"a worker {failure}, {_ATTEMPTS} times"), False

    async def _answered(self, frame: bytes) -> dict[str, Any]:
        """The answer of an idle worker, or of a new one.

        Raises:
            ChildFailed: the worker failed, or an earlier question that its caller has left made it fail.
            InfrastructureError: no worker starts.
        """
        worker = self._idle.pop() if self._idle else MathProcess(self._config.timeout_s, self._grader)
        is_fit = False
        try:
            if worker not in self._workers:
                self._workers.add(worker)
                await worker.start(f"the grader {self._grader or 'math'}")
            answer = await worker.ask(frame)
            is_fit = not answer["worn"]
        except asyncio.CancelledError:
            is_fit = worker.failure is None  # it may go on with the question
            raise
        finally:
            if is_fit:
                self._idle.append(worker)
            else:
                self._workers.discard(worker)
                worker.kill()
        return answer

    def _judged(self, failure: ChildFailed, crashes: int) -> RewardResult | None:
        """The result of a grading that did not end well; None when the grading should be tried again."""
        if isinstance(failure, WorkerOverdue):
            self.counts["timeouts"] += 1
            return unparsed(f"grading took more than {self._config.timeout_s:g} s")
        self.counts["starved" if isinstance(failure, WorkerStarved) else "crashes"] += 1
        log.warning("math_worker.lost", why=str(failure))
        if isinstance(failure, ChildDied) and crashes == _SURE_AFTER:
            return unparsed(f"the worker {failure}, {_SURE_AFTER} times")
        return None

    @asynccontextmanager
    async def _place(self) -> AsyncIterator[None]:
        if self._waiting >= _MAX_WAITING:
            raise CapacityError(f"{self._waiting} answers wait to be graded", retry_after_s=1.0)
        self._waiting += 1
        try:
            await take_place(self._room, _QUEUE_TIMEOUT_S, f"no grader came free within {_QUEUE_TIMEOUT_S:g} s")
        finally:
            self._waiting -= 1
        try:
            yield
        finally:
            self._room.release()


def comparisons() -> MathPool:
    """For the judge: compares answers of programs."""
    return MathPool(ScorerConfig(num_workers=2, timeout_s=5.0), COMPARISON)
