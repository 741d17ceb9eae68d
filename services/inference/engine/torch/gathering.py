"""Decides when the next decoding step is due. A step over few rows costs nearly as much as one over many, so steps may wait.

A step is held while fewer rows (decoding or waiting to join) exist than half of the recent maximum, until enough requests
have come, or for at most the decoding time since the last hold and at most LINGER_S. After a hold without new requests,
the awaited number is halved. So requests that return together, as from tool calls, go on together; a waiting request
loses at most its decoding time; and a lone caller is not held.

While rows decode, requests join once there are a quarter as many as rows, or after JOIN_STEPS steps: a pass over the
prompts of several costs little more than one over a single prompt.

Independent of slots, prompts and torch; callers pass the counts and the time.
"""

from __future__ import annotations

JOIN_SHARE = 4  # requests join once they are one of so many of the rows that decode
JOIN_STEPS = 3  # or after so many decoding steps
LINGER_S = 0.05  # a step is held at most this long
MEMORY_S = 1.0  # rows that decoded longer ago do not predict the next requests


class Gathering:
    """Decides when a step is due and when waiting requests join. Times are seconds of one monotonic clock."""

    def __init__(self) -> None:
        self._waited_steps = 0
        self._held_since: float | None = None
        self._wanted = 0  # rows that the next step waits for
        self._credit_s = 0.0  # time left for holding
        self._last = 0.0  # when the last step ended

    def holds_s(self, num_waiting: int, num_live: int, now: float) -> float:
        """Seconds that the next step is still held; 0 when the step is due."""
        rows = num_waiting + num_live
        if self._held_since is None and now - self._last > MEMORY_S:
            self._wanted = 0
        self._wanted = max(self._wanted, rows // 2)
        if rows < self._wanted:
            if self._held_since is None:
                self._held_since = now
            left = self._held_since + self._credit_s - now
            if left > 0:
                return left
            self._wanted = rows // 2
        if self._held_since is not None:
            self._held_since = None
            self._credit_s = 0.0
            self._waited_steps = JOIN_STEPS
        return 0.0

    def joins(self, num_waiting: int, num_live: int, room: int) -> bool:
        """Whether the waiting requests take slots now. Called once before every decoding step."""
        if not num_waiting or not room:
            self._waited_steps = 0
            return False
        if min(num_waiting, room) * JOIN_SHARE >= num_live or self._waited_steps >= JOIN_STEPS:
            self._waited_steps = 0
            return True
        self._waited_steps += 1
        return False

    def decoded(self, began: float, now: float) -> None:
        """A step took from ``began`` to ``now``."""
        self._credit_s = min(LINGER_S, self._credit_s + now - began)
        self._last = now
