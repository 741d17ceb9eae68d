"""One question to a live process: its time limit, and the interruption and kill behind the limit.

    asked ──time or output over──> interrupted (SIGINT) ──grace over──> killed
      └──────── answered ────────────────┘

An interruption is over when the fork server says that the signal was sent: an answer that arrives earlier is held back,
so that the signal can never reach the next question.
"""

from __future__ import annotations

from ..statuses import RunStatus

_GRACE_S = 1.0


class LiveTurn:
    """Deadlines of a question. ``why`` is the status of an interruption, None before one."""

    def __init__(self, limit_s: float, now: float) -> None:
        self._limit_s = limit_s
        self._deadline = now + limit_s
        self.asked = now
        self.why: RunStatus | None = None
        self.awaits_signal = False
        self._kill_at = 0.0

    def begin(self, now: float) -> None:
        """The process is there only now: its time runs from here."""
        self._deadline = now + self._limit_s
        self.asked = now

    def stood_still(self, seconds: float) -> None:
        """Leave out a time in which the machine did not go on."""
        self._deadline += seconds
        self._kill_at += seconds

    def check(self, now: float, flooded: bool) -> bool:
        """Whether to interrupt, which is said once."""
        if self.why is not None or not (flooded or now >= self._deadline):
            return False
        self.why = RunStatus.OUTPUT_LIMIT if flooded else RunStatus.TIME_LIMIT
        self.awaits_signal = True
        self._kill_at = now + _GRACE_S
        return True

    def is_beyond_grace(self, now: float) -> bool:
        return self.why is not None and now >= self._kill_at

    @property
    def next_event(self) -> float:
        return self._kill_at if self.why is not None else self._deadline
