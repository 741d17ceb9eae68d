"""Makes a rank leave on a signal, also while its main thread is inside a collective.

    signal -> interpreter's handler in C -> a byte in a pipe -> this thread: ``leave`` -> main thread leaves after the step
                                                                  no progress for so long: told by name, exit

Python runs its own handlers between two bytecodes of the main thread. A main thread that waits inside NCCL or gloo for a rank
that is gone runs none, for as long as the collective's timeout: half an hour. The pipe (``signal.set_wakeup_fd``) is
written at once in any case. Independent of gRPC and of training.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable

import structlog

from services.common.system.child import START_AGAIN
from services.common.telemetry.accounts import TimeAccount

log = structlog.get_logger()

STUCK_S = 600.0  # without progress; a healthy rank ends micro-batches within seconds, and a checkpoint within minutes
_LOOK_S = 1.0

SIGNALS = (signal.SIGTERM, signal.SIGINT)


class LeaveOnSignal:
    """From ``install`` on, SIGTERM and SIGINT call ``leave``, from a thread. Install from the main thread."""

    def __init__(
        self,
        leave: Callable[[], object],
        account: TimeAccount,
        *,
        stuck_s: float = STUCK_S,
        end: Callable[[int], object] = os._exit,
    ) -> None:
        self._leave = leave
        self._account = account
        self._stuck_s = stuck_s
        self._end = end
        self._reader, self._writer = os.pipe()
        os.set_blocking(self._writer, False)  # set_wakeup_fd requires it
        self._thread = threading.Thread(target=self._run, name="signals", daemon=True)

    def install(self) -> None:
        self._thread.start()
        signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        for number in SIGNALS:
            signal.signal(number, lambda *_: None)  # the default would end the process

    def _run(self) -> None:
        known = {int(number) for number in SIGNALS}
        while (number := os.read(self._reader, 1)[0]) not in known:
            pass
        name = signal.Signals(number).name
        log.info("trainer.leaving", signal=name)
        self._leave()
        self._watch(name)

    def _watch(self, name: str) -> None:
        """End the process when its account makes no progress. A process that leaves ends this thread."""
        last, since = self._doing(), time.monotonic()
        while time.monotonic() - since < self._stuck_s:
            time.sleep(min(_LOOK_S, self._stuck_s / 4))
            if (now := self._doing()) != last:
                last, since = now, time.monotonic()
        sys.stderr.write(
            f"trainer: {name} arrived, and this rank has made no progress for {self._stuck_s:g} s ({last[1]}): it may wait "
            "in a collective for a rank that is gone. It ends without a checkpoint; started again, all ranks resume together\n"
        )
        sys.stderr.flush()
        self._end(START_AGAIN)

    def _doing(self) -> tuple[int, str]:
        """Pieces of work done, and the activities of now."""
        state = self._account.state()
        return state.progress, ", ".join(str(activity.name) for activity in state.activities if activity.num_now)
