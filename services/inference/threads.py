"""Memory-bound work on a few threads: numpy and digests let go of the interpreter while they move bytes.

Knows nothing about weights or engines.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

_MOST_THREADS = 2  # they run beside generation, and two move bytes about as fast as the memory of a small machine does
_WORTH_BYTES = 16 << 20  # starting a thread takes as long as moving a few MiB


def num_threads() -> int:
    """How many this process should use at once."""
    return min(_MOST_THREADS, len(os.sched_getaffinity(0)))


@contextmanager
def few_threads(name: str) -> Iterator[ThreadPoolExecutor]:
    """A pool that is gone at the end of the block; after a failure in it, what was not begun is dropped."""
    pool = ThreadPoolExecutor(num_threads(), name)
    try:
        yield pool
    finally:
        pool.shutdown(cancel_futures=True)


def run_all(calls: Sequence[Callable[[], None]], *, touched_bytes: int, name: str) -> None:
    """Run every call, in any order; on several threads when so many bytes are touched that it pays.

    Raises what the first failing call raised; others may have run or not.
    """
    if touched_bytes < _WORTH_BYTES or num_threads() == 1:
        for call in calls:
            call()
        return
    # Each thread takes the next call when it is done with one: a future per call would cost more than a short call.
    remaining = iter(calls)

    def work() -> None:
        for call in remaining:
            call()

    with few_threads(name) as pool:
        for ended in [pool.submit(work) for _ in range(num_threads())]:
            ended.result()
