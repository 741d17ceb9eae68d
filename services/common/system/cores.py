"""Number of cores that this process may use: its CPU affinity, limited by the quota of its control group."""

from __future__ import annotations

import os
from pathlib import Path

_QUOTA = Path("/sys/fs/cgroup/cpu.max")  # such as "200000 100000": two cores' worth of time


def num_cores(quota: Path = _QUOTA) -> float:
    """Cores; a fraction where the quota of the control group is one."""
    cores = len(os.sched_getaffinity(0))
    try:
        time, period = quota.read_text().split()
    except (OSError, ValueError):  # no control group of version 2
        return cores
    return cores if time == "max" else min(cores, int(time) / int(period))
