"""Calling what others wrote, sync or async; and joining calls that are repeated with the same key."""

from __future__ import annotations

import asyncio
import inspect
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from services.common.threads import DaemonThreads

Result = TypeVar("Result")

THREADS = DaemonThreads(64)  # of the whole process; what runs in them is mostly Python, so more would only take turns


async def call_plain_or_async(function: Callable[..., Any], *arguments: Any) -> Any:
    """Await an async function; run a plain one in a thread, so that it holds nobody up, even when it never returns.

    Raises:
        RuntimeError: it raised ``SystemExit`` or the like, which would end the process, or cancelled itself.
    """
    try:
        if inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__):
            return await function(*arguments)
        result = await THREADS.run(function, *arguments)
        return await result if inspect.isawaitable(result) else result
    except (Exception, GeneratorExit):
        raise
    except BaseException as error:
        task = asyncio.current_task()
        if isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling():
            raise  # its caller has given up
        raise RuntimeError(f"{type(error).__name__}: {error}") from error


@dataclass(slots=True)
class _Running(Generic[Result]):
    task: asyncio.Task[Result]
    waiting: int = 0


class SharedCalls(Generic[Result]):
    """One execution per key: who repeats a key joins the running call or gets its stored result.

    The call is cancelled when its last waiter leaves. Errors, and results that ``keep`` refuses, are not stored: the
    next caller runs it again. The oldest results go when there are more than ``max_stored``, or when together they
    weigh more than ``max_weight``.
    """

    def __init__(
        self,
        max_stored: int,
        keep: Callable[[Result], bool] = lambda _: True,
        weigh: Callable[[Result], int] = lambda _: 0,
        max_weight: int = 0,
    ) -> None:
        self._running: dict[str, _Running[Result]] = {}
        self._stored: OrderedDict[str, Result] = OrderedDict()
        self._max_stored = max_stored
        self._keep = keep
        self._weigh = weigh
        self._weight = 0
        self._max_weight = max_weight

    async def run(self, key: str, call: Callable[[], Awaitable[Result]]) -> Result:
        """``key`` may be empty: then nothing is shared."""
        if not key:
            return await call()
        if key in self._stored:
            return self._stored[key]
        entry = self._running.get(key)
        if entry is None:
            entry = self._running[key] = _Running(asyncio.ensure_future(_as_coroutine(call)))
            settled = entry
            entry.task.add_done_callback(lambda _: self._settle(key, settled))
        entry.waiting += 1
        try:
            return await asyncio.shield(entry.task)
        except asyncio.CancelledError:
            if entry.waiting == 1 and not entry.task.done():
                if self._running.get(key) is entry:
                    del self._running[key]
                entry.task.cancel()
            raise
        finally:
            entry.waiting -= 1

    def __len__(self) -> int:
        """Running calls and stored results."""
        return len(self._running) + len(self._stored)

    def _settle(self, key: str, entry: _Running[Result]) -> None:
        if self._running.get(key) is not entry:
            return  # everybody left; what came of it is nobody's
        del self._running[key]
        if entry.task.cancelled() or entry.task.exception() is not None or not self._keep(entry.task.result()):
            return
        self._stored[key] = entry.task.result()
        self._weight += self._weigh(entry.task.result())
        while len(self._stored) > self._max_stored or self._weight > self._max_weight:
            _, oldest = self._stored.popitem(last=False)
            self._weight -= self._weigh(oldest)


async def _as_coroutine(call: Callable[[], Awaitable[Result]]) -> Result:
    return await call()
