"""The watchdog: a loop that does not run and a thread that does not return are told once, with their stack."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, MutableMapping
from typing import Any

import structlog

from services.common.system.threads import DaemonThreads, Watchdog
from services.common.telemetry.logs import LogEvent
from tests.clock import Clock
from tests.waiting import WAIT_S, wait_until


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
    dog = Watchdog(probes={"rewards": lambda: threads.overdue(0.01)}, clock=Clock())
    with structlog.testing.capture_logs() as logs:
        for _ in range(3):
            dog.look(lambda answer: None)
        go.set()
        await call
        dog.look(lambda answer: None)
    assert [entry["event"] for entry in logs] == [LogEvent.THREAD_STUCK, "watchdog.thread_returned"]
    assert "deadlocked" in logs[0]["what"]
    assert "go.wait(20)" in logs[0]["stack"]
