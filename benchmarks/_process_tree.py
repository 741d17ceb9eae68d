"""Processor seconds of a process and its descendants, from /proc, by component of a run.

A component is a process that the run's ``pids.json`` names; its descendants count as ``<component>/children``, reaped
ones included. Processes without a named ancestor are the launcher's. Shared by the scripts of this folder.
"""

from __future__ import annotations

import bisect
import json
import os
import threading
import time
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

LAUNCHER = "launcher"
_ENDED = f"{LAUNCHER}/children"  # those that it waited for, components included
_TICK_S = 1 / os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class ProcessTimes:
    parent: int
    own_s: float  # user and system
    waited_for_s: float  # of children that were waited for


def all_processes() -> dict[int, ProcessTimes]:
    """By pid; those that end meanwhile are left out."""
    found: dict[int, ProcessTimes] = {}
    for name in os.listdir("/proc"):
        if name.isdigit() and (times := _times(int(name))) is not None:
            found[int(name)] = times
    return found


def _times(pid: int) -> ProcessTimes | None:
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    fields = text.rpartition(")")[2].split()  # the name before may hold anything; fields[0] is the state
    user, system, waited_user, waited_system = (int(value) * _TICK_S for value in fields[11:15])
    return ProcessTimes(int(fields[1]), user + system, waited_user + waited_system)


def by_component(processes: Mapping[int, ProcessTimes], root: int, names: Mapping[int, str]) -> dict[str, float]:
    """Seconds of ``root`` and its descendants; ``names`` has the components' processes.

    >>> tree = {1: ProcessTimes(0, 1.0, 0.5), 2: ProcessTimes(1, 2.0, 4.0), 3: ProcessTimes(2, 8.0, 0.0)}
    >>> by_component(tree, 1, {2: "envgateway"})
    {'launcher': 1.0, 'launcher/children': 0.5, 'envgateway': 2.0, 'envgateway/children': 12.0}
    """
    children: defaultdict[int, list[int]] = defaultdict(list)
    for pid, times in processes.items():
        children[times.parent].append(pid)
    seconds: defaultdict[str, float] = defaultdict(float)
    todo = [(root, names.get(root, LAUNCHER), True)] if root in processes else []
    while todo:
        pid, component, is_itself = todo.pop()
        seconds[component if is_itself else f"{component}/children"] += processes[pid].own_s
        seconds[f"{component}/children"] += processes[pid].waited_for_s
        for child in children[pid]:
            named = names.get(child)
            todo.append((child, named or component, named is not None))
    return dict(seconds)


@dataclass(slots=True)
class CpuCurve:
    """Samples of a tree's seconds over the time of day."""

    at: list[float] = field(default_factory=list)
    components: list[dict[str, float]] = field(default_factory=list)

    def add(self, at: float, components: Mapping[str, float]) -> None:
        """The seconds of an ended component stay its own: its parent, which reaped the process, has the same seconds."""
        before = self.components[-1] if self.components else {}
        ended = {name: seconds for name, seconds in before.items() if name not in components}
        found = {**ended, **components}
        if _ENDED in components:
            found[_ENDED] = max(0.0, components[_ENDED] - sum(ended.values()))
        self.at.append(at)
        self.components.append({name: max(seconds, before.get(name, 0.0)) for name, seconds in found.items()})

    def total_at(self, at: float) -> float:
        """Between two samples on the line through them."""
        return sum(self.components_at(at).values())

    def components_at(self, at: float) -> dict[str, float]:
        if not self.at:
            return {}
        right = bisect.bisect_left(self.at, at)
        if right in (0, len(self.at)):
            return self.components[min(right, len(self.at) - 1)]
        begin, end = self.at[right - 1], self.at[right]
        share = (at - begin) / (end - begin)
        left = self.components[right - 1]
        return {k: left.get(k, 0.0) + share * (v - left.get(k, 0.0)) for k, v in self.components[right].items()}


class Sampler:
    """Samples a run's processes in a thread, until ``close``."""

    def __init__(self, root: int, pids_file: Path, every_s: float = 0.3) -> None:
        self.curve = CpuCurve()
        self._root, self._pids_file, self._every_s = root, pids_file, every_s
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._over.set()
        self._thread.join(10)

    def _run(self) -> None:
        while not self._over.wait(self._every_s):
            found = by_component(all_processes(), self._root, self._names())
            if found:
                self.curve.add(time.time(), found)

    def _names(self) -> dict[int, str]:
        try:
            return {pid: name for name, pid in json.loads(self._pids_file.read_text()).items()}
        except (FileNotFoundError, ValueError):
            return {}
