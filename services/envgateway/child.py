"""A child interpreter that answers questions over a socket pair, in their order, and can be killed at any moment.

Frames are those of ``sandbox/bare/wire.py``; their contents are the caller's. The child is a fresh interpreter, by exec
and never by fork: no handler of grpc runs and no secret of our environment goes along.
"""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from services.common.errors import InfrastructureError
from services.common.system.child import DIE_WITH_PARENT
from services.common.system.processes import end
from services.envgateway.sandbox.bare import wire

_START_TIMEOUT_S = 60.0
_EXIT_WAIT_S = 1.0  # from the end of the channel to the end of the process
_ROOT = str(Path(__file__).resolve().parents[2])


class ChildFailed(Exception):
    """No answer, and the process is of no more use."""


class ChildDied(ChildFailed):
    """The child ended during this question. ``signal`` is 0 when the child exited by itself."""

    def __init__(self, signal: int = 0) -> None:
        super().__init__(f"died of signal {signal}" if signal else "ended")
        self.signal = signal


class ChildLost(ChildFailed):
    """The child failed before this question began, or on another question."""

    def __init__(self) -> None:
        super().__init__("failed on another question")


class Child(asyncio.Protocol):
    """One process, in a group of its own, and our end of its channel. ``start`` first; after any ``ChildFailed`` only
    ``kill`` is left.

    Questions are answered in order. The next ones wait in the socket, so that the child never waits for its owner.
    """

    def __init__(
        self, module: str, arguments: Sequence[str] = (), environment: Mapping[str, str] = MappingProxyType({})
    ) -> None:
        """Runs ``python -m module <descriptor> *arguments``; the child finds DIE_WITH_PARENT in its environment. Its
        first message says that it is ready."""
        self._channel, theirs = socket.socketpair()
        self._process = subprocess.Popen(
            [sys.executable, "-m", module, str(theirs.fileno()), *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            env={
                "PATH": os.defpath,
                "PYTHONPATH": os.pathsep.join([_ROOT, *filter(None, sys.path)]),
                DIE_WITH_PARENT: str(os.getpid()),
                **environment,
            },
            cwd="/",
            pass_fds=[theirs.fileno()],
            start_new_session=True,  # a terminal's Ctrl-C is for the gateway, which then ends this
        )
        theirs.close()
        self._frames = wire.FrameReader()
        self._transport: asyncio.Transport | None = None
        self._asked: deque[asyncio.Future[dict[str, Any]]] = deque()  # the first is being answered
        self.failure: ChildFailed | None = None
        self._loop = asyncio.get_running_loop()
        self._ready: asyncio.Future[dict[str, Any]] = self._loop.create_future()

    @property
    def pid(self) -> int:
        return self._process.pid

    async def start(self, what: str) -> None:
        """Wait until the child is ready; else the child is killed.

        Raises:
            InfrastructureError: the child ended, or is not ready in time; names ``what``.
        """
        try:
            async with asyncio.timeout(_START_TIMEOUT_S):
                self._transport, _ = await self._loop.create_connection(lambda: self, sock=self._channel)
                await self._ready
        except (TimeoutError, ChildFailed) as error:
            self.kill()
            raise InfrastructureError(f"{what} does not start (its log is the gateway's stderr): {error!r}") from error
        except asyncio.CancelledError:
            self.kill()
            raise

    async def ask(self, frame: bytes) -> dict[str, Any]:
        """The head of the answer to one question; has no deadline of its own. A caller that is cancelled leaves; the
        question is answered in vain.

        Raises:
            ChildFailed: the child died or was ended; ``ChildLost`` when the question was not its first open one.
        """
        if self.failure is not None or self._transport is None:
            raise ChildLost
        answer: asyncio.Future[dict[str, Any]] = self._loop.create_future()
        self._asked.append(answer)
        if len(self._asked) == 1:
            self._turn()
        self._transport.write(frame)
        return await answer

    def kill(self) -> None:
        """Kill the child and every process that the child started; waiting callers get ``ChildLost``."""
        self._fail(ChildLost())
        end(self._process, own_group=True)

    # -- for subclasses -------------------------------------------------------------------------------------------

    def _turn(self) -> None:
        """The child begins the first of the open questions, or has none."""

    def _fail(self, failure: ChildFailed) -> None:
        """End the channel. The first open question gets the failure, the others ``ChildLost``."""
        if self.failure is not None:
            return
        self.failure = failure
        if self._transport is not None:
            self._transport.abort()
        else:
            self._channel.close()
        asked = list(self._asked)
        self._asked.clear()
        self._turn()
        told = [(self._ready, failure), *((one, ChildLost() if n else failure) for n, one in enumerate(asked))]
        for answer, why in told:
            if not answer.done():
                answer.set_exception(why)
                answer.exception()  # retrieved: there may be no waiting caller

    def _exit_signal(self) -> int:
        """The signal that ended the child; 0 for an exit by itself, or a child that lives on."""
        try:
            return max(0, -self._process.wait(_EXIT_WAIT_S))
        except subprocess.TimeoutExpired:
            return 0

    # -- channel --------------------------------------------------------------------------------------------------

    def data_received(self, data: bytes) -> None:
        for head, _ in self._frames.feed(data):
            if not self._ready.done():
                self._ready.set_result(head)
            elif self._asked:
                answer = self._asked.popleft()
                if not answer.done():
                    answer.set_result(head)
                self._turn()
            else:  # no answer of ours: the channel is out of step
                self._fail(ChildDied())
                return

    def connection_lost(self, error: Exception | None) -> None:
        if self.failure is None:
            self._fail(ChildDied(self._exit_signal()))
