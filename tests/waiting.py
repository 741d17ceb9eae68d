"""Waits for a condition that another task, thread or process makes true.

A test that passes ends its wait when the condition holds, so the deadline costs nothing and is long: it only tells a
test that hangs from a machine that is busy.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

WAIT_S = 60.0
PROCESS_S = 240.0  # a process that imports torch, computes and ends
EVERY_S = 0.01

T = TypeVar("T")


async def until(
    condition: Callable[[], object],
    what: str = "the condition",
    *,
    timeout_s: float = WAIT_S,
    every_s: float = EVERY_S,
) -> None:
    """Wait in the event loop until ``condition`` is true, looked at every ``every_s``.

    Raises:
        AssertionError: it is not true within ``timeout_s``; says ``what``.
    """
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {timeout_s:g} s: {what}"
        await asyncio.sleep(every_s)


def wait_until(
    condition: Callable[[], object],
    what: str = "the condition",
    *,
    timeout_s: float = WAIT_S,
    every_s: float = EVERY_S,
) -> None:
    """``until`` for tests without an event loop."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {timeout_s:g} s: {what}"
        time.sleep(every_s)


async def accepted(call: Callable[[], Awaitable[T]], *refusals: type[Exception], timeout_s: float = WAIT_S) -> T:
    """The answer of ``call``, repeated while it raises one of ``refusals``.

    Raises:
        AssertionError: every call within ``timeout_s`` was refused.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            return await call()
        except refusals as error:
            refusal = error
        assert time.monotonic() < deadline, f"refused for {timeout_s:g} s: {refusal!r}"
        await asyncio.sleep(EVERY_S)
