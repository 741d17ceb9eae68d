"""The collected objects, the times of collection, and the objects that a sweep keeps."""

from __future__ import annotations

import asyncio
import gc
import sys
import weakref
from collections.abc import Iterator

import pytest

from services.common.system.machine import GarbageSweeper


class Node:
    """One of a cycle."""

    def __init__(self) -> None:
        self.self = self


@pytest.fixture(autouse=True)
def collector() -> Iterator[None]:
    thresholds, frozen = gc.get_threshold(), gc.get_freeze_count()
    yield
    gc.set_threshold(*thresholds)
    gc.unfreeze()
    if frozen:  # what the test run has set aside, a million objects
        gc.freeze()


def test_a_cycle_made_since_the_last_sweep_is_collected_by_the_next() -> None:
    sweeper = GarbageSweeper(fewest=1 << 40)
    sweeper.sweep()
    gone = weakref.ref(Node())
    sweeper.sweep()
    assert gone() is None
    assert sweeper.num_full == 0


def test_cycles_that_were_set_aside_are_collected_when_memory_has_doubled() -> None:
    sweeper = GarbageSweeper(fewest=1)
    sweeper.sweep()
    assert sweeper.num_full == 0, "what is there at the start is not collected"
    node = Node()
    gone = weakref.ref(node)
    sweeper.sweep()
    del node
    sweeper.sweep()
    assert gone() is not None and sweeper.num_full == 0
    many = [object() for _ in range(2 * sys.getallocatedblocks())]
    sweeper.sweep()
    assert gone() is None and sweeper.num_full == 1
    assert len(many)


@pytest.mark.parametrize("was_frozen", [False, True])
async def test_the_collector_is_as_it_was_when_the_sweeper_ends(was_frozen: bool) -> None:
    """Also where another part of the process has set objects aside, as a fork server does."""
    gc.unfreeze()
    if was_frozen:
        gc.freeze()
    before = gc.get_threshold()
    running = asyncio.create_task(GarbageSweeper().run())
    await asyncio.sleep(0)
    assert gc.get_threshold()[2] > 1 << 20
    running.cancel()
    await asyncio.wait([running])
    assert gc.get_threshold() == before
    assert (gc.get_freeze_count() > 0) == was_frozen
