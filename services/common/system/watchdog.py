"""Logs the stack of an event loop that is blocked, or of a worker thread that does not return, from a thread of its
own.

    watchdog thread --call_soon_threadsafe--> loop: answered?   no, for ``limit_s``: log the stack of the loop's thread
                    --look------------------> probes: overdue?  yes: log the probe's text

An observer outside only sees silence; the stack in the log has the line of code. Independent of services.
"""

from __future__ import annotations

import asyncio
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import structlog

from services.common.telemetry.log_events import LogEvent

log = structlog.get_logger()

LIMIT_S = 5.0
LOOK_S = 0.5


@dataclass(frozen=True, slots=True)
class StuckThread:
    """A thread that has been in one call for too long."""

    what: str
    seconds: float
    thread_id: int


Probe = Callable[[], StuckThread | None]


class Watchdog:
    """Watches the running loop from ``start`` to ``stop``; logs each stall once, and its end."""

    def __init__(
        self,
        *,
        limit_s: float = LIMIT_S,
        look_s: float = LOOK_S,
        probes: Mapping[str, Probe] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._limit_s = limit_s
        self._look_s = look_s
        self._probes = dict(probes or {})
        self._clock = clock
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None
        self._looked_at = clock()
        self._asked_at: float | None = None  # when the loop was asked for a sign of life that it has not given yet
        self._loop_thread = 0
        self._told_loop = False
        self._told: set[str] = set()

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
        """Ask the loop for a sign of life if the last one came; report overdue probes."""
        now = self._clock()
        if now - self._looked_at > self._limit_s and self._asked_at is not None:
            self._asked_at = now  # this thread stood still as well: the whole process did
        self._looked_at = now
        if self._asked_at is None:
            self._asked_at = now
            call_soon(self._answer)
        self._look_at_loop(now)
        self._look_at_probes()

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

    def _look_at_probes(self) -> None:
        for name, probe in self._probes.items():
            stuck = probe()
            if stuck is not None and name not in self._told:
                self._told.add(name)
                log.error(
                    LogEvent.THREAD_STUCK,
                    thread=name,
                    what=stuck.what,
                    seconds=round(stuck.seconds, 1),
                    stack=stack_of(stuck.thread_id),
                )
            elif stuck is None and name in self._told:
                self._told.discard(name)
                log.warning("watchdog.thread_returned", thread=name)


def stack_of(thread_id: int) -> str:
    """The stack of a thread of this process; empty after its end."""
    frame = sys._current_frames().get(thread_id)
    return "" if frame is None else "".join(traceback.format_stack(frame)[-12:])
