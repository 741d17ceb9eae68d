"""Threads for functions of others, which may stall, and a watchdog that logs the stack of what is blocked.

asyncio's own executor has a few threads, and a function that never returns takes one for good: a handful of stalled
environments or rewards would stop every other one, and the process's end. Here each call has a thread of its own, and one that
its caller has given up on gives its place to the next.

An observer outside only sees silence; the stack in the log has the line of code:

    watchdog thread --call_soon_threadsafe--> loop: answered?   no, for ``LIMIT_S``: log the stack of the loop's thread
                    --look------------------> threads: a call is overdue?  yes: log it
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import functools
import inspect
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from types import FunctionType
from typing import Any

import structlog

from services.common.telemetry.logs import LogEvent

log = structlog.get_logger()

LIMIT_S = 5.0
LOOK_S = 0.5


@dataclass(frozen=True, slots=True)
class StuckThread:
    """A thread that has been in one call for too long."""

    what: str
    seconds: float
    thread_id: int


class Watchdog:
    """Watches the running loop from ``start`` to ``stop``; logs each stall once, and its end."""

    def __init__(
        self,
        *,
        limit_s: float = LIMIT_S,
        look_s: float = LOOK_S,
        threads: str = "",
        stuck: Callable[[], StuckThread | None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``stuck``: the call that is overdue in the threads of this name, if one is."""
        self._limit_s = limit_s
        self._look_s = look_s
        self._threads = threads
        self._stuck = stuck
        self._clock = clock
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None
        self._looked_at = clock()
        self._asked_at: float | None = None  # when the loop was asked for a sign of life that it has not given yet
        self._loop_thread = 0
        self._told_loop = False
        self._told_stuck = False

    def start(self, loop: asyncio.AbstractEventLoop | None = None) -> None:
        """Watch a loop (left out: the running one) from a thread of its own."""
        watched = loop or asyncio.get_running_loop()
        self._looked_at = self._clock()
        self._thread = threading.Thread(target=self._run, args=(watched,), name="watchdog", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._stopping.set()
        if self._thread is not None:
            self._thread.join(self._look_s * 4)

    def _run(self, loop: asyncio.AbstractEventLoop) -> None:
        while not self._stopping.wait(self._look_s):
            try:
                self.look(loop.call_soon_threadsafe)
            except RuntimeError:
                return  # the loop is closed: the process is leaving

    def look(self, call_soon: Callable[[Callable[[], None]], object]) -> None:
        """Ask the loop for a sign of life if the last one came; report an overdue call."""
        now = self._clock()
        if now - self._looked_at > self._limit_s and self._asked_at is not None:
            self._asked_at = now  # this thread stood still as well: the whole process did
        self._looked_at = now
        if self._asked_at is None:
            self._asked_at = now
            call_soon(self._answer)
        self._look_at_loop(now)
        self._look_at_threads()

    def _answer(self) -> None:
        self._loop_thread = threading.get_ident()
        self._asked_at = None

    def _look_at_loop(self, now: float) -> None:
        asked_at = self._asked_at  # the other thread may clear it
        blocked_s = 0.0 if asked_at is None else now - asked_at
        if blocked_s >= self._limit_s and not self._told_loop:
            self._told_loop = True
            log.error(LogEvent.LOOP_BLOCKED, blocked_s=round(blocked_s, 1), stack=stack_of(self._loop_thread))
        elif blocked_s < self._limit_s and self._told_loop:
            self._told_loop = False
            log.warning("watchdog.loop_runs_again")

    def _look_at_threads(self) -> None:
        stuck = self._stuck()
        if stuck is not None and not self._told_stuck:
            log.error(
                LogEvent.THREAD_STUCK,
                thread=self._threads,
                what=stuck.what,
                seconds=round(stuck.seconds, 1),
                stack=stack_of(stuck.thread_id),
            )
        elif stuck is None and self._told_stuck:
            log.warning("watchdog.thread_returned", thread=self._threads)
        self._told_stuck = stuck is not None


def stack_of(thread_id: int) -> str:
    """The stack of a thread of this process; empty after its end."""
    frame = sys._current_frames().get(thread_id)
    return "" if frame is None else "".join(traceback.format_stack(frame)[-12:])


@dataclass(slots=True, eq=False)
class _Call:
    function: Callable[..., Any]
    answer: asyncio.Future[Any]
    begun_at: float = field(default_factory=time.monotonic)
    thread_id: int = 0
    abandoned: bool = False

    def work(self, bound: Callable[[], Any], ended: Callable[[_Call], None]) -> None:
        """Run in a thread of its own; ``ended`` is called there before the answer is given."""
        self.thread_id = threading.get_ident()
        result, error = None, None
        try:
            result = bound()
        except BaseException as raised:  # noqa: BLE001 - any error goes to the waiting caller
            error = raised
        ended(self)
        with contextlib.suppress(RuntimeError):  # the loop is closed: no caller waits
            self.answer.get_loop().call_soon_threadsafe(_answer, self.answer, result, error)


class EndedByCodeError(RuntimeError):
    """Code of the user raised ``SystemExit`` or the like, or cancelled itself; the cause is what it raised."""


class DaemonThreads:
    """At most ``most`` calls at once, not counting those that were given up on. Each has a thread of its own, which does not
    keep the process alive. For one event loop."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._places = asyncio.Semaphore(most)
        self._running: set[_Call] = set()  # given up or not

    def allow(self, most: int) -> None:
        """Let at least ``most`` calls run at once from now on."""
        for _ in range(most - self._most):
            self._places.release()
        self._most = max(self._most, most)

    @property
    def num_stalled(self) -> int:
        """Threads of calls that were given up on."""
        return sum(call.abandoned for call in tuple(self._running))

    async def run(
        self, function: Callable[..., Any], *arguments: Any, on_begin: Callable[[], None] | None = None
    ) -> Any:
        """Like ``asyncio.to_thread``; cancelling abandons the call, in any state.

        ``on_begin`` is called when the call begins, for a clock that shall not count the wait before.

        Raises:
            RuntimeError: the machine has no thread to give, or the function raised it.
        """
        async with self._places:
            if on_begin is not None:
                on_begin()
            call = _Call(function, asyncio.get_running_loop().create_future())
            bound = functools.partial(contextvars.copy_context().run, function, *arguments)
            thread = threading.Thread(
                target=call.work, args=(bound, self._running.discard), name="call of foreign code", daemon=True
            )
            self._running.add(call)
            try:
                thread.start()
            except RuntimeError:
                self._running.discard(call)
                raise
            try:
                return await call.answer
            except asyncio.CancelledError:
                call.abandoned = True
                raise

    async def call(
        self, function: Callable[..., Any], *arguments: Any, on_begin: Callable[[], None] | None = None, **named: Any
    ) -> Any:
        """Await an async function; run a plain one in a thread, and await what it returns if that can be awaited.

        Raises:
            EndedByCodeError: the function raised ``SystemExit`` or the like, which would end the process, or cancelled
                itself.
        """
        loop = asyncio.get_running_loop()
        task = asyncio.current_task()
        try:
            if _is_async(function):
                if on_begin is not None:
                    on_begin()
                return await function(*arguments, **named)
            result = await self.run(functools.partial(function, *arguments, **named), on_begin=on_begin)
            return await result if inspect.isawaitable(result) else result
        except Exception:
            raise
        except BaseException as error:
            if isinstance(error, GeneratorExit) and asyncio.current_task(loop) is not task:
                raise  # this coroutine is closed, from outside of its task
            if isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling():
                raise  # its caller has given up
            raise EndedByCodeError(f"{type(error).__name__}: {error}") from error

    def overdue(self, limit_s: float) -> StuckThread | None:
        """The call that has run longest, given up or not, if that is longer than this."""
        oldest = min(tuple(self._running), key=lambda call: call.begun_at, default=None)
        if oldest is None or (seconds := time.monotonic() - oldest.begun_at) < limit_s:
            return None
        return StuckThread(_name_of(oldest.function), seconds, oldest.thread_id)


def _is_async(function: Callable[..., Any]) -> bool:
    plain = getattr(function, "__func__", function)  # under a method
    if isinstance(plain, FunctionType):
        return _is_coroutine_function(plain)
    return inspect.iscoroutinefunction(function) or _is_coroutine_function(type(function).__call__)


_is_coroutine_function = functools.lru_cache(1024)(inspect.iscoroutinefunction)  # asked at every call, and slow to say


def _name_of(function: Callable[..., Any]) -> str:
    while isinstance(function, functools.partial):
        function = function.func
    name = getattr(function, "__qualname__", None) or type(function).__qualname__
    return f"{getattr(function, '__module__', '')}.{name}"


def _answer(answer: asyncio.Future[Any], result: Any, error: BaseException | None) -> None:
    if answer.cancelled():
        return
    if isinstance(error, StopIteration | GeneratorExit):  # of a future or a coroutine they mean something else
        error = RuntimeError(f"{type(error).__name__}: {error}").with_traceback(error.__traceback__)
    if error is None:
        answer.set_result(result)
    else:
        answer.set_exception(error)
