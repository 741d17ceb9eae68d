"""A memory limit over a tree of processes, and the peak of what they hold. Shared by the scripts of this folder.

With a writable memory cgroup (version 2 or 1) the kernel holds the limit: a tree that needs more loses a process. Elsewhere a
supervisor adds up what the processes hold, and kills the tree above the limit. What is held is anonymous memory, and
shared memory once; the page cache of files, which the kernel gives up first, does not count.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path("/sys/fs/cgroup")
EVERY_S = 0.02
_KILL_WAIT_S = 20.0


@dataclass(slots=True)
class Held:
    """``way``: cgroup-v2, cgroup-v1 or supervisor. ``lost``: processes that the limit has ended, or 1 by the supervisor."""

    way: str
    peak_bytes: int = 0
    lost: int = 0


def way_here() -> str:
    """How a limit can be set on this machine."""
    for way, parent in (("cgroup-v2", ROOT), ("cgroup-v1", ROOT / "memory")):
        if not (parent / ("cgroup.controllers" if way == "cgroup-v2" else "memory.limit_in_bytes")).is_file():
            continue
        probe = parent / f"rollmill-probe-{os.getpid()}"
        try:
            probe.mkdir()
        except OSError:
            continue
        has_limit = (probe / ("memory.max" if way == "cgroup-v2" else "memory.limit_in_bytes")).is_file()
        probe.rmdir()
        if has_limit:
            return way
    return "supervisor"


@contextlib.contextmanager
def limited(
    command: list[str], limit_bytes: int | None, *, environment: dict[str, str], log: Path
) -> Iterator[tuple[subprocess.Popen[bytes], Held]]:
    """Run a command and all its descendants, under a limit if there is one; ends them on the way out."""
    held = Held(way_here())
    group = _group(held.way, limit_bytes)
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, env=environment, stdout=output, stderr=output, start_new_session=True,
            preexec_fn=None if group is None else lambda: (group / "cgroup.procs").write_text("0") and None,
        )  # fmt: skip
    over = threading.Event()
    measure = _of_tree(process.pid) if group is None else _of_group(group, held.way)

    def watch() -> None:
        while not over.wait(EVERY_S):
            held.peak_bytes = max(held.peak_bytes, measure())
            if group is None and limit_bytes is not None and held.peak_bytes > limit_bytes and not held.lost:
                held.lost = 1
                os.killpg(process.pid, signal.SIGKILL)

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        yield process, held
    finally:
        over.set()
        watcher.join()
        if group is not None:
            held.lost = _num_killed(group, held.way)
        _end(process, group)


def _group(way: str, limit_bytes: int | None) -> Path | None:
    if way == "supervisor":
        return None
    group = (ROOT if way == "cgroup-v2" else ROOT / "memory") / f"rollmill-bench-{os.getpid()}-{time.monotonic_ns()}"
    group.mkdir()
    if limit_bytes is not None:
        (group / ("memory.max" if way == "cgroup-v2" else "memory.limit_in_bytes")).write_text(str(limit_bytes))
        with contextlib.suppress(OSError):  # where the kernel does not account for swap
            (group / "memory.swap.max").write_text("0")
    return group


def _of_group(group: Path, way: str) -> Callable[[], int]:
    names = ("anon", "shmem") if way == "cgroup-v2" else ("total_rss", "total_shmem")

    def measure() -> int:
        stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        if names[1] not in stat and way == "cgroup-v1":  # an older kernel: shared memory is mapped cache
            return int(stat["total_rss"]) + int(stat.get("total_mapped_file", 0))
        return sum(int(stat.get(name, 0)) for name in names)

    return measure


def _of_tree(root: int) -> Callable[[], int]:
    """Proportional: memory that several processes share counts once."""

    def measure() -> int:
        total, pending = 0, [root]
        while pending:
            each = Path("/proc") / str(pending.pop())
            try:
                for task in (each / "task").iterdir():
                    pending += map(int, (task / "children").read_text().split())
                lines = (each / "smaps_rollup").read_text().splitlines()
            except (FileNotFoundError, ProcessLookupError, PermissionError):
                continue
            total += sum(1024 * int(line.split()[1]) for line in lines if line.startswith(("Pss_Anon:", "Pss_Shmem:")))
        return total

    return measure


def _num_killed(group: Path, way: str) -> int:
    text = (group / ("memory.events" if way == "cgroup-v2" else "memory.oom_control")).read_text()
    return int(dict(line.split() for line in text.splitlines()).get("oom_kill", 0))


def _end(process: subprocess.Popen[bytes], group: Path | None) -> None:
    """End everything that the command has started."""
    deadline = time.monotonic() + _KILL_WAIT_S
    while group is not None and (pids := (group / "cgroup.procs").read_text().split()):
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
        if time.monotonic() > deadline:
            break
        time.sleep(0.05)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait(_KILL_WAIT_S)
    if group is not None:
        with contextlib.suppress(OSError):
            group.rmdir()
