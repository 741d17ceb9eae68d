"""The cores that a benchmark runs on: how many there are, and which of its processes runs on which.

A process may use fewer cores than its machine has, and they need not be numbered from 0 (taskset, containers). Shared by
the scripts of this folder; it measures nothing itself.
"""

from __future__ import annotations

import os
from pathlib import Path

_QUOTA = Path("/sys/fs/cgroup/cpu.max")  # of a container, such as "200000 100000": two cores' worth of time


def num_cores(quota: Path = _QUOTA) -> float:
    """Cores of this process, or what a container gives it of them; a whole number unless the container's is none."""
    cores = len(os.sched_getaffinity(0))
    try:
        time, period = quota.read_text().split()
    except (OSError, ValueError):  # no control group of version 2
        return cores
    return cores if time == "max" else min(cores, int(time) / int(period))


def pin(count: int) -> float:
    """Keep this process, and all that it starts from now on, on its first ``count`` cores; returns how many it has then."""
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: max(1, count)])
    return num_cores()


def split(num_parts: int, at_most: int) -> list[list[int]]:
    """Cores for each of several processes, ``at_most`` each and as many for each; the last ones share what does not suffice.

    Three parts of two cores are ``[[0], [1], [1]]``.
    """
    cores = sorted(os.sched_getaffinity(0))
    each = max(1, min(at_most, len(cores) // num_parts))
    return [cores[begin : begin + each] for begin in (min(part * each, len(cores) - each) for part in range(num_parts))]
