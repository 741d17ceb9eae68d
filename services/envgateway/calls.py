"""Calling what others wrote, sync or async; and joining calls that are repeated with the same key."""

from __future__ import annotations

import asyncio
import inspect
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

Result = TypeVar("Result")


async def call_plain_or_async(function: Callable[..., Any], *arguments: Any) -> Any:
    """Await an async function; run a plain one in a thread, so that it holds nobody up."""
    if inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__):
        return await function(*arguments)
    result = await asyncio.to_thread(function, *arguments)
    return await result if inspect.isawaitable(result) else result


@dataclass(slots=True)
class _Entry(Generic[Result]):
    task: asyncio.Task[Result]
    waiting: int = 0


class SharedCalls(Generic[Result]):
    """One execution per key: who repeats a key joins the running call or gets its stored result.

    The call is cancelled when its last waiter leaves. Errors, and results that ``keep`` refuses, are not stored: the
    next caller runs it again.
    """

    def __init__(self, max_stored: int, keep: Callable[[Result], bool] = lambda _: True) -> None:
        self._entries: OrderedDict[str, _Entry[Result]] = OrderedDict()
        self._max_stored = max_stored
        self._keep = keep

    async def run(self, key: str, call: Callable[[], Awaitable[Result]]) -> Result:
        """``key`` may be empty: then nothing is shared."""
        if not key:
            return await call()
        entry = self._entries.get(key)
        if entry is None:
            entry = self._entries[key] = _Entry(asyncio.ensure_future(_as_coroutine(call)))
            entry.task.add_done_callback(lambda _: self._settle(key))
        entry.waiting += 1
        try:
            return await asyncio.shield(entry.task)
        except asyncio.CancelledError:
            if entry.waiting == 1 and not entry.task.done():
                if self._entries.get(key) is entry:
                    del self._entries[key]
                entry.task.cancel()
            raise
        finally:
            entry.waiting -= 1

    def __len__(self) -> int:
        return len(self._entries)

    def _settle(self, key: str) -> None:
        entry = self._entries.get(key)
        if entry is None or not entry.task.done():
            return
        if entry.task.cancelled() or entry.task.exception() is not None or not self._keep(entry.task.result()):
            del self._entries[key]
        for stored in list(self._entries):
            if len(self._entries) <= self._max_stored:
                break
            if self._entries[stored].task.done():
                del self._entries[stored]


async def _as_coroutine(call: Callable[[], Awaitable[Result]]) -> Result:
    return await call()
