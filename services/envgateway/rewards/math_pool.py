"""Math-Verify in processes that can be killed: started on first use, replaced after a deadline or a crash.

Knows nothing about tasks or rewards beyond an outcome. A worker serves one grading at a time; while it is lent out
nobody else has it, so a killed one can never answer another's question.
"""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import structlog

from services.common.config.envgateway import MathRewardConfig
from services.common.errors import CapacityError, InfrastructureError
from services.envgateway.rewards.result import RewardOutcome, RewardResult, grader_failed
from services.envgateway.sandbox.bare import wire

log = structlog.get_logger()

MAX_COMPLETION_CHARS = 50_000  # of the end, where the answer is
_START_TIMEOUT_S = 60.0
_QUEUE_TIMEOUT_S = 60.0
_MAX_WAITING = 4096
_ATTEMPTS = 2
_ROOT = str(Path(__file__).resolve().parents[3])


class WorkerDied(Exception):
    """The worker ended without an answer."""


class MathPool:
    """``grade`` is the only way in. Unused, it holds no process."""

    def __init__(self, config: MathRewardConfig) -> None:
        self._config = config
        self._idle: asyncio.LifoQueue[_Worker | None] = asyncio.LifoQueue()  # None: a place without a process
        for _ in range(config.num_workers):
            self._idle.put_nowait(None)
        self._workers: set[_Worker] = set()
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
                except WorkerDied:
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

    async def _borrow(self) -> _Worker | None:
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

    async def _start(self) -> _Worker:
        worker = _Worker()
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

    def _discard(self, worker: _Worker) -> None:
        self._workers.discard(worker)
        worker.kill()


class _Worker:
    """One process and the gateway's end of its channel."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        # vfork and exec: no fork handler of grpc runs, and no secret of our environment goes along
        self._process = subprocess.Popen(
            [sys.executable, "-m", "services.envgateway.rewards.math_worker", str(theirs.fileno())],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            env={"PATH": os.defpath, "PYTHONPATH": os.pathsep.join([_ROOT, *filter(None, sys.path)])},
            cwd="/",
            pass_fds=[theirs.fileno()],
            start_new_session=True,  # a terminal's Ctrl-C is for the gateway, which then ends this
        )
        theirs.close()
        ours.setblocking(False)
        self._channel = ours
        self._frames = wire.FrameReader()

    async def start(self) -> None:
        """Wait until it has imported what it needs."""
        await self._answer()

    async def ask(self, frame: bytes) -> dict[str, Any]:
        try:
            await asyncio.get_running_loop().sock_sendall(self._channel, frame)
        except (BrokenPipeError, ConnectionResetError) as error:
            raise WorkerDied from error
        return await self._answer()

    def kill(self) -> None:
        self._channel.close()
        self._process.kill()
        self._process.wait()  # it was killed: this takes as long as the kernel needs

    async def _answer(self) -> dict[str, Any]:
        while True:
            try:
                data = await asyncio.get_running_loop().sock_recv(self._channel, 65536)
            except ConnectionResetError as error:
                raise WorkerDied from error
            if not data:
                raise WorkerDied
            for head, _ in self._frames.feed(data):
                return head
