"""One math worker as its owner sees it: a child whose CPU time is bounded for each question.

The time of a question runs from when the worker begins the question.
"""

from __future__ import annotations

import asyncio
import os

from services.envgateway.child import Child, ChildDied, ChildFailed
from services.envgateway.rewards.math.progress import IDLE, Progress, make_shared
from services.envgateway.sandbox.bare import procfs

_MODULE = "services.envgateway.rewards.math.worker"
_STARVED_FACTOR = 6.0  # wall time over CPU time, before a slow grading is the machine's fault
_SHORTEST_WAIT_S = 0.05
_SWITCHES = ("SYMPY_USE_CACHE",)  # of the libraries that a worker uses


class WorkerDied(ChildDied):
    """The worker ended during this question, at the stage ``stage``."""

    def __init__(self, signal: int, stage: int) -> None:
        super().__init__(signal)
        self.stage = stage


class WorkerOverdue(ChildFailed):
    """The worker has used the CPU time of a grading. ``stage`` names the stage that used the time."""

    def __init__(self, stage: int) -> None:
        super().__init__("is overdue")
        self.stage = stage


class WorkerStarved(ChildFailed):
    """The worker got no processor time: the machine is at fault."""

    def __init__(self) -> None:
        super().__init__("got no processor")


class MathProcess(Child):
    """``ask`` raises ``WorkerDied``, ``WorkerOverdue`` and ``WorkerStarved`` because of its question, or while the
    question was graded."""

    def __init__(self, cpu_s: float, grader: str = "") -> None:
        """``cpu_s``: CPU time of one question; ``grader``: another than Math-Verify."""
        shared = make_shared()
        switches = {name: os.environ[name] for name in _SWITCHES if name in os.environ}
        try:
            super().__init__(_MODULE, [str(shared), str(os.getpid()), grader], switches, pass_fds=[shared])
            self._progress = Progress(shared)
        finally:
            os.close(shared)
        self._cpu_s = cpu_s
        self._turned_s = 0.0  # when the first open question became the first
        self._watch: asyncio.TimerHandle | None = None

    def kill(self) -> None:
        super().kill()
        self._progress.close()

    def _turn(self) -> None:
        if self._watch is not None:
            self._watch.cancel()
            self._watch = None
        if self._asked:
            self._turned_s = self._loop.time()
            self._watch = self._loop.call_later(self._cpu_s, self._look)

    def _look(self) -> None:
        stage, question, cpu_before_s = self._progress.read()
        used_s = 0.0
        if question == self.num_answered + 1 and stage != IDLE:
            used_s = procfs.usage([self.pid]).cpu_s - cpu_before_s
        if used_s >= self._cpu_s:
            self._fail(WorkerOverdue(stage))
        elif self._loop.time() - self._turned_s >= _STARVED_FACTOR * self._cpu_s:
            self._fail(WorkerStarved())
        else:
            self._watch = self._loop.call_later(max(self._cpu_s - used_s, _SHORTEST_WAIT_S), self._look)

    def _death(self) -> WorkerDied:
        return WorkerDied(self._exit_signal(), self._progress.read()[0])
