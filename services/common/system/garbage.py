"""Collects reference cycles in small steps, in a process that holds many objects and must answer at once.

Python's own full collection walks every object that lives: a tenth of a second and more in a gateway with thousands of
episodes, a time without answers. Here the collector is off. Instead, twice a second or sooner, objects made since the
last time are collected, and survivors are set aside (``gc.freeze``) and not walked again. A survivor that becomes
garbage by reference counts goes at once, as ever; cycles among it wait for a full collection, which comes when the
blocks of memory have become twice as many as after the last one, or as at the start, and earlier while the process is
idle.
"""

from __future__ import annotations

import asyncio
import gc
import sys
from collections.abc import Callable

_LOOK_EVERY_S, _LOOKS = 0.1, 5  # a sweep at the fifth look at the latest
_MANY = 3  # collections of the first generation, each of some thousand new objects: a sweep at this look
_NEVER = 1 << 30  # of the second generation, before Python's own full collection
_GROWTH, _GROWTH_IDLE = 2.0, 1.25
_FEWEST = 1_000_000  # blocks; fewer are counted as so many


class GarbageSweeper:
    """One for a process. ``run`` goes beside its work, and restores the collector at the end.

    ``num_full``: full collections so far.
    """

    def __init__(self, is_idle: Callable[[], bool] = lambda: False, *, fewest: int = _FEWEST) -> None:
        """``is_idle``: whether no request is in progress at this moment."""
        self._is_idle = is_idle
        self._fewest = fewest
        # Blocks after the last full collection. At the start these are of modules: a collection finds no garbage among
        # them, and in a forked process it would copy the pages that the process shares with its parent.
        self._after_full = sys.getallocatedblocks()
        self.num_full = 0

    async def run(self) -> None:
        """Ends by cancellation."""
        thresholds = gc.get_threshold()
        # What a fork server, or a test run, has set aside stays there: it is large, and shared with other processes.
        was_frozen = gc.get_freeze_count() > 0
        gc.set_threshold(*thresholds[:2], _NEVER)
        try:
            while True:
                self.sweep()
                for _ in range(_LOOKS):
                    await asyncio.sleep(_LOOK_EVERY_S)
                    if gc.get_count()[2] >= _MANY:
                        break
        finally:
            if not was_frozen:
                gc.unfreeze()
            gc.set_threshold(*thresholds)

    def sweep(self) -> None:
        """Collect the objects made since the last sweep, or all where that is due; freeze the survivors."""
        growth = _GROWTH_IDLE if self._is_idle() else _GROWTH
        # blocks and not ``gc.get_freeze_count``, which walks all that is set aside
        is_full = sys.getallocatedblocks() > growth * max(self._after_full, self._fewest)
        if is_full:
            gc.unfreeze()
        gc.collect()
        gc.freeze()
        if is_full:
            self.num_full += 1
            self._after_full = sys.getallocatedblocks()
