"""Assigns the cores of the machine to the processes of a benchmark.

A process may use fewer cores than its machine has, and they need not be numbered from 0 (taskset, containers). Shared by
the scripts of this folder.
"""

from __future__ import annotations

import os

from services.common.system.machine import num_cores


def pin(count: int) -> float:
    """Keep this process and its later children on the first ``count`` cores; returns the number of cores."""
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: max(1, count)])
    return num_cores()


def split(num_parts: int, at_most: int) -> list[list[int]]:
    """Cores for each of several processes, ``at_most`` each and as many for each; the last ones share the rest if there
    are too few.

    Three parts of two cores are ``[[0], [1], [1]]``.
    """
    cores = sorted(os.sched_getaffinity(0))
    each = max(1, min(at_most, len(cores) // num_parts))
    return [cores[begin : begin + each] for begin in (min(part * each, len(cores) - each) for part in range(num_parts))]
