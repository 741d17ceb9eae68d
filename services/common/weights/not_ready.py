"""The answer of a source that is still making a payload."""

from __future__ import annotations

from services.common.errors import DeadlineError

LONGEST_RETRY_S = 5.0
SHORTEST_RETRY_S = 0.1

_FIRST_S = 30.0
_BYTES_PER_S = 0.1e9  # below the slowest measured coding: one thread, 17% of the elements changed


class PayloadNotReadyError(DeadlineError):
    """A payload that is still being made: ask again after ``retry_after_s``."""

    def __init__(self, payload: str, retry_after_s: float, *, started: bool, size_bytes: int) -> None:
        """``started``: the payload is being made now; else the source is busy with another one. ``size_bytes``: of the
        whole version."""
        state = "is being made" if started else "waits for another one"
        super().__init__(
            f"{payload} {state}: ask again in {retry_after_s:.1f} s", retry_after_s=retry_after_s, wait=payload
        )
        self.after_s = max(SHORTEST_RETRY_S, retry_after_s)
        self.started = started
        self.size_bytes = size_bytes


def making_deadline_s(size_bytes: int) -> float:
    """The longest wait for a delta of a version of ``size_bytes``, on both sides.

    >>> making_deadline_s(16_400_000_000)
    194.0
    """
    return _FIRST_S + size_bytes / _BYTES_PER_S
