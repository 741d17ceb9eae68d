"""Runs memory-bound work on a few threads: numpy and digests release the interpreter lock while they move bytes."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

SCATTERED_BYTES = 64  # that a write of one scattered element moves: a cache line

_MOST_THREADS = 2  # they run beside generation, and two move bytes about as fast as the memory of a small machine does
_WORTH_BYTES = 16 << 20  # starting a thread takes as long as moving a few MiB


def num_threads() -> int:
    """How many this process should use at once."""
    return min(_MOST_THREADS, len(os.sched_getaffinity(0)))


@contextmanager
def few_threads(name: str) -> Iterator[ThreadPoolExecutor]:
    """A thread pool for the block; a failure in the block cancels the calls that have not begun."""
    pool = ThreadPoolExecutor(num_threads(), name)
    try:
        yield pool
    finally:
        pool.shutdown(cancel_futures=True)


def run_all(calls: Sequence[Callable[[], object]], *, touched_bytes: int, name: str) -> None:
    """Run every call, in any order; on several threads if ``touched_bytes`` is large enough to pay for them.

    Raises the first failing call's error; the other calls may have run or not.
    """
    if touched_bytes < _WORTH_BYTES or num_threads() == 1:
        for call in calls:
            call()
        return
    # Each thread takes the next call after each call: a future per call would cost more than a short call.
    remaining = iter(calls)

    def work() -> None:
        for call in remaining:
            call()

    with few_threads(name) as pool:
        for ended in [pool.submit(work) for _ in range(num_threads())]:
            ended.result()
