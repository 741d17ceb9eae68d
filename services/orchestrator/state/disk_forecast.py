"""Forecasts when the disk will be full, from the growth of the run directory and the decrease of free bytes over a
window.

    every SAMPLE_S: (time, free bytes, bytes of the run) -> least squares over WINDOW_S -> seconds until min_free_bytes

The steeper of the two slopes counts: other programs may fill the same disk, and a replaced checkpoint frees its space.
Independent of the contents of the files.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

SAMPLE_S = 10.0
WINDOW_S = 1800.0
LEAST_S = 120.0  # of samples, before the first forecast


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskOutlook:
    """Disk state of a run; ``full_in_s`` is None while the free space does not shrink, or samples are missing."""

    free_bytes: int
    run_bytes: int
    bytes_per_s: float = 0.0
    full_in_s: float | None = None


class DiskForecast:
    def __init__(self, reserve_bytes: int) -> None:
        """``reserve_bytes``: with less free space the run issues no task groups, so this counts as full."""
        self._reserve_bytes = reserve_bytes
        self._samples: deque[tuple[float, int, int]] = deque()  # (when, free bytes, bytes of the run)
        self.outlook: DiskOutlook | None = None  # of the newest sample; None before the first

    def note(self, now: float, free_bytes: int, run_bytes: int) -> DiskOutlook:
        """Add a sample; returns the disk state, which is ``outlook`` until the next sample."""
        self._samples.append((now, free_bytes, run_bytes))
        while now - self._samples[0][0] > WINDOW_S:
            self._samples.popleft()
        self.outlook = self._outlook(now, free_bytes, run_bytes)
        return self.outlook

    def _outlook(self, now: float, free_bytes: int, run_bytes: int) -> DiskOutlook:
        times = [when for when, _, _ in self._samples]
        if now - times[0] < LEAST_S:
            return DiskOutlook(free_bytes=free_bytes, run_bytes=run_bytes)
        shrinks = -slope(times, [free for _, free, _ in self._samples])
        grows = slope(times, [used for _, _, used in self._samples])
        rate = max(shrinks, grows, 0.0)
        left = max(0, free_bytes - self._reserve_bytes)
        return DiskOutlook(
            free_bytes=free_bytes, run_bytes=run_bytes, bytes_per_s=rate, full_in_s=left / rate if rate > 0 else None
        )


def slope(times: Sequence[float], values: Sequence[float]) -> float:
    """Slope of the least-squares line through the points; 0 for points of one time.

    >>> slope([0.0, 1.0, 2.0], [5.0, 7.0, 9.0])
    2.0
    """
    middle = sum(times) / len(times)
    spread = sum((time - middle) ** 2 for time in times)
    level = sum(values) / len(values)
    rise = sum((time - middle) * (value - level) for time, value in zip(times, values, strict=True))
    return rise / spread if spread else 0.0


def bytes_below(directory: Path) -> int:
    """Bytes on disk of all files below a directory, without files that vanish meanwhile or cannot be read."""
    total = 0
    waiting = [str(directory)]
    while waiting:
        try:
            with os.scandir(waiting.pop()) as entries:
                found = list(entries)
        except OSError:
            continue
        for entry in found:
            try:
                if entry.is_dir(follow_symlinks=False):
                    waiting.append(entry.path)
                else:
                    total += 512 * entry.stat(follow_symlinks=False).st_blocks
            except OSError:
                continue
    return total
