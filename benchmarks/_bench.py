"""What the scripts of this folder share: their last line, cores, needs, processes, a gateway, seconds of a tree of processes."""

from __future__ import annotations

import asyncio
import bisect
import json
import os
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from services.common.system.machine import num_cores
from services.common.telemetry.logs import LogEvent


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


# --- Requirements of a benchmark beyond Python: each function returns None, or the missing part with the remedy.


_SHARED_MEMORY = Path("/dev/shm")


def why_no_rows(data: Path | None, paths: Iterable[str]) -> str | None:
    """Files of rows below the folder that --data or ROLLMILL_DATA_ROOT names."""
    if data is None:
        return "no rows: name their folder with --data or ROLLMILL_DATA_ROOT"
    missing = [path for path in paths if not (data / path).is_file()]
    return f"no rows: {data} has no {', '.join(missing)} (--data or ROLLMILL_DATA_ROOT)" if missing else None


def why_not(name: str) -> str | None:
    """One of the needs of tests (``tests/needs.py``), such as "redis-server": reason and remedy."""
    from tests.needs import NEEDS

    need = NEEDS[name]
    reason = need.missing()
    return f"{reason} ({need.add})" if reason else None


def why_no_room(size_bytes: int, directory: Path = _SHARED_MEMORY) -> str | None:
    """``size_bytes`` of files in shared memory."""
    free = shutil.disk_usage(directory).free
    return None if free >= size_bytes else f"{directory} has {_mib(free)} free of {_mib(size_bytes)} that are needed"


def why_no_memory(size_bytes: int) -> str | None:
    lines = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    free = int(lines["MemAvailable"].split()[0]) << 10
    return None if free >= size_bytes else f"{_mib(free)} of memory are available of {_mib(size_bytes)} that are needed"


def _mib(size_bytes: int) -> str:
    return f"{size_bytes >> 20:,} MiB"


# --- Processes of the project beside a benchmark.


ROOT = Path(__file__).resolve().parent.parent


def spawn(command: list[str], **variables: str) -> subprocess.Popen[bytes]:
    """Start a command with the repository as its directory, one OpenMP thread, and silent."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), **variables}
    return subprocess.Popen(command, env=environment, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def orchestrator(run_dir: str) -> subprocess.Popen[bytes]:
    """The orchestrator of a run directory that holds a resolved recipe."""
    return spawn([sys.executable, "-m", "services.orchestrator", "--run-dir", run_dir])


def kill(processes: Iterable[subprocess.Popen[bytes]]) -> None:
    for process in processes:
        process.send_signal(signal.SIGKILL)
        process.wait(10)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def tree_cpu_s(pid: int) -> float:
    """User and system seconds of a process and all its descendants, the ended ones that were waited for included."""
    ticks, pending = 0, [pid]
    while pending:
        each = Path("/proc") / str(pending.pop())
        try:
            fields = (each / "stat").read_text().rpartition(")")[2].split()
            for task in (each / "task").iterdir():
                pending += map(int, (task / "children").read_text().split())
        except (FileNotFoundError, ProcessLookupError):  # it has ended, and its parent has its time
            continue
        ticks += sum(map(int, fields[11:15]))
    return ticks / os.sysconf("SC_CLK_TCK")


def thread_cpu_s(pid: int) -> float:
    """Seconds on a core of a process's first thread."""
    return int(Path(f"/proc/{pid}/task/{pid}/schedstat").read_text().split()[0]) / 1e9


# --- The last line of every benchmark: one JSON object with name, ours, theirs, ratio, spread and facts about the
# machine.


EVERYTHING = "everything"  # the key of ``left_out`` when nothing was measured

# When this module is imported, which is when a script begins: later they are those of the measurement itself.
_CORES, _LOAD = num_cores(), os.getloadavg()[0]


def median_and_spread(values: Sequence[float]) -> tuple[float, float]:
    """Median, and half the distance between the smallest and largest value relative to the median."""
    middle = statistics.median(values)
    return middle, (max(values) - min(values)) / 2 / middle if middle else 0.0


def report(
    name: str, ours: float | None, theirs: float | None, ratio: float | None, spread: float | None, **extra: Any
) -> None:
    """Print the result as the last line of standard output."""
    report_facts(name, ours=ours, theirs=theirs, ratio=ratio, spread=spread, **extra)


def report_facts(name: str, *, left_out: Mapping[str, str] | None = None, cores: float = _CORES, **facts: Any) -> None:
    """The same for a result that does not compare two figures.

    ``left_out`` has the reason by part that was not measured. ``cores`` is given by a script that pins its processes.
    """
    line = {"name": name, **facts, "cores": cores, "load": _LOAD, "left_out": dict(left_out or {})}
    print(json.dumps({key: _rounded(value) for key, value in line.items()}), flush=True)


def report_nothing(name: str, reason: str) -> None:
    """This machine allows no measurement."""
    report(name, None, None, None, None, left_out={EVERYTHING: reason})


def _rounded(value: Any) -> Any:
    """Four significant digits, also inside containers: more would be noise."""
    if isinstance(value, float):
        return float(f"{value:.4g}")
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_rounded(item) for item in value]
    return value


# --- A gateway process beside a benchmark.


_START_S = 60.0


@asynccontextmanager
async def gateway(settings: Mapping[str, Any]) -> AsyncIterator[tuple[str, int]]:
    """The gateway of recipes/quickstart with ``settings`` of ``envgateway`` changed: its address and its process id."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "services.envgateway", "--recipe", str(ROOT / "recipes" / "quickstart")),
        *(part for name, value in settings.items() for part in ("--set", f"envgateway.{name}={value}")),
        stderr=asyncio.subprocess.PIPE,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
    )
    assert process.stderr is not None
    address = ""
    async with asyncio.timeout(_START_S):
        while not address:
            line = (await process.stderr.readline()).decode()
            if not line:
                raise RuntimeError("the gateway did not start")
            if LogEvent.SERVER_READY in line:
                address = next(word.partition("=")[2] for word in line.split() if word.startswith("address="))
    reading = asyncio.create_task(process.stderr.read(), name="read the gateway's log")
    try:
        yield address, process.pid
    finally:
        if process.returncode is None:
            process.terminate()
        await process.wait()
        await reading


# --- Processor seconds of a process and its descendants, from /proc, by component of a run.


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
