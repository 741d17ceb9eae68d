"""Runs the writing of one checkpoint in a thread of its own. Independent of the checkpoint's content.

A daemon thread: a process that ends does not wait for the thread. The thread then leaves the same files as a killed
process, and the next save sweeps these files.
"""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Callable

from services.common.errors import DeadlineError, MillraceError


class BackgroundWrite:
    """Starts ``work`` at once; ``finish`` waits for its end and raises its ``MillraceError``."""

    def __init__(self, training_step: int, work: Callable[[], None], timeout_s: float) -> None:
        self.training_step = training_step
        self._work = work
        self._timeout_s = timeout_s
        self._failure: MillraceError | None = None
        self._is_done = False
        context = contextvars.copy_context()  # run and policy, for the log
        self._thread = threading.Thread(
            target=context.run, args=(self._run,), daemon=True, name=f"checkpoint-{training_step}"
        )
        self._thread.start()

    @property
    def is_running(self) -> bool:
        return self._thread.is_alive()

    def finish(self) -> None:
        """Wait for the end. Raises ``DeadlineError``, or the error of the work."""
        self._thread.join(self._timeout_s)
        if self._thread.is_alive():
            wait = f"writing the checkpoint of step {self.training_step}"
            raise DeadlineError(f"{wait} took longer than {self._timeout_s:g} s: is the disk still there?", wait=wait)
        if self._failure is not None:
            raise self._failure
        if not self._is_done:  # a bug, which the thread has printed
            raise RuntimeError(
                f"the thread that wrote the checkpoint of step {self.training_step} has ended with an error"
            )

    def _run(self) -> None:
        try:
            self._work()
        except MillraceError as failure:
            self._failure = failure
        else:
            self._is_done = True
