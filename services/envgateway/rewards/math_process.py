"""One math worker as its owner sees it: started by exec, asked over a socket, killed when it must be.

Questions are answered in order. The next ones wait in the socket while the worker grades, so that it never waits for its
owner; each has its time from when the worker turns to it.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
from collections import deque
from typing import Any

from services.envgateway.child import spawn
from services.envgateway.rewards.math_progress import IDLE, Progress, make_shared
from services.envgateway.sandbox.bare import procfs, wire

_MODULE = "services.envgateway.rewards.math_worker"
_STARVED_FACTOR = 6.0  # wall time over CPU time, before a slow grading is the machine's fault
_SHORTEST_WAIT_S = 0.05
_SWITCHES = ("SYMPY_USE_CACHE",)  # of the libraries that a worker uses


class WorkerFailed(Exception):
    """No answer, and the process is of no more use."""


class WorkerDied(WorkerFailed):
    """It ended in the middle of this question. ``signal`` is 0 when it exited by itself."""

    def __init__(self, signal: int, stage: int) -> None:
        super().__init__(f"died of signal {signal}" if signal else "ended")
        self.signal = signal
        self.stage = stage


class WorkerOverdue(WorkerFailed):
    """It has used the CPU time of a grading. ``stage`` says on what."""

    def __init__(self, stage: int) -> None:
        super().__init__("is overdue")
        self.stage = stage


class WorkerStarved(WorkerFailed):
    """It has had no processor to work with: the machine's fault."""

    def __init__(self) -> None:
        super().__init__("got no processor")


class WorkerLost(WorkerFailed):
    """It failed on another question, before it turned to this one."""

    def __init__(self) -> None:
        super().__init__("failed on another question")


class MathProcess:
    """``start`` first. After any ``WorkerFailed`` only ``kill`` is left."""

    def __init__(self, cpu_s: float) -> None:
        """``cpu_s``: CPU time of one question."""
        shared = make_shared()
        switches = {name: os.environ[name] for name in _SWITCHES if name in os.environ}
        self._process, ours = spawn(_MODULE, [str(shared), str(os.getpid())], switches, pass_fds=[shared])
        self._progress = Progress(shared)
        os.close(shared)
        self._channel = ours
        self._frames = wire.FrameReader()
        self._cpu_s = cpu_s
        self._asked: deque[asyncio.Future[dict[str, Any]]] = deque()  # the first is being graded
        self._answered = 0
        self._turned_s = 0.0  # when the first of them became the first
        self._watch: asyncio.TimerHandle | None = None
        self._unsent = bytearray()
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(ours, self._read)
        self._ready: asyncio.Future[dict[str, Any]] = self._loop.create_future()
        self.failure: WorkerFailed | None = None

    @property
    def pid(self) -> int:
        return self._process.pid

    async def start(self) -> None:
        """Wait until it has imported what it needs. Raises ``WorkerFailed``."""
        await self._ready

    async def ask(self, frame: bytes) -> dict[str, Any]:
        """The answer to one question. A caller that is cancelled leaves; the question is graded in vain.

        Raises:
            WorkerDied, WorkerOverdue, WorkerStarved: because of this question, or while it was graded.
            WorkerLost: because of another.
        """
        if self.failure is not None:
            raise WorkerLost
        answer: asyncio.Future[dict[str, Any]] = self._loop.create_future()
        self._asked.append(answer)
        if len(self._asked) == 1:
            self._turn()
        self._unsent += frame
        self._write()
        return await answer

    def kill(self) -> None:
        """End it; whoever waits for it is told."""
        self._fail(WorkerLost())
        self._process.kill()
        self._process.wait()  # it was killed: this takes as long as the kernel needs
        self._progress.close()

    def _write(self) -> None:
        """As much as the socket takes; the rest when it takes more."""
        try:
            sent = self._channel.send(self._unsent)
        except BlockingIOError:
            sent = 0
        except (BrokenPipeError, ConnectionResetError):  # it has ended: reading says how
            sent = len(self._unsent)
        del self._unsent[:sent]
        if self._unsent:
            self._loop.add_writer(self._channel, self._write)
        else:
            self._loop.remove_writer(self._channel)

    def _read(self) -> None:
        try:
            data = self._channel.recv(65536)
        except BlockingIOError:
            return
        except ConnectionResetError:
            data = b""
        if not data:
            self._fail(self._death())
            return
        for head, _ in self._frames.feed(data):
            if head["kind"] == "ready":
                self._ready.set_result(head)
                continue
            self._answered += 1
            answer = self._asked.popleft()
            if not answer.done():
                answer.set_result(head)
            self._turn()

    # -- time -----------------------------------------------------------------------------------------------------

    def _turn(self) -> None:
        """The worker turns to the first of what was asked."""
        if self._watch is not None:
            self._watch.cancel()
            self._watch = None
        if self._asked and self.failure is None:
            self._turned_s = self._loop.time()
            self._watch = self._loop.call_later(self._cpu_s, self._look)

    def _look(self) -> None:
        stage, question, cpu_before_s = self._progress.read()
        used_s = 0.0
        if question == self._answered + 1 and stage != IDLE:
            used_s = procfs.usage([self.pid]).cpu_s - cpu_before_s
        if used_s >= self._cpu_s:
            self._fail(WorkerOverdue(stage))
        elif self._loop.time() - self._turned_s >= _STARVED_FACTOR * self._cpu_s:
            self._fail(WorkerStarved())
        else:
            self._watch = self._loop.call_later(max(self._cpu_s - used_s, _SHORTEST_WAIT_S), self._look)

    # -- ends -----------------------------------------------------------------------------------------------------

    def _fail(self, failure: WorkerFailed) -> None:
        if self.failure is not None:
            return
        self.failure = failure
        self._loop.remove_reader(self._channel)
        self._loop.remove_writer(self._channel)
        self._channel.close()
        self._turn()
        asked = list(self._asked)
        self._asked.clear()
        told = [
            (self._ready, failure),
            *((answer, failure if n == 0 else WorkerLost()) for n, answer in enumerate(asked)),
        ]
        for answer, why in told:
            if not answer.done():
                answer.set_exception(why)
                answer.exception()  # retrieved: nobody has to be waiting

    def _death(self) -> WorkerDied:
        """Its channel is closed, so it has ended or is about to."""
        try:
            code = self._process.wait(1.0)
        except subprocess.TimeoutExpired:
            code = 0
        return WorkerDied(-code if code < 0 else 0, self._progress.read()[0])
