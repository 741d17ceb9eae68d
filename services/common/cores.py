"""How many cores this process may use: those it is confined to, or what its container gives it of them."""

from __future__ import annotations

import os
from pathlib import Path

_QUOTA = Path("/sys/fs/cgroup/cpu.max")  # such as "200000 100000": two cores' worth of time


def num_cores(quota: Path = _QUOTA) -> float:
    """A whole number unless the container's share is none."""
    cores = len(os.sched_getaffinity(0))
    try:
        time, period = quota.read_text().split()
    except (OSError, ValueError):  # no control group of version 2
        return cores
    return cores if time == "max" else min(cores, int(time) / int(period))
