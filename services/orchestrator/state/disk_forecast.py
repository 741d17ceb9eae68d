"""Forecasts when the disk will be full, from the growth of the run directory over a window.

    every SAMPLE_S: (time, bytes of the run) -> least squares over WINDOW_S -> seconds until min_free_bytes

Only the run's own bytes count: other programs come and go. The window begins when the run has written the checkpoints that
it keeps, which is a large growth that ends; with little free space it begins at once. Independent of the contents of the
files.
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
LEAST_CHECKPOINTS = 2
LITTLE_BYTES = 1 << 30  # less, or less than the run has written, is little


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskOutlook:
    """Disk state of a run; ``full_in_s`` is None while the run does not grow, or samples are missing."""

    free_bytes: int
    run_bytes: int
    bytes_per_s: float = 0.0
    full_in_s: float | None = None


class DiskForecast:
    def __init__(self, reserve_bytes: int, checkpoints: int = LEAST_CHECKPOINTS) -> None:
        """``reserve_bytes``: with less free space the run issues no task groups, so this counts as full.
        ``checkpoints``: that the run keeps, of all policies."""
        self._reserve_bytes = reserve_bytes
        self._awaited = max(LEAST_CHECKPOINTS, checkpoints)
        self._checkpoint: int | None = None  # the newest
        self._samples: deque[tuple[float, int]] = deque()  # (when, bytes of the run)
        self.outlook: DiskOutlook | None = None  # of the newest sample; None before the first

    def note(self, now: float, free_bytes: int, run_bytes: int, checkpoint: int = 0) -> DiskOutlook:
        """Add a sample; returns the disk state, which is ``outlook`` until the next sample. ``checkpoint`` changes with
        every written checkpoint."""
        if self._awaited and self._checkpoint not in (None, checkpoint):
            self._awaited -= 1
            if not self._awaited:
                self._samples.clear()
        self._checkpoint = checkpoint
        self._samples.append((now, run_bytes))
        while now - self._samples[0][0] > WINDOW_S:
            self._samples.popleft()
        self.outlook = self._outlook(now, free_bytes, run_bytes)
        return self.outlook

    def _outlook(self, now: float, free_bytes: int, run_bytes: int) -> DiskOutlook:
        times = [when for when, _ in self._samples]
        left = max(0, free_bytes - self._reserve_bytes)
        if now - times[0] < LEAST_S or (self._awaited and left > max(LITTLE_BYTES, run_bytes)):
            return DiskOutlook(free_bytes=free_bytes, run_bytes=run_bytes)
        rate = max(slope(times, [used for _, used in self._samples]), 0.0)
        full_in_s = left / rate if rate > 0 else None if left else 0.0
        return DiskOutlook(free_bytes=free_bytes, run_bytes=run_bytes, bytes_per_s=rate, full_in_s=full_in_s)


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
