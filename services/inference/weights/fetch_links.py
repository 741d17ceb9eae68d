"""How fast each source's link was lately, as this receiver saw it. Tells the source which profile pays."""

from __future__ import annotations

_WEIGHT = 0.3  # of the newest transfer
_FROM_BYTES = 256 << 10  # smaller transfers measure latency, not speed


class LinkSpeeds:
    """Bytes per second per source, averaged over transfers, the last ones most."""

    def __init__(self) -> None:
        self._bytes_per_s: dict[str, float] = {}

    def record(self, source: str, num_bytes: int, seconds: float) -> None:
        if num_bytes < _FROM_BYTES or seconds <= 0:
            return
        speed = num_bytes / seconds
        known = self._bytes_per_s.get(source, speed)
        self._bytes_per_s[source] = known + _WEIGHT * (speed - known)

    def bytes_per_s(self, source: str) -> float:
        """0 when nothing is known."""
        return self._bytes_per_s.get(source, 0.0)
