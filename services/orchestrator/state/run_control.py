"""State of the run, pause and stop. Independent of the parts that act on them."""

from __future__ import annotations

import asyncio
import enum
from collections.abc import Callable


class RunState(enum.StrEnum):
    STARTING = "starting"  # waiting for the first weights and replicas
    EVALUATING_START = "evaluating_start"
    TRAINING = "training"
    PAUSED = "paused"
    EVALUATING_END = "evaluating_end"
    FINISHED = "finished"  # all steps are done
    STOPPED = "stopped"  # ended before the last step


class RunControl:
    """``phase`` is the progress of the run; a pause hides the phase in ``state`` and keeps the phase."""

    def __init__(self, on_change: Callable[[], None] = lambda: None) -> None:
        self._on_change = on_change
        self.phase = RunState.STARTING
        self.paused = False
        self.stop_reason = ""
        self.stop_requested = asyncio.Event()

    @property
    def state(self) -> RunState:
        return RunState.PAUSED if self.paused and not self.ended else self.phase

    @property
    def ended(self) -> bool:
        return self.phase in (RunState.FINISHED, RunState.STOPPED)

    def enter(self, phase: RunState) -> None:
        if phase is not self.phase:
            self.phase = phase
            self._on_change()

    def pause(self) -> bool:
        """False for a run that is paused already, or has ended."""
        return self._set_paused(True)

    def resume(self) -> bool:
        return self._set_paused(False)

    def _set_paused(self, paused: bool) -> bool:
        if self.paused is paused or self.ended:
            return False
        self.paused = paused
        self._on_change()
        return True

    def stop(self, reason: str) -> None:
        if not self.ended and not self.stop_requested.is_set():
            self.stop_reason = reason
            self.stop_requested.set()
