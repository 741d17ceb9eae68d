"""Threads for functions of others: a stalled one costs its own thread only."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, MutableMapping
from typing import Any

import pytest
import structlog

from services.common.system.threads import DaemonThreads, Watchdog
from services.common.telemetry.logs import LogEvent
from tests.clock import Clock
from tests.waiting import WAIT_S, until, wait_until


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


# --- The watchdog: a loop that does not run and a thread that does not return are told once, with their stack


def test_a_loop_that_gives_no_sign_of_life_is_told_once_and_its_return_too() -> None:
    clock, asked = Clock(), list[Callable[[], None]]()
    dog = Watchdog(limit_s=5.0, clock=clock)
    with structlog.testing.capture_logs() as logs:
        for _ in range(30):
            dog.look(asked.append)
            clock.now += 0.5
        asked.pop()()
        dog.look(asked.append)
    assert [entry["event"] for entry in logs] == [LogEvent.LOOP_BLOCKED, "watchdog.loop_runs_again"]


def test_a_process_that_stood_still_as_a_whole_is_no_blocked_loop() -> None:
    clock, asked = Clock(), list[Callable[[], None]]()
    dog = Watchdog(limit_s=5.0, clock=clock)
    with structlog.testing.capture_logs() as logs:
        dog.look(asked.append)
        clock.now += 60.0  # SIGSTOP, SIGCONT
        dog.look(asked.append)
        asked.pop()()
        dog.look(asked.append)
    assert logs == []


def names_the_line(entry: MutableMapping[str, Any]) -> bool:
    return entry["event"] == LogEvent.LOOP_BLOCKED and "# the line that blocks" in entry["stack"]


async def test_the_stack_of_a_blocked_loop_names_the_line_that_blocks() -> None:
    dog = Watchdog(limit_s=0.2, look_s=0.02)
    with structlog.testing.capture_logs() as logs:
        dog.start()
        await asyncio.sleep(0.1)
        wait_until(lambda: any(map(names_the_line, logs)))  # the line that blocks
        dog.stop()


async def test_a_worker_thread_that_never_returns_is_told_with_its_function_and_stack() -> None:
    threads, begun, go = DaemonThreads(2), threading.Event(), threading.Event()

    def deadlocked() -> None:
        begun.set()
        go.wait(20)

    assert threads.overdue(0.0) is None
    call = asyncio.create_task(threads.run(deadlocked))
    assert await asyncio.to_thread(begun.wait, WAIT_S)
    await asyncio.sleep(0.05)
    dog = Watchdog(threads="rewards", stuck=lambda: threads.overdue(0.01), clock=Clock())
    with structlog.testing.capture_logs() as logs:
        for _ in range(3):
            dog.look(lambda answer: None)
        go.set()
        await call
        dog.look(lambda answer: None)
    assert [entry["event"] for entry in logs] == [LogEvent.THREAD_STUCK, "watchdog.thread_returned"]
    assert "deadlocked" in logs[0]["what"]
    assert "go.wait(20)" in logs[0]["stack"]
