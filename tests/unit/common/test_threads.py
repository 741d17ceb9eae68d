"""Threads for functions of others: a stalled one costs its own thread only."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest
import structlog

from services.common.system.threads import DaemonThreads
from tests.waiting import WAIT_S, until


async def test_calls_run_at_once_with_their_arguments_errors_and_context() -> None:
    threads = DaemonThreads(4)
    structlog.contextvars.bind_contextvars(run="r1")
    meet = threading.Barrier(4)

    def work(number: int) -> tuple[int, dict[str, object]]:
        meet.wait(WAIT_S)
        return number, structlog.contextvars.get_contextvars()

    assert await asyncio.gather(*(threads.run(work, n) for n in range(4))) == [(n, {"run": "r1"}) for n in range(4)]
    with pytest.raises(ZeroDivisionError):
        await threads.run(lambda: 1 / 0)
    with pytest.raises(RuntimeError, match="StopIteration"):
        await threads.run(lambda: next(iter(())))


async def test_no_more_run_at_once_than_allowed() -> None:
    threads = DaemonThreads(2)
    running, most, lock = 0, 0, threading.Lock()

    def work() -> None:
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        time.sleep(0.005)
        with lock:
            running -= 1

    await asyncio.gather(*(threads.run(work) for _ in range(30)))
    assert most == 2


async def test_stalled_calls_take_nobody_elses_thread_and_their_own_end_in_time() -> None:
    threads = DaemonThreads(2)
    release, begun = threading.Event(), threading.Semaphore(0)

    def stall() -> None:
        begun.release()
        release.wait(30)

    stalled = [asyncio.ensure_future(threads.run(stall)) for _ in range(6)]
    for _ in range(2):
        assert await asyncio.to_thread(begun.acquire, timeout=WAIT_S)
    for call in stalled:
        call.cancel()
    await asyncio.wait(stalled)
    assert 2 <= threads.num_stalled <= 6  # the others had not begun, or began on a fresh thread
    assert await asyncio.wait_for(asyncio.gather(*(threads.run(int, n) for n in range(50))), WAIT_S) == list(range(50))
    release.set()
    await until(lambda: not threads.num_stalled)


async def test_a_call_that_has_not_begun_never_runs_once_it_is_given_up() -> None:
    threads = DaemonThreads(1)
    release, ran = threading.Event(), list[int]()
    first = asyncio.ensure_future(threads.run(release.wait, 30))
    second = asyncio.ensure_future(threads.run(ran.append, 1))
    await asyncio.sleep(0)  # both are asked for; the only thread takes them in order
    second.cancel()
    await asyncio.wait([second])
    release.set()
    await first
    await threads.run(ran.append, 2)
    assert ran == [2]


async def test_a_machine_without_threads_for_a_moment_refuses_calls_and_runs_later_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    threads, begun = DaemonThreads(2), []

    def refused(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refused)
        for number in range(3):
            with pytest.raises(RuntimeError, match="can't start new thread"):
                await asyncio.wait_for(threads.run(begun.append, number), WAIT_S)
    await asyncio.wait_for(threads.run(begun.append, 3), WAIT_S)
    assert begun == [3], "a refused call is not carried out later"
