"""Waiting with a deadline and a name, owning the tasks one starts, and backing off.

Independent of gRPC and of services.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine, Iterator
from types import TracebackType
from typing import Any, TypeVar

import structlog

from services.common.errors import DeadlineError, UserError

log = structlog.get_logger()

CLOSE_S = 30.0

T = TypeVar("T")


class deadline:
    """Bound a wait; ``None`` is for waits that a lease or a stop bounds.

    Raises:
        DeadlineError: "<name> took longer than <seconds> s". A timeout raised *inside* passes through unchanged.
    """

    __slots__ = ("_name", "_scope", "_seconds")

    def __init__(self, seconds: float | None, name: str) -> None:
        self._seconds = seconds
        self._name = name
        self._scope = asyncio.timeout(seconds)

    async def __aenter__(self) -> None:
        await self._scope.__aenter__()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            await self._scope.__aexit__(kind, error, trace)
        except TimeoutError:
            raise self._passed() from None
        if isinstance(error, TimeoutError) and self._scope.expired():  # made of the cancellation, inside
            raise self._passed() from None

    def begin_again(self, seconds: float, name: str) -> None:
        """Bound what follows by another time, from now on; without effect when the wait is over."""
        try:
            self._scope.reschedule(asyncio.get_running_loop().time() + seconds)
        except RuntimeError:  # it has ended or passed meanwhile
            return
        self._seconds, self._name = seconds, name

    def _passed(self) -> DeadlineError:
        return DeadlineError(f"{self._name} took longer than {self._seconds:g} s", wait=self._name)


def backoff(first_s: float = 0.1, longest_s: float = 5.0) -> Iterator[float]:
    """Seconds to sleep between attempts: growing, bounded, jittered by half so that peers do not march in step."""
    delay = first_s
    while True:
        yield delay * (0.5 + random.random() / 2)
        delay = min(longest_s, delay * 2)


async def called(function: Callable[..., T], *arguments: Any, in_thread: bool) -> T:
    """The result of a call: in a thread where the call takes many milliseconds, for which the event loop would stand
    still; else here, without the cost of a thread. ``function`` reads nothing that changes meanwhile."""
    return await asyncio.to_thread(function, *arguments) if in_thread else function(*arguments)


async def ended(task: asyncio.Future[Any]) -> None:
    """Cancel a task that is still running and wait for its end; its error is left to its reader. A cancellation of the
    caller ends the wait: awaiting the task itself, one could not tell the two cancellations apart."""
    if not task.done():
        task.cancel()
        await asyncio.wait({task})
    if not task.cancelled():
        task.exception()  # asyncio would log it where no reader comes


class TaskOwner:
    """Owns background tasks: none is orphaned, and the first failure is raised by ``failed``.

    Use as ``async with TaskOwner() as tasks``; leaving cancels running tasks and waits for them, up to a deadline.
    """

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()
        self._failure: asyncio.Future[None] | None = None
        self._closed = False

    async def __aenter__(self) -> TaskOwner:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def start(self, work: Coroutine[Any, Any, Any], name: str) -> asyncio.Task[Any]:
        """Start a named task. A failure is logged at once and ends ``failed()``."""
        if self._closed:
            work.close()
            raise RuntimeError(f"{name} was started after its owner had closed")
        task = asyncio.get_running_loop().create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    async def failed(self) -> None:
        """Wait until an owned task fails, and raise its error."""
        if self._failure is None:
            self._failure = asyncio.get_running_loop().create_future()
        await asyncio.shield(self._failure)

    async def close(self, timeout_s: float = CLOSE_S) -> None:
        """Cancel running tasks and wait until they have ended.

        Raises:
            DeadlineError: naming the tasks that did not end when they were cancelled.
        """
        self._closed = True
        running = self._tasks - {asyncio.current_task()}
        for task in running:
            task.cancel()
        if running:
            _, stuck = await asyncio.wait(running, timeout=timeout_s)
            if stuck:
                names = ", ".join(sorted(task.get_name() for task in stuck))
                raise DeadlineError(f"cancelling {names} took longer than {timeout_s:g} s", wait=names)
        if self._failure is not None and not self._failure.done():
            self._failure.cancel()

    def __len__(self) -> int:
        return len(self._tasks)

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if task.cancelled() or (error := task.exception()) is None:
            return
        told = isinstance(error, UserError)  # in full by its message
        log.error("task.failed", task=task.get_name(), error=str(error), exc_info=None if told else error)
        if self._failure is None:
            self._failure = task.get_loop().create_future()
        if not self._failure.done():
            self._failure.set_exception(error)
            self._failure.exception()  # retrieved, so that asyncio does not log it if no task waits
