"""Plans the placement of live rows: compaction, ordering by length, and the buckets of one decoding step.

A decoding step runs over a leading range of slots, and its attention over contiguous ranges of them, each as wide
as its longest row. So free slots inside the range and short rows beside long ones cost time; moving rows costs a
copy. Pure arithmetic over lengths; independent of torch and requests.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

BLOCK = 8  # rows that a bucket starts from
CALL_COST = 1024  # row-positions of attention that one more attention call is worth, measured on one core
WIDTH_STEP = 16  # bucket widths are rounded up to this, so that allocations repeat
HOLES_TOLERATED = 1 / 8  # share of free slots inside the range before compaction
MOVE_COST = 2  # rows of a decoding step that moving one row is worth, measured on one core
REORDER_GAIN = 0.75  # reorder when the new order costs less than this share of the attention


def bucket_bounds(widths: npt.NDArray[np.int64]) -> list[tuple[int, int, int]]:
    """(start, stop, width) over rows of the given lengths: neighbours merge when that pads less than a call costs."""
    num = len(widths)
    merged: list[tuple[int, int, int]] = []
    blocks = np.maximum.reduceat(widths, np.arange(0, num, BLOCK))
    longest = int(blocks.max())
    if BLOCK * (len(blocks) * longest - int(blocks.sum())) <= CALL_COST:  # all neighbours would merge
        return [(0, num, -(-longest // WIDTH_STEP) * WIDTH_STEP)]
    for start, widest in zip(range(0, num, BLOCK), blocks.tolist(), strict=True):
        current = (start, min(start + BLOCK, num), widest)
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


class Holes:
    """Counts the cost of free slots inside the range since they came, in rows of decoding steps.

    Closing them pays once their cost reaches the cost of closing; before, a joining request may fill them without a copy.
    """

    def __init__(self) -> None:
        self._cost = 0

    def stepped(self, num_rows: int, num_live: int) -> None:
        """Note a decoding step over ``num_rows`` rows."""
        num = num_rows - num_live
        self._cost = self._cost + num if _are_many(num, num_rows) else 0

    def are_worth(self, num_moved: int) -> bool:
        """Whether closing the holes pays for moving ``num_moved`` rows."""
        return self._cost >= MOVE_COST * num_moved

    def closed(self) -> None:
        self._cost = 0


def plan_moves(
    live: npt.NDArray[np.bool_], length: npt.NDArray[np.int64], may_sort: bool, holes: Holes
) -> tuple[list[int], list[int]]:
    """Rows to move: (sources, targets), permutations of each other; empty when staying is cheaper."""
    rows = live.nonzero()[0]
    if not len(rows):
        return [], []
    extent = int(rows[-1]) + 1
    if may_sort:
        # Coarse classes: rows of about the same length keep their places.
        wanted = rows[np.argsort(-(length[rows] // 32), kind="stable")]
        now = attention_cost(np.where(live, length, 1)[:extent])
        if attention_cost(length[wanted]) < REORDER_GAIN * now:
            return _permutation(wanted, extent)
    if _are_many(extent - len(rows), extent):
        gaps = (~live[: len(rows)]).nonzero()[0]
        tail = rows[rows >= len(rows)]
        if not holes.are_worth(2 * len(tail)):
            return [], []
        sources = [*tail.tolist(), *gaps.tolist()]
        return sources, [*gaps.tolist(), *tail.tolist()]
    return [], []


def _are_many(num_holes: int, extent: int) -> bool:
    return num_holes > max(2, HOLES_TOLERATED * extent)


def _permutation(wanted: npt.NDArray[np.int64], extent: int) -> tuple[list[int], list[int]]:
    """Moves that bring rows ``wanted`` to 0, 1, …, and the other rows inside the extent behind them."""
    rest = np.setdiff1d(np.arange(extent), wanted)
    sources = np.concatenate([wanted, rest])
    targets = np.arange(extent)
    changed = sources != targets
    return sources[changed].tolist(), targets[changed].tolist()
