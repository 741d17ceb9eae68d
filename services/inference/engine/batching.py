"""Where live rows lie: compaction, ordering by length, and the buckets of one decoding step.

A decoding step runs over a leading range of slots, and its attention over contiguous ranges of them, each as wide
as its longest row. So free slots inside the range and short rows beside long ones cost time; moving rows costs a
copy. Pure arithmetic over lengths; it knows nothing about torch or requests.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

BLOCK = 8  # rows that a bucket starts from
CALL_COST = 1024  # row-positions of attention that one more attention call is worth, measured on one core
WIDTH_STEP = 16  # bucket widths are rounded up to this, so that allocations repeat
HOLES_TOLERATED = 1 / 8  # share of free slots inside the range before compaction
REORDER_GAIN = 0.75  # reorder when it brings attention below this share of its cost


def bucket_bounds(widths: npt.NDArray[np.int64]) -> list[tuple[int, int, int]]:
    """(start, stop, width) over rows of the given lengths: neighbours merge when that pads less than a call costs."""
    merged: list[tuple[int, int, int]] = []
    for start in range(0, len(widths), BLOCK):
        stop = min(start + BLOCK, len(widths))
        current = (start, stop, int(widths[start:stop].max()))
        while merged:
            before = merged[-1]
            width = max(before[2], current[2])
            padding = (before[1] - before[0]) * (width - before[2]) + (current[1] - current[0]) * (width - current[2])
            if padding > CALL_COST:
                break
            current = (before[0], current[1], width)
            merged.pop()
        merged.append(current)
    return [(start, stop, -(-width // WIDTH_STEP) * WIDTH_STEP) for start, stop, width in merged]


def attention_cost(widths: npt.NDArray[np.int64]) -> int:
    """Row-positions that the buckets of these rows read, with the price of the calls."""
    return sum((stop - start) * width + CALL_COST for start, stop, width in bucket_bounds(widths))


def plan_moves(
    live: npt.NDArray[np.bool_], length: npt.NDArray[np.int64], may_sort: bool
) -> tuple[list[int], list[int]]:
    """Rows to move: (sources, targets), permutations of each other; empty when staying is cheaper."""
    rows = np.flatnonzero(live)
    if not len(rows):
        return [], []
    extent = int(rows[-1]) + 1
    holes = extent - len(rows)
    if may_sort:
        # Coarse classes: rows of about the same length keep their places.
        wanted = rows[np.argsort(-(length[rows] // 32), kind="stable")]
        now = attention_cost(np.where(live, length, 1)[:extent])
        if attention_cost(length[wanted]) < REORDER_GAIN * now:
            return _permutation(wanted, extent)
    if holes > max(2, HOLES_TOLERATED * extent):
        inside = rows[rows < len(rows)]
        gaps = np.setdiff1d(np.arange(len(rows)), inside, assume_unique=True)
        tail = rows[rows >= len(rows)]
        sources = [*tail.tolist(), *gaps.tolist()]
        return sources, [*gaps.tolist(), *tail.tolist()]
    return [], []


def _permutation(wanted: npt.NDArray[np.int64], extent: int) -> tuple[list[int], list[int]]:
    """Moves that bring rows ``wanted`` to 0, 1, …, and whatever else lay inside the extent behind them."""
    rest = np.setdiff1d(np.arange(extent), wanted)
    sources = np.concatenate([wanted, rest])
    targets = np.arange(extent)
    changed = sources != targets
    return sources[changed].tolist(), targets[changed].tolist()
